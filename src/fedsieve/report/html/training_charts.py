"""The sections about training: headline numbers, metric, densities, multiplier, bytes."""

from fedsieve.formatting import format_bytes, format_number, format_seconds
from fedsieve.report.html.elements import Html, PageLimits, TableData, definition_list, element, figure, figure_grid, section
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, Mark, curve_figure, stacked_bar_chart

MESSAGE_PARTS = ("weights", "gates", "positions", "scalars", "header")
DIRECTIONS = ("up", "down")
METRIC_LABELS = {"r2": "R2", "accuracy": "accuracy", "micro_f1": "micro F1"}
MIN_DRAWN_R2 = -1.0
"""Smaller values of R2 are not drawn: they would compress the rest."""
MIN_LOG_AXIS_RATIO = 20.0
"""A larger ratio of densities is drawn on a logarithmic axis."""
DENSITY_TOLERANCE = 0.02
"""The density of messages is drawn only if it differs from the target by more than this."""


def headline_section(run: RunRecord) -> Html:
    """Return the headline numbers."""
    result = run.result or {}
    value, best = run.last(run.metric), best_possible(run)
    metric, current = METRIC_LABELS.get(run.metric, run.metric), "none yet" if value is None else format_number(value)
    cards = [(metric, current, "" if best is None else f"best possible {format_number(best)}")]
    if result:
        cards.append(("weights kept", f"{result['nonzero']} of {result['size']}", f"density {result['density']:.4g}, exactly"))
    if (tdr := run.last("tdr")) is not None:
        cards.append(
            ("kept weights that are true", f"{100 * tdr:.0f} %", f"{100 * (run.last('recall') or 0):.0f} % of the true ones found")
        )
    dense = dense_bytes(run)
    sent = float(run.cumulative_bytes[-1]) if len(run.cumulative_bytes) else 0.0
    saving = f"{dense / sent:.3g} times fewer than dense ({format_bytes(dense)})" if dense and sent else ""
    cards.append(("bytes sent", format_bytes(sent), saving))
    cards.append(("rounds", f"{len(run.rows)} of {run.num_rounds}", "finished" if run.is_finished else "not finished"))
    if (epsilon := run.last("epsilon")) is not None:
        cards.append(("epsilon", format_number(epsilon), "privacy of one client"))
    if run.rows:
        cards.append(("time", f"{format_seconds(run.last('seconds') or 0)} s", ""))
    entries = (element("div", element("dt", name), element("dd", element("b", text), element("small", more))) for name, text, more in cards)
    notes = [element("p", result[name], class_="note") for name in ("data", "note") if result.get(name)]
    return section("Summary", element("dl", *entries, class_="cards"), *notes, level=3)


def best_possible(run: RunRecord) -> float | None:
    """Return the metric of the best possible model, if it is known."""
    return (run.result or {}).get("oracle_value", run.run_info.get("oracle_value"))


def dense_bytes(run: RunRecord) -> float:
    """Return the bytes of dense messages in the same rounds; 0 if unknown."""
    if run.result and run.result.get("bytes_dense"):
        return float(run.result["bytes_dense"])
    return float(run.run_info.get("bytes_dense", 0)) * len(run.rows)


def quality_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the metric by round and by bytes."""
    name = METRIC_LABELS.get(run.metric, run.metric)
    values, dense_values = run.column(run.metric), run.column("dense_value")
    if values[-1] is None:
        return section("Quality", element("p", f"The last round has no {name}."), level=3)
    best = best_possible(run)
    marks = [] if best is None else [Mark(best, "best possible")]
    columns = {"sparse model": values} | ({"before projection": dense_values} if any(v is not None for v in dense_values) else {})
    curves = {
        key: [None if v is None or (run.metric == "r2" and v < MIN_DRAWN_R2) else v for v in column] for key, column in columns.items()
    }
    hidden = "; rounds below -1 are not drawn" if curves["sparse model"] != values else ""
    highest = max(v for v in values if v is not None)
    description = f"{name} {format_number(values[-1])} after round {run.round_numbers[-1]}, highest {format_number(highest)}{hidden}."
    axes = Axes("round", name)
    per_round = curve_figure(
        f"{name} per round", description, run.round_numbers, columns, axes, limits, curves=curves, horizontal_marks=marks
    )
    sent = [int(v) for v in run.cumulative_bytes]
    per_byte = curve_figure(
        f"{name} per byte",
        f"{format_bytes(sent[-1])} sent in both directions.",
        sent,
        {name: values},
        Axes("bytes sent, up and down", name),
        limits,
        curves={name: curves["sparse model"]},
        horizontal_marks=marks,
    )
    return section("Quality", figure_grid(per_round, per_byte), level=3)


def density_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the densities by round with the target, and the multiplier."""
    target = float(run.config.get("density", 0))
    columns = {"expected": run.column("expected_density"), "at test time": run.column("test_density")}
    sent = run.column("message_density")
    if not any(sent):  # the schedule of the algorithm, if rounds do not report their density
        planned: dict[int, float] = dict(enumerate(run.run_info.get("message_density", [])))
        sent = [planned.get(number) for number in range(len(run.rows))]
    if any(abs(density - target) > DENSITY_TOLERANCE * target for density in sent if density is not None):
        columns["messages"] = sent
    columns = {key: column for key, column in columns.items() if any(v is not None for v in column)}
    final = f" The finished model keeps {run.result['density']:.4g}." if run.result else ""
    if not columns:
        return section("Density", element("p", f"Target {target:g}.{final} This algorithm has no gates."), level=3)
    known = [v for column in columns.values() for v in column if v] + [target]
    last = ", ".join(f"{key} {column[-1]:.4g}" for key, column in columns.items() if column[-1] is not None)
    densities = curve_figure(
        "Density per round",
        f"Target {target:g}; in the last round {last}.{final}",
        run.round_numbers,
        columns,
        Axes("round", "density", log_y=min(known) > 0 and max(known) / min(known) > MIN_LOG_AXIS_RATIO),
        limits,
        horizontal_marks=[Mark(target, f"target {target:g}")],
        vertical_marks=milestone_marks(run),
    )
    return section("Density and constraint", figure_grid(densities, *dual_figures(run, limits)), level=3)


