"""Which weights were kept: overlaps between rounds, gates, what was found of the truth, layers, pictures of masks."""

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.models.sparse_model import Model
from fedsieve.report.html import png
from fedsieve.report.html.elements import Budget, Markup, Table, figure, figures, section, table, tag, thinned
from fedsieve.report.html.run_record import Record
from fedsieve.report.html.svg import Axes, Line, column_chart, image_chart, line_chart

IMAGES = {"digits": (8, 8), "mnist": (28, 28), "emnist": (28, 28)}
"""Tasks whose features are pixels."""
HEAT_ROUNDS = 100
STRONGEST = 20


def stability(run: Record, budget: Budget) -> Markup:
    """How much supports and gates still move."""
    drawn = [] if run.supports is None or len(run.supports) < 2 else [overlap(run, budget)]
    if run.histograms is not None and len(run.histograms):
        drawn.append(gate_histograms(run, budget))
    missing = "" if drawn else tag("p", "Written with the trace, some seconds into the run.")
    return section("Supports and gates", figures(*drawn), missing, level=3)


def overlap(run: Record, budget: Budget) -> Markup:
    """|A and B| / |A or B| of the supports of every two rounds."""
    rounds = thinned(range(len(run.supports)), min(HEAT_ROUNDS, budget.points))
    iou = ious(run.supports[rounds])
    before = [None, *(float(iou[i, i - 1]) for i in range(1, len(rounds)))]
    settled = next((rounds[i] + 1 for i in range(len(rounds)) if (iou[i:, -1] == 1).all()), rounds[-1] + 1)
    says = f"Dark is no overlap (0), bright yellow is the same support (1). It no longer changes after round {settled}."
    last = len(run.supports)
    chart = image_chart(png.heat(iou[::-1]), ("round", 1, last), ("round", 1, last), "overlap of the supports of every two rounds")
    rows = [(rounds[i] + 1, before[i], float(iou[i, -1])) for i in range(len(rounds))]
    numbers = Table("Overlap of supports (IoU)", ["round", "with the round before it here", "with the last"], rows)
    return figure("Overlap of supports", says, chart, numbers, budget)


def ious(supports: np.ndarray) -> np.ndarray:
    """Intersection over union of the rows, each a set of indices that may end in -1; two empty sets are the same."""
    there = supports >= 0
    kept = there.sum(1)
    members = csr_matrix((np.ones(kept.sum()), supports[there], np.concatenate(([0], np.cumsum(kept)))))
    both = (members @ members.T).toarray()
    either = kept[:, None] + kept - both
    return np.divide(both, either, out=np.ones_like(both), where=either > 0)


