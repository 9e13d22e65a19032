"""The sections about training: headline numbers, metric, densities, dual variable, bytes."""

from fedsieve.formatting import format_bytes, format_number, format_seconds
from fedsieve.report.html.elements import Html, PageLimits, TableData, definition_list, element, figure, figure_grid, section
from fedsieve.report.html.run_record import RunRecord
from fedsieve.report.html.svg import Axes, Line, Mark, line_chart, stacked_bar_chart

MESSAGE_PARTS = {
    "weights": "weights",
    "gates": "gates",
    "positions": "positions",
    "scalars": "scalars",
    "header": "header and checksum",
}
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
    value, best = run.last(run.metric), result.get("oracle_value", run.run_info.get("oracle_value"))
    cards = [
        (
            METRIC_LABELS.get(run.metric, run.metric),
            "none yet" if value is None else format_number(value),
            f"best possible {format_number(best)}" if best is not None else "",
        )
    ]
    if result:
        cards.append(("weights kept", f"{result['nonzero']} of {result['size']}", f"density {result['density']:.4g}, exactly"))
    if (tdr := run.last("tdr")) is not None:
        cards.append(("of these right", f"{100 * tdr:.0f} %", f"{100 * (run.last('recall') or 0):.0f} % of the true ones found"))
    dense = dense_bytes(run)
    sent = float(run.cumulative_bytes[-1]) if len(run.cumulative_bytes) else 0.0
    cards.append(
        ("bytes sent", format_bytes(sent), f"{dense / sent:.3g} times fewer than dense ({format_bytes(dense)})" if dense and sent else "")
    )
    cards.append(("rounds", f"{len(run.rows)} of {run.rounds}", run_status(run)))
    if (epsilon := run.last("epsilon")) is not None:
        cards.append(("epsilon", format_number(epsilon), "privacy of one client"))
    if run.rows:
        cards.append(("time", f"{format_seconds(run.last('seconds') or 0)} s", ""))
    drawn = (element("div", element("dt", name), element("dd", element("b", said), element("small", more))) for name, said, more in cards)
    note = element("p", result["note"], class_="note") if result.get("note") else ""
    return section("In short", element("dl", *drawn, class_="cards"), note, level=3)


def run_status(run: RunRecord) -> str:
    """Return whether the run is finished."""
    return "finished" if run.is_finished else "under way, or broken off"


def dense_bytes(run: RunRecord) -> float:
    """Return the bytes of dense messages in the same rounds; 0 if unknown."""
    if run.result and run.result.get("bytes_dense"):
        return float(run.result["bytes_dense"])
    return float(run.run_info.get("bytes_dense", 0)) * len(run.rows)


def quality_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the metric by round and by bytes."""
    name = METRIC_LABELS.get(run.metric, run.metric)
    rounds, values, dense_value = [row["round"] for row in run.rows], run.column(run.metric), run.column("dense_value")
    if values[-1] is None:
        return section("Quality", element("p", f"The last round has no {name}."), level=3)
    best = run.run_info.get("oracle_value", (run.result or {}).get("oracle_value"))
    across = [Mark(best, "best possible")] if best is not None else []
    lines = {"sparse model": values} | ({"before the final cut": dense_value} if any(v is not None for v in dense_value) else {})
    drawn = {key: [None if v is None or (run.metric == "r2" and v < MIN_DRAWN_R2) else v for v in column] for key, column in lines.items()}
    hidden = "; rounds below -1 are not drawn" if drawn["sparse model"] != values else ""
    highest = max(v for v in values if v is not None)
    says = f"{name} {format_number(values[-1])} after round {rounds[-1]}, highest {format_number(highest)}{hidden}."
    per_round = figure(
        f"{name} per round",
        says,
        line_chart(
            [Line(key, rounds, v) for key, v in drawn.items()], Axes("round", name), horizontal_marks=across, max_points=limits.max_points
        ),
        TableData(f"{name} per round", ["round", *lines], list(zip(rounds, *lines.values(), strict=True))),
        limits,
    )
    spent = [int(v) for v in run.cumulative_bytes]
    per_byte = figure(
        f"{name} per byte",
        f"{format_bytes(spent[-1])} sent both ways.",
        line_chart(
            [Line(name, spent, drawn["sparse model"])],
            Axes("bytes sent, both ways", name),
            horizontal_marks=across,
            max_points=limits.max_points,
        ),
        TableData(f"{name} per byte", ["bytes", name], list(zip(spent, values, strict=True))),
        limits,
    )
    return section("Quality", figure_grid(per_round, per_byte), level=3)


def density_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the densities by round with the target, and the dual variable."""
    rounds, target = [row["round"] for row in run.rows], float(run.config.get("density", 0))
    columns = {"expected": run.column("expected_density"), "at test time": run.column("test_density")}
    sent = run.column("message_density")
    if not any(sent):  # the schedule of the algorithm, if rounds do not report their density
        sent = run.run_info.get("message_density", [])[: len(rounds)]
    if any(abs(density - target) > DENSITY_TOLERANCE * target for density in sent if density is not None):
        columns["messages"] = sent
    columns = {key: column for key, column in columns.items() if any(v is not None for v in column)}
    kept = run.result["density"] if run.result else None
    end = f" The finished model keeps {kept:.4g}." if kept is not None else ""
    if not columns:
        return section("Density", element("p", f"Target {target:g}.{end} This algorithm has no gates."), level=3)
    known = [v for column in columns.values() for v in column if v] + [target]
    says = ", ".join(f"{key} {column[-1]:.4g}" for key, column in columns.items() if column[-1] is not None)
    drawn = figure(
        "Density per round",
        f"Target {target:g}; in the last round {says}.{end}",
        line_chart(
            [Line(key, rounds, column) for key, column in columns.items()],
            Axes("round", "density", log_y=min(known) > 0 and max(known) / min(known) > MIN_LOG_AXIS_RATIO, include_zero=False),
            horizontal_marks=[Mark(target, f"target {target:g}")],
            vertical_marks=milestone_marks(run),
            max_points=limits.max_points,
        ),
        TableData("Density per round", ["round", *columns], list(zip(rounds, *columns.values(), strict=True))),
        limits,
    )
    return section("Density and constraint", figure_grid(drawn, *dual_figures(run, limits)), level=3)


