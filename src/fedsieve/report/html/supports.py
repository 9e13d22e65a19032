"""The sections about supports: overlap between rounds, gates, support recovery, layers, images of masks."""

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.models.sparse_model import SparseModel
from fedsieve.report.html import png
from fedsieve.report.html.elements import Html, PageLimits, TableData, downsample, element, figure, figure_grid, html_table, section
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, Line, column_chart, image_chart, line_chart

IMAGE_SHAPES = {"digits": (8, 8), "mnist": (28, 28), "emnist": (28, 28)}
"""Tasks whose features are pixels."""
MAX_HEATMAP_ROUNDS = 100
NUM_STRONGEST = 20


def stability_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the charts of how supports and gates change."""
    drawn = [] if run.supports is None or len(run.supports) < 2 else [overlap_figure(run, limits)]
    if run.gate_histograms is not None and len(run.gate_histograms):
        drawn.append(gate_histogram_figure(run, limits))
    missing = "" if drawn else element("p", "Written with the trace, some seconds into the run.")
    return section("Supports and gates", figure_grid(*drawn), missing, level=3)


def overlap_figure(run: RunRecord, limits: PageLimits) -> Html:
    """Return the intersection over union of the supports of every two rounds."""
    assert run.supports is not None
    rounds = downsample(range(len(run.supports)), min(MAX_HEATMAP_ROUNDS, limits.max_points))
    iou = pairwise_iou(run.supports[rounds])
    before = [None, *(float(iou[i, i - 1]) for i in range(1, len(rounds)))]
    settled = next((rounds[i] + 1 for i in range(len(rounds)) if (iou[i:, -1] == 1).all()), rounds[-1] + 1)
    says = f"Dark is no overlap (0), bright yellow is the same support (1). It no longer changes after round {settled}."
    last = len(run.supports)
    chart = image_chart(png.heatmap_png(iou[::-1]), ("round", 1, last), ("round", 1, last), "overlap of the supports of every two rounds")
    rows = [(rounds[i] + 1, before[i], float(iou[i, -1])) for i in range(len(rounds))]
    numbers = TableData("Overlap of supports (IoU)", ["round", "with the round before it here", "with the last"], rows)
    return figure("Overlap of supports", says, chart, numbers, limits)


def pairwise_iou(supports: np.ndarray) -> np.ndarray:
    """Return the intersection over union of all pairs of rows; a row is a set of indices padded with -1, and two empty sets are equal."""
    there = supports >= 0
    kept = there.sum(1)
    members = csr_matrix((np.ones(kept.sum()), supports[there], np.concatenate(([0], np.cumsum(kept)))))
    both = (members @ members.T).toarray()
    either = kept[:, None] + kept - both
    return np.divide(both, either, out=np.ones_like(both), where=either > 0)


def gate_histogram_figure(run: RunRecord, limits: PageLimits) -> Html:
    """Return the histograms of P(z != 0) at the start, in the middle and at the end."""
    histograms = run.gate_histograms
    assert histograms is not None
    count = len(histograms)
    chosen = dict(zip(("first", "middle", "last"), (0, count // 2, count - 1), strict=True))
    charts = [
        element(
            "div",
            element("p", f"{name} round ({i + 1})", class_="sub"),
            column_chart(histograms[i].tolist(), (0, 1), Axes("P(gate open)", "gates", log_y=True), n),
        )
        for n, (name, i) in enumerate(chosen.items())
    ]
    edges = np.linspace(0, 1, histograms.shape[1] + 1)
    rows = [(float(edges[j]), float(edges[j + 1]), *(int(histograms[i][j]) for i in chosen.values())) for j in range(len(edges) - 1)]
    columns = ["from", "to", *(f"round {i + 1}" for i in chosen.values())]
    ends = histograms[-1]
    says = f"On a logarithmic axis. At the end {int(ends[0])} gates are open with a chance below 5 %, {int(ends[-1])} with one above 95 %."
    drawing = element("div", *charts, class_="trio")
    return figure("How open the gates are", says, drawing, TableData("Gates by chance to be open", columns, rows), limits, wide=True)


def recovery_section(run: RunRecord, limits: PageLimits) -> Html | None:
    """Return the numbers of true, missed and false weights by round, if the true support is known."""
    truth = run.run_info.get("truth")
    if truth is None or run.supports is None:
        return None
    found = np.isin(run.supports, truth).sum(1)
    kept = (run.supports >= 0).sum(1)
    columns = {"found": found, "missed": len(truth) - found, "false": kept - found}
    rounds = list(range(1, len(found) + 1))
    lines = [Line(name, rounds, values.tolist()) for name, values in columns.items()]
    right, wrong = found[-1], kept[-1] - found[-1]
    says = f"Of {len(truth)} true weights {right} found, {len(truth) - right} missed; {wrong} of {kept[-1]} kept are false."
    drawn = figure(
        "The truth per round",
        says,
        line_chart(lines, Axes("round", "weights", include_zero=True), max_points=limits.max_points),
        TableData("Found, missed and false", ["round", *columns], [(t, *(int(v[t - 1]) for v in columns.values())) for t in rounds]),
        limits,
    )
    return section("Support recovery", figure_grid(drawn), level=3)


def kept_weights_section(run: RunRecord, limits: PageLimits) -> Html | None:
    """Return layers, largest weights, and images if features are pixels."""
    layout = run.run_info.get("layout")
    index = run.indices
    if index is None and run.supports is not None:
        index = run.supports[-1][run.supports[-1] >= 0]
    if layout is None or index is None:
        return None
    value = run.values if run.values is not None else np.ones(len(index))
    spread = run.run_info.get("feature_std")
    strong = strongest_weights(layout, index, value, NUM_STRONGEST, run.run_info.get("truth"), None if spread is None else np.array(spread))
    parts = [layer_table(layout, index, value), strong]
    drawn = [layer_figure(parts[0], limits), element("div", html_table(parts[1], limits))]
    if run.task in IMAGE_SHAPES:
        drawn.append(mask_figure(run, layout, index, value, limits))
    return section("What was kept", figure_grid(*drawn), level=3)


def layer_table(layout: dict, indices: np.ndarray, values: np.ndarray) -> TableData:
    """Return a table with one row per layer."""
    rows = []
    for name, part in layout["layers"].items():
        inside = (indices >= part["start"]) & (indices < part["stop"])
        kept, size = int(inside.sum()), part["stop"] - part["start"]
        strength = float(np.abs(values[inside]).mean()) if kept else None
        rows.append((name, " x ".join(map(str, part["shape"])), size, kept, kept / size, strength))
    return TableData("Layers", ["layer", "shape", "weights", "kept", "density", "mean size of those kept"], rows)


def layer_figure(data: TableData, limits: PageLimits) -> Html:
    """Return the density of each layer as horizontal bars."""
    densities: list[Any] = [row[4] for row in data.rows]
    most = max(densities, default=0) or 1
    bars = (
        element(
            "li",
            element("span", row[0]),
            element("meter", value=f"{row[4]:.6g}", max=f"{most:.6g}", aria_label=row[0]),
            element("span", f"{row[4]:.4g}"),
        )
        for row in data.rows
    )
    says = "; ".join(f"{row[0]}: {row[3]} of {row[2]}" for row in data.rows[:12])
    return figure("Density of each layer", says + ".", element("ul", *bars, class_="meters"), data, limits)


def strongest_weights(
    layout: dict,
    indices: np.ndarray,
    values: np.ndarray,
    max_weights: int,
    truth: list[int] | None = None,
    feature_std: np.ndarray | None = None,
) -> TableData:
    """The largest weights, where they stand, and whether they are true where that is known.

    Where the spread of features is known, the largest times the spread of their feature, and intercepts are left out.
    """
    true, rows = set(truth or ()), []
    if feature_std is not None:
        counted = indices < layout["size"] - layout["num_ungated"]
        indices, values = indices[counted], values[counted] * feature_std[indices[counted] % len(feature_std)]
    for i in np.argsort(-np.abs(values), kind="stable")[:max_weights]:
        at = int(indices[i])
        home = next(((n, p) for n, p in layout["layers"].items() if p["start"] <= at < p["stop"]), None)
        place = "free" if home is None else f"{home[0]}[{', '.join(map(str, np.unravel_index(at - home[1]['start'], home[1]['shape'])))}]"
        rows.append((place, float(values[i]), *([] if truth is None else [at in true])))
    columns = ["place", "weight" if feature_std is None else "weight x sd", *([] if truth is None else ["true"])]
    return TableData(f"The {len(rows)} strongest of {len(indices)} weights", columns, rows)


def strongest_features(model: SparseModel, max_features: int) -> TableData:
    """The features a linear model leans on: their weight where it has one output, else the norm of their weights over all.

    Weights of features in different units compare only times the spread of their feature, where that is known.
    """
    coef, names, first, spread = model.coef, model.metadata.features, model.metadata.first_feature_id, model.metadata.feature_std
    shape: Any = coef.shape  # SciPy has no stubs
    single = shape[0] == 1
    if spread is not None:
        coef = csr_matrix(coef.multiply(np.array(spread)))
    strength = np.sqrt(np.asarray(coef.multiply(coef).sum(0)).ravel())
    used = int((strength > 0).sum())
    order = np.argsort(-strength, kind="stable")[: min(max_features, used)]
    weights, outputs = coef.toarray()[0] if single else strength, np.diff(coef.tocsc().indptr)
    called = [f"x{j + first}" if names is None else names[j] for j in order]
    rows = [(name, float(weights[j]), *([] if single else [int(outputs[j])])) for name, j in zip(called, order, strict=True)]
    by = "" if spread is None else " x sd"
    columns = ["feature", f"weight{by}"] if single else ["feature", f"norm of its weights{by}", "outputs it serves"]
    return TableData(f"The {len(rows)} strongest of {used} features in use, of {shape[1]}", columns, rows)


def mask_figure(run: RunRecord, layout: dict, indices: np.ndarray, values: np.ndarray, limits: PageLimits) -> Html:
    """Return the weights of each class as images."""
    part = next(iter(layout["layers"].values()))
    matrix = np.zeros(layout["size"])
    matrix[indices] = values
    matrix = matrix[part["start"] : part["stop"]].reshape(part["shape"])
    counts = [int((row != 0).sum()) for row in matrix]
    cells = [
        element(
            "div",
            Html(
                f'<img src="{png.signed_png(row.reshape(IMAGE_SHAPES[run.task]))}" alt="class {i}: {counts[i]} of {row.size} pixels kept"/>'
            ),
            element("span", f"class {i}"),
        )
        for i, row in enumerate(matrix)
    ]
    rows = [(i, counts[i], int((row > 0).sum()), int((row < 0).sum())) for i, row in enumerate(matrix)]
    numbers = TableData("Pixels kept for each class", ["class", "kept", "speak for it", "speak against it"], rows)
    says = f"Blue pixels speak for the class, orange against it; empty ones were dropped. {min(counts)} to {max(counts)} pixels a class."
    return figure("The mask of each class", says, element("div", *cells, class_="masks"), numbers, limits, wide=True)