def gate_histograms(run: Record, budget: Budget) -> Markup:
    """How P(z != 0) is spread at the start, in the middle, at the end."""
    count = len(run.histograms)
    chosen = dict(zip(("first", "middle", "last"), (0, count // 2, count - 1), strict=True))
    charts = [
        tag(
            "div",
            tag("p", f"{name} round ({i + 1})", class_="sub"),
            column_chart(run.histograms[i].tolist(), (0, 1), Axes("P(gate open)", "gates", log_y=True), n),
        )
        for n, (name, i) in enumerate(chosen.items())
    ]
    edges = np.linspace(0, 1, run.histograms.shape[1] + 1)
    rows = [(float(edges[j]), float(edges[j + 1]), *(int(run.histograms[i][j]) for i in chosen.values())) for j in range(len(edges) - 1)]
    columns = ["from", "to", *(f"round {i + 1}" for i in chosen.values())]
    ends = run.histograms[-1]
    says = f"On a logarithmic axis. At the end {int(ends[0])} gates are open with a chance below 5 %, {int(ends[-1])} with one above 95 %."
    drawing = tag("div", *charts, class_="trio")
    return figure("How open the gates are", says, drawing, Table("Gates by chance to be open", columns, rows), budget, wide=True)


def recovery(run: Record, budget: Budget) -> Markup | None:
    """Found, missed and false weights of every round, where the truth is known."""
    truth = run.about.get("truth")
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
        line_chart(lines, Axes("round", "weights", zero=True), points=budget.points),
        Table("Found, missed and false", ["round", *columns], [(t, *(int(v[t - 1]) for v in columns.values())) for t in rounds]),
        budget,
    )
    return section("Support recovery", figures(drawn), level=3)


def what_was_kept(run: Record, budget: Budget) -> Markup | None:
    """Layers, the strongest weights, and pictures where features are pixels."""
    layout = run.about.get("layout")
    index = run.index
    if index is None and run.supports is not None:
        index = run.supports[-1][run.supports[-1] >= 0]
    if layout is None or index is None:
        return None
    value = run.value if run.value is not None else np.ones(len(index))
    spread = run.about.get("spread")
    strong = strongest_weights(layout, index, value, STRONGEST, run.about.get("truth"), None if spread is None else np.array(spread))
    parts = [table_of_layers(layout, index, value), strong]
    drawn = [figure_of_layers(parts[0], budget), tag("div", table(parts[1], budget))]
    if run.task in IMAGES:
        drawn.append(masks(run, layout, index, value, budget))
    return section("What was kept", figures(*drawn), level=3)


def table_of_layers(layout: dict, index: np.ndarray, value: np.ndarray) -> Table:
    """One row a layer."""
    rows = []
    for name, part in layout["layers"].items():
        inside = (index >= part["start"]) & (index < part["stop"])
        kept, size = int(inside.sum()), part["stop"] - part["start"]
        strength = float(np.abs(value[inside]).mean()) if kept else None
        rows.append((name, " x ".join(map(str, part["shape"])), size, kept, kept / size, strength))
    return Table("Layers", ["layer", "shape", "weights", "kept", "density", "mean size of those kept"], rows)


def figure_of_layers(data: Table, budget: Budget) -> Markup:
    """The density of each layer as bars of text and length: they stay readable with many layers."""
    most = max((row[4] for row in data.rows), default=0) or 1
    bars = (
        tag(
            "li",
            tag("span", row[0]),
            tag("meter", value=f"{row[4]:.6g}", max=f"{most:.6g}", aria_label=row[0]),
            tag("span", f"{row[4]:.4g}"),
        )
        for row in data.rows
    )
    says = "; ".join(f"{row[0]}: {row[3]} of {row[2]}" for row in data.rows[:12])
    return figure("Density of each layer", says + ".", tag("ul", *bars, class_="meters"), data, budget)


def strongest_weights(
    layout: dict, index: np.ndarray, value: np.ndarray, most: int, truth: list[int] | None = None, spread: np.ndarray | None = None
) -> Table:
    """The largest weights, where they stand, and whether they are true where that is known.

    Where the spread of features is known, the largest times the spread of their feature, and intercepts are left out.
    """
    true, rows = set(truth or ()), []
    if spread is not None:
        counted = index < layout["size"] - layout["free"]
        index, value = index[counted], value[counted] * spread[index[counted] % len(spread)]
    for i in np.argsort(-np.abs(value), kind="stable")[:most]:
        at = int(index[i])
        home = next(((n, p) for n, p in layout["layers"].items() if p["start"] <= at < p["stop"]), None)
        place = "free" if home is None else f"{home[0]}[{', '.join(map(str, np.unravel_index(at - home[1]['start'], home[1]['shape'])))}]"
        rows.append((place, float(value[i]), *([] if truth is None else [at in true])))
    columns = ["place", "weight" if spread is None else "weight x sd", *([] if truth is None else ["true"])]
    return Table(f"The {len(rows)} strongest of {len(index)} weights", columns, rows)


def strongest_features(model: Model, most: int) -> Table:
    """The features a linear model leans on: their weight where it has one output, else the norm of their weights over all.

    Weights of features in different units compare only times the spread of their feature, where that is known.
    """
    coef, names, first, spread = model.coef, model.card.features, model.card.first, model.card.spread
    single = coef.shape[0] == 1
    if spread is not None:
        coef = csr_matrix(coef.multiply(np.array(spread)))
    strength = np.sqrt(np.asarray(coef.multiply(coef).sum(0)).ravel())
    used = int((strength > 0).sum())
    order = np.argsort(-strength, kind="stable")[: min(most, used)]
    weights, outputs = coef.toarray()[0] if single else strength, np.diff(coef.tocsc().indptr)
    called = [f"x{j + first}" if names is None else names[j] for j in order]
    rows = [(name, float(weights[j]), *([] if single else [int(outputs[j])])) for name, j in zip(called, order, strict=True)]
    by = "" if spread is None else " x sd"
    columns = ["feature", f"weight{by}"] if single else ["feature", f"norm of its weights{by}", "outputs it serves"]
    return Table(f"The {len(rows)} strongest of {used} features in use, of {coef.shape[1]}", columns, rows)


def masks(run: Record, layout: dict, index: np.ndarray, value: np.ndarray, budget: Budget) -> Markup:
    """The weights of each class as a picture of pixels."""
    part = next(iter(layout["layers"].values()))
    matrix = np.zeros(layout["size"])
    matrix[index] = value
    matrix = matrix[part["start"] : part["stop"]].reshape(part["shape"])
    counts = [int((row != 0).sum()) for row in matrix]
    cells = [
        tag(
            "div",
            Markup(f'<img src="{png.signed(row.reshape(IMAGES[run.task]))}" alt="class {i}: {counts[i]} of {row.size} pixels kept"/>'),
            tag("span", f"class {i}"),
        )
        for i, row in enumerate(matrix)
    ]
    rows = [(i, counts[i], int((row > 0).sum()), int((row < 0).sum())) for i, row in enumerate(matrix)]
    numbers = Table("Pixels kept for each class", ["class", "kept", "speak for it", "speak against it"], rows)
    says = f"Blue pixels speak for the class, orange against it; empty ones were dropped. {min(counts)} to {max(counts)} pixels a class."
    return figure("The mask of each class", says, tag("div", *cells, class_="masks"), numbers, budget, wide=True)
