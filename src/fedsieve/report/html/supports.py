"""The sections about supports: overlap between rounds, gates, support recovery, layers, images of masks."""

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.models.sparse_model import SparseModel
from fedsieve.report.html.elements import Html, PageLimits, TableData, downsample, element, figure, figure_grid, html_table, section
from fedsieve.report.html.png_encoder import heatmap_png, signed_png
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, column_chart, curve_figure, image_chart

IMAGE_SHAPES = {"digits": (8, 8), "mnist": (28, 28), "emnist": (28, 28)}
"""Tasks whose features are pixels."""
MAX_HEATMAP_ROUNDS = 100
NUM_STRONGEST = 20


def stability_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the charts of how supports and gates change."""
    figures = [] if run.supports is None or len(run.supports) < 2 else [overlap_figure(run, limits)]
    if run.gate_histograms is not None and len(run.gate_histograms):
        figures.append(gate_histogram_figure(run, limits))
    missing = "" if figures else element("p", "Supports are stored some seconds after the start of a run.")
    return section("Supports and gates", figure_grid(*figures), missing, level=3)


def overlap_figure(run: RunRecord, limits: PageLimits) -> Html:
    """Return the intersection over union of the supports of every two rounds."""
    assert run.supports is not None
    rounds = downsample(range(len(run.supports)), min(MAX_HEATMAP_ROUNDS, limits.max_points))
    iou = pairwise_iou(run.supports[rounds])
    before = [None, *(float(iou[i, i - 1]) for i in range(1, len(rounds)))]
    stable_from = next((rounds[i] + 1 for i in range(len(rounds)) if (iou[i:, -1] == 1).all()), rounds[-1] + 1)
    description = f"Dark: no overlap (0); bright yellow: the same support (1). The support does not change after round {stable_from}."
    last = len(run.supports)
    chart = image_chart(heatmap_png(iou[::-1]), ("round", 1, last), ("round", 1, last), "overlap of the supports of every two rounds")
    rows = [(rounds[i] + 1, before[i], float(iou[i, -1])) for i in range(len(rounds))]
    numbers = TableData("Overlap of supports (IoU)", ["round", "with the previous row", "with the last row"], rows)
    return figure("Overlap of supports", description, chart, numbers, limits)


def pairwise_iou(supports: np.ndarray) -> np.ndarray:
    """Return the intersection over union of all pairs of rows; a row is a set of indices padded with -1, and two empty sets are equal."""
    is_index = supports >= 0
    kept = is_index.sum(1)
    members = csr_matrix((np.ones(kept.sum()), supports[is_index], np.concatenate(([0], np.cumsum(kept)))))
    intersection = (members @ members.T).toarray()
    union = kept[:, None] + kept - intersection
    return np.divide(intersection, union, out=np.ones_like(intersection), where=union > 0)


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
    closed, opened = int(histograms[-1][0]), int(histograms[-1][-1])
    description = f"On a logarithmic axis. At the end {closed} gates are open with a probability below 5 %, {opened} above 95 %."
    title = "Probability that a gate is open"
    return figure(title, description, element("div", *charts, class_="trio"), TableData(title, columns, rows), limits, wide=True)


def recovery_section(run: RunRecord, limits: PageLimits) -> Html | None:
    """Return the numbers of true, missed and false weights by round, if the true support is known."""
    truth = run.run_info.get("truth")
    if truth is None or run.supports is None:
        return None
    found = np.isin(run.supports, truth).sum(1)
    kept = (run.supports >= 0).sum(1)
    columns = {"found": found.tolist(), "missed": (len(truth) - found).tolist(), "false": (kept - found).tolist()}
    description = f"Of {len(truth)} true weights {columns['found'][-1]} are found and {columns['missed'][-1]} missed; "
    description += f"{columns['false'][-1]} of {kept[-1]} kept weights are false."
    axes = Axes("round", "weights", include_zero=True)
    recovery = curve_figure("Found, missed and false", description, range(1, len(found) + 1), columns, axes, limits)
    return section("Support recovery", figure_grid(recovery), level=3)


def kept_weights_section(run: RunRecord, limits: PageLimits) -> Html | None:
    """Return layers, largest weights, and images if features are pixels."""
    layout = run.run_info.get("layout")
    indices = run.indices
    if indices is None and run.supports is not None:
        indices = run.supports[-1][run.supports[-1] >= 0]
    if layout is None or indices is None:
        return None
    values = run.values if run.values is not None else np.ones(len(indices))
    std = run.run_info.get("feature_std")
    strongest = strongest_weights(layout, indices, values, NUM_STRONGEST, run.run_info.get("truth"), None if std is None else np.array(std))
    figures = [layer_figure(layer_table(layout, indices, values), limits), element("div", html_table(strongest, limits))]
    if run.task in IMAGE_SHAPES:
        figures.append(mask_figure(run, layout, indices, values, limits))
    return section("Kept weights", figure_grid(*figures), level=3)


def layer_table(layout: dict, indices: np.ndarray, values: np.ndarray) -> TableData:
    """Return a table with one row per layer."""
    rows = []
    for name, part in layout["layers"].items():
        in_layer = (indices >= part["start"]) & (indices < part["stop"])
        kept, size = int(in_layer.sum()), part["stop"] - part["start"]
        magnitude = float(np.abs(values[in_layer]).mean()) if kept else None
        rows.append((name, " x ".join(map(str, part["shape"])), size, kept, kept / size, magnitude))
    return TableData("Layers", ["layer", "shape", "weights", "kept", "density", "mean magnitude of kept weights"], rows)


def layer_figure(data: TableData, limits: PageLimits) -> Html:
    """Return the density of each layer as horizontal bars."""
    densities: list[Any] = [row[4] for row in data.rows]
    largest = max(densities, default=0) or 1
    bars = (
        element(
            "li",
            element("span", row[0]),
            element("meter", value=f"{row[4]:.6g}", max=f"{largest:.6g}", aria_label=row[0]),
            element("span", f"{row[4]:.4g}"),
        )
        for row in data.rows
    )
    description = "; ".join(f"{row[0]}: {row[3]} of {row[2]}" for row in data.rows[:12])
    return figure("Density of each layer", description + ".", element("ul", *bars, class_="meters"), data, limits)


def strongest_weights(
    layout: dict,
    indices: np.ndarray,
    values: np.ndarray,
    max_weights: int,
    truth: list[int] | None = None,
    feature_std: np.ndarray | None = None,
) -> TableData:
    """Return the largest weights with their positions, and whether they are true if `truth` is known.

    If `feature_std` is known, weights are multiplied by the standard deviation of their feature, and intercepts are left out.
    """
    true, rows = set(truth or ()), []
    if feature_std is not None:
        counted = indices < layout["size"] - layout["num_ungated"]
        indices, values = indices[counted], values[counted] * feature_std[indices[counted] % len(feature_std)]
    for i in np.argsort(-np.abs(values), kind="stable")[:max_weights]:
        index = int(indices[i])
        layers = ((name, part) for name, part in layout["layers"].items() if part["start"] <= index < part["stop"])
        layer, part = next(layers, (None, {}))
        position = () if layer is None else np.unravel_index(index - part["start"], part["shape"])
        name = "without a gate" if layer is None else f"{layer}[{', '.join(map(str, position))}]"
        rows.append((name, float(values[i]), *([] if truth is None else [index in true])))
    columns = ["position", "weight" if feature_std is None else "weight x sd", *([] if truth is None else ["true"])]
    return TableData(f"The {len(rows)} largest of {len(indices)} weights", columns, rows)


def strongest_features(model: SparseModel, max_features: int) -> TableData:
    """Return the features with the largest weights of a linear model; with several outputs, the norm of a feature's weights counts.

    Weights are multiplied by the standard deviation of their feature if it is known, because features have different units.
    """
    coef, names, first, std = model.coef, model.metadata.features, model.metadata.first_feature_id, model.metadata.feature_std
    shape: Any = coef.shape  # SciPy has no stubs
    has_one_output = shape[0] == 1
    if std is not None:
        coef = csr_matrix(coef.multiply(np.array(std)))
    norms = np.sqrt(np.asarray(coef.multiply(coef).sum(0)).ravel())
    num_used = int((norms > 0).sum())
    order = np.argsort(-norms, kind="stable")[: min(max_features, num_used)]
    weights, num_outputs = coef.toarray()[0] if has_one_output else norms, np.diff(coef.tocsc().indptr)
    labels = [f"x{j + first}" if names is None else names[j] for j in order]
    rows = [(name, float(weights[j]), *([] if has_one_output else [int(num_outputs[j])])) for name, j in zip(labels, order, strict=True)]
    unit = "" if std is None else " x sd"
    columns = ["feature", f"weight{unit}"] if has_one_output else ["feature", f"norm of its weights{unit}", "outputs"]
    return TableData(f"The {len(rows)} strongest of {num_used} used features, of {shape[1]}", columns, rows)


def mask_figure(run: RunRecord, layout: dict, indices: np.ndarray, values: np.ndarray, limits: PageLimits) -> Html:
    """Return the weights of each class as images."""
    part = next(iter(layout["layers"].values()))
    matrix = np.zeros(layout["size"])
    matrix[indices] = values
    matrix = matrix[part["start"] : part["stop"]].reshape(part["shape"])
    counts = [int((row != 0).sum()) for row in matrix]
    images = [signed_png(row.reshape(IMAGE_SHAPES[run.task])) for row in matrix]
    alt_texts = [f"class {i}: {counts[i]} of {row.size} pixels kept" for i, row in enumerate(matrix)]
    cells = [
        element("div", Html(f'<img src="{image}" alt="{alt_text}"/>'), element("span", f"class {i}"))
        for i, (image, alt_text) in enumerate(zip(images, alt_texts, strict=True))
    ]
    rows = [(i, counts[i], int((row > 0).sum()), int((row < 0).sum())) for i, row in enumerate(matrix)]
    numbers = TableData("Pixels kept for each class", ["class", "kept", "positive", "negative"], rows)
    description = f"Blue: positive weights; orange: negative; empty: zero. {min(counts)} to {max(counts)} pixels per class."
    return figure("Mask of each class", description, element("div", *cells, class_="masks"), numbers, limits, wide=True)