def milestone_marks(run: RunRecord) -> list[Mark]:
    """Return the rounds in which the algorithm changes its behaviour."""
    marks = [Mark(part * run.num_rounds, label) for label, part in run.run_info.get("milestones", {}).items() if 0 < part < 1]
    return [mark for mark in marks if mark.value <= len(run.rows)]


def dual_figures(run: RunRecord, limits: PageLimits) -> list[Html]:
    """Return the charts of the multiplier and the violation."""
    descriptions = {
        "multiplier": "The weight of the constraint in the loss (sieve and the mirror dual: what is subtracted from log-alpha).",
        "violation": "Expected density minus the target; 0 if the constraint holds exactly.",
    }
    figures = []
    for name, description in descriptions.items():
        column = run.column(name)
        if any(v is not None for v in column):
            title, text = f"{name.capitalize()} per round", f"{description} Last: {column[-1]:.4g}."
            axes = Axes("round", name)
            figures.append(curve_figure(title, text, run.round_numbers, {name: column}, axes, limits, horizontal_marks=[Mark(0, "")]))
    return figures


def traffic_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the bytes by part, with the paper's formula and dense messages."""
    parts = [part for part in MESSAGE_PARTS if f"bytes_up_{part}" in run.rows[0]]
    figures = [total_bytes_figure(run, limits)]
    if parts:
        figures += [message_parts_figure(run, parts, limits), bytes_per_round_figure(run, parts, limits)]
    return section("Bytes", figure_grid(*figures), level=3)


def total_bytes_figure(run: RunRecord, limits: PageLimits) -> Html:
    """Return the bytes of all rounds, as sent, by the paper's formula, and of dense messages."""
    totals = {direction: run.total(f"bytes_{direction}") for direction in DIRECTIONS}
    dense = dense_bytes(run) / 2
    bars = []
    for direction, total in totals.items():
        bars += [(f"{direction}: sent", total), (f"{direction}: by the paper's formula", run.total(f"bytes_{direction}_paper_formula"))]
        bars += [(f"{direction}: dense", dense)] if dense else []
    sampled = " Estimated from one reply per exchange." if run.config.get("byte_counting") == "sampled" else ""
    description = f"{format_bytes(totals['up'])} up, {format_bytes(totals['down'])} down.{sampled}"
    alt_text = "; ".join(f"{name} {format_bytes(value)}" for name, value in bars)
    return figure(
        "Bytes sent",
        f"{description} The paper's formula counts four bytes per value and no positions.",
        stacked_bar_chart([(name, [value]) for name, value in bars], ["bytes"], alt_text),
        TableData("Bytes sent", ["messages", "bytes"], [(name, int(value)) for name, value in bars]),
        limits,
    )


def message_parts_figure(run: RunRecord, parts: list[str], limits: PageLimits) -> Html:
    """Return the bytes of each part of the messages."""
    by_part = {direction: [run.total(f"bytes_{direction}_{part}") for part in parts] for direction in DIRECTIONS}
    rows = [(direction, part, v) for direction, values in by_part.items() for part, v in zip(parts, values, strict=True)]
    sizes = {d: ", ".join(f"{part} {format_bytes(v)}" for other, part, v in rows if other == d and v) or "nothing" for d in DIRECTIONS}
    description = f"Up: {sizes['up']}. Down: {sizes['down']}."
    chart = stacked_bar_chart(list(by_part.items()), parts, description)
    numbers = TableData("Bytes by part", ["direction", "part", "bytes"], rows)
    return figure("Bytes by part", f"{description} The header includes the checksum.", chart, numbers, limits)


def bytes_per_round_figure(run: RunRecord, parts: list[str], limits: PageLimits) -> Html:
    """Return the bytes sent in each round; its table also has the parts."""
    totals = {direction: run.column(f"bytes_{direction}") for direction in DIRECTIONS}
    columns = {f"{direction} {part}": run.column(f"bytes_{direction}_{part}") for direction in DIRECTIONS for part in parts}
    axes = Axes("round", "bytes", include_zero=True)
    title = "Bytes per round"
    return curve_figure(
        title, "Bytes sent by all clients and to all clients.", run.round_numbers, totals | columns, axes, limits, curves=totals
    )


def reproduction_section(run: RunRecord, toml: str, command: str) -> Html:
    """Return how to reproduce the run: command, settings and environment."""
    environment = run.run_info.get("environment")
    return section(
        "Reproduce this run",
        element("pre", command, class_="command", tabindex="0", role="region", aria_label="command"),
        element("details", element("summary", "Settings"), element("pre", toml, tabindex="0", role="region", aria_label="settings")),
        definition_list(environment.items()) if environment else element("p", "The environment of this run was not recorded."),
        level=3,
    )