def milestone_marks(run: RunRecord) -> list[Mark]:
    """Return the rounds in which the algorithm changes its behaviour."""
    found = [Mark(part * run.rounds, says) for says, part in run.run_info.get("milestones", {}).items() if 0 < part < 1]
    return [mark for mark in found if mark.value <= len(run.rows)]


def dual_figures(run: RunRecord, limits: PageLimits) -> list[Html]:
    """Return the charts of the multiplier and the violation."""
    out = []
    for name, says in (
        ("multiplier", "What the constraint weighs in the loss (for sieve and the mirror dual: what it takes from log-alpha)."),
        ("violation", "Expected density less the target; 0 where the constraint holds exactly."),
    ):
        column, rounds = run.column(name), [row["round"] for row in run.rows]
        if any(v is not None for v in column):
            chart = line_chart(
                [Line(name, rounds, column)], Axes("round", name), horizontal_marks=[Mark(0, "")], max_points=limits.max_points
            )
            numbers = TableData(f"{name} per round", ["round", name], list(zip(rounds, column, strict=True)))
            out.append(figure(name.capitalize(), f"{says} Last: {column[-1]:.4g}.", chart, numbers, limits))
    return out


def traffic_section(run: RunRecord, limits: PageLimits) -> Html:
    """Return the bytes by part, with the paper's formula and dense messages."""
    parts = {key: says for key, says in MESSAGE_PARTS.items() if f"bytes_up_{key}" in run.rows[0]}
    split = {way: [run.total(f"bytes_{way}_{key}") for key in parts] for way in ("up", "down")}
    whole = {way: run.total(f"bytes_{way}") for way in ("up", "down")}
    dense = dense_bytes(run) / 2
    bars = []
    for way in ("up", "down"):
        bars += [(f"{way}: sent", whole[way]), (f"{way}: by the paper's formula", run.total(f"bytes_{way}_paper_formula"))]
        bars += [(f"{way}: dense", dense)] if dense else []
    sampled = " Estimated from one reply an exchange." if run.config.get("byte_counting") == "sampled" else ""
    totals = figure(
        "Bytes sent",
        f"{format_bytes(whole['up'])} up, {format_bytes(whole['down'])} down.{sampled} "
        "The paper's formula counts four bytes a value and no positions.",
        stacked_bar_chart(
            [(name, [value]) for name, value in bars], ["bytes"], "; ".join(f"{name} {format_bytes(value)}" for name, value in bars)
        ),
        TableData("Bytes sent", ["what", "bytes"], [(name, int(value)) for name, value in bars]),
        limits,
    )
    if not parts:
        return section("Bytes", figure_grid(totals), level=3)
    said = {way: ", ".join(f"{says} {format_bytes(v)}" for says, v in zip(parts.values(), split[way], strict=True) if v) for way in split}
    rows = [(way, says, v) for way in split for says, v in zip(parts.values(), split[way], strict=True)]
    shares = figure(
        "What they are made of",
        f"Up: {said['up'] or 'nothing'}. Down: {said['down'] or 'nothing'}.",
        stacked_bar_chart([(way, split[way]) for way in split], list(parts.values()), f"up: {said['up']}; down: {said['down']}"),
        TableData("Bytes by part", ["way", "part", "bytes"], rows),
        limits,
    )
    rounds = [row["round"] for row in run.rows]
    per_round = figure(
        "Bytes per round",
        "What crossed in each round.",
        line_chart(
            [Line(way, rounds, run.column(f"bytes_{way}")) for way in split],
            Axes("round", "bytes", include_zero=True),
            max_points=limits.max_points,
        ),
        TableData(
            "Bytes per round",
            ["round", "up", "down", *(f"{way} {says}" for way in split for says in parts.values())],
            [
                (row["round"], row["bytes_up"], row["bytes_down"], *(row[f"bytes_{way}_{key}"] for way in split for key in parts))
                for row in run.rows
            ],
        ),
        limits,
    )
    return section("Bytes", figure_grid(totals, shares, per_round), level=3)


def reproduction_section(run: RunRecord, toml: str, command: str) -> Html:
    """Return how to reproduce the run: command, settings and environment."""
    known = run.run_info.get("environment", {})
    machine = definition_list(known.items()) if known else element("p", "Not written down by the version that ran it.")
    return section(
        "How to get it again",
        element("pre", command, class_="command", tabindex="0", role="region", aria_label="command"),
        element("details", element("summary", "Settings"), element("pre", toml, tabindex="0", role="region", aria_label="settings")),
        machine,
        level=3,
    )
