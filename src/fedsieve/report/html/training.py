"""How a run went: headline numbers, the metric, densities, the dual, bytes."""

from fedsieve.formatting import amount, number, size
from fedsieve.report.html.elements import Budget, Markup, Table, facts, figure, figures, section, tag
from fedsieve.report.html.run_record import Record
from fedsieve.report.html.svg import Axes, Line, Mark, line_chart, stacked_bars

PARTS = {
    "weights": "weights",
    "gates": "gates",
    "positions": "positions",
    "scalars": "scalars",
    "header": "header and checksum",
}
METRICS = {"r2": "R2", "accuracy": "accuracy", "micro_f1": "micro F1"}
LEAST_R2 = -1.0
"""Worse is not drawn: the first rounds of a wild run would flatten all others."""
WIDE = 20.0
"""Densities that differ by more stand on a logarithmic axis."""
NEAR = 0.02
"""Messages whose density is as near to the target have it but for whole weights, and need no line."""


def headline(run: Record) -> Markup:
    """The numbers most people came for."""
    result = run.result or {}
    value, best = run.last(run.metric), result.get("best_possible", run.about.get("best_possible"))
    cards = [
        (
            METRICS.get(run.metric, run.metric),
            "none yet" if value is None else number(value),
            f"best possible {number(best)}" if best is not None else "",
        )
    ]
    if result:
        cards.append(("weights kept", f"{result['nonzero']} of {result['size']}", f"density {result['density']:.4g}, exactly"))
    if run.last("tdr") is not None:
        cards.append(
            ("of these right", f"{100 * run.last('tdr'):.0f} %", f"{100 * (run.last('recall') or 0):.0f} % of the true ones found")
        )
    dense = dense_bytes(run)
    sent = float(run.spent[-1]) if len(run.spent) else 0.0
    cards.append(("bytes sent", size(sent), f"{dense / sent:.3g} times fewer than dense ({size(dense)})" if dense and sent else ""))
    cards.append(("rounds", f"{len(run.rows)} of {run.rounds}", state(run)))
    if run.last("epsilon") is not None:
        cards.append(("epsilon", number(run.last("epsilon")), "privacy of one client"))
    if run.rows:
        cards.append(("time", f"{amount(run.last('seconds') or 0)} s", ""))
    drawn = (tag("div", tag("dt", name), tag("dd", tag("b", said), tag("small", more))) for name, said, more in cards)
    note = tag("p", result["note"], class_="note") if result.get("note") else ""
    return section("In short", tag("dl", *drawn, class_="cards"), note, level=3)


def state(run: Record) -> str:
    """Whether it came to its end."""
    return "finished" if run.finished else "under way, or broken off"


def dense_bytes(run: Record) -> float:
    """What the rounds so far would have sent without sparsity; 0 where nobody wrote it down."""
    if run.result and run.result.get("bytes_dense"):
        return float(run.result["bytes_dense"])
    return float(run.about.get("bytes_dense", 0)) * len(run.rows)


def quality(run: Record, budget: Budget) -> Markup:
    """The metric per round and per byte."""
    name = METRICS.get(run.metric, run.metric)
    rounds, values, full = run.column("round"), run.column(run.metric), run.column("full")
    if values[-1] is None:
        return section("Quality", tag("p", f"The last round has no {name}."), level=3)
    best = run.about.get("best_possible", (run.result or {}).get("best_possible"))
    across = [Mark(best, "best possible")] if best is not None else []
    lines = {"sparse model": values} | ({"before the final cut": full} if any(v is not None for v in full) else {})
    drawn = {key: [None if v is None or (run.metric == "r2" and v < LEAST_R2) else v for v in column] for key, column in lines.items()}
    hidden = "; rounds below -1 are not drawn" if drawn["sparse model"] != values else ""
    says = f"{name} {number(values[-1])} after round {rounds[-1]}, highest {number(max(v for v in values if v is not None))}{hidden}."
    per_round = figure(
        f"{name} per round",
        says,
        line_chart([Line(key, rounds, v) for key, v in drawn.items()], Axes("round", name), across=across, points=budget.points),
        Table(f"{name} per round", ["round", *lines], list(zip(rounds, *lines.values(), strict=True))),
        budget,
    )
    spent = [int(v) for v in run.spent]
    per_byte = figure(
        f"{name} per byte",
        f"{size(spent[-1])} sent both ways.",
        line_chart([Line(name, spent, drawn["sparse model"])], Axes("bytes sent, both ways", name), across=across, points=budget.points),
        Table(f"{name} per byte", ["bytes", name], list(zip(spent, values, strict=True))),
        budget,
    )
    return section("Quality", figures(per_round, per_byte), level=3)


def density(run: Record, budget: Budget) -> Markup:
    """Densities per round against the target, and what holds them there."""
    rounds, target = run.column("round"), float(run.config.get("density", 0))
    columns = {"expected": run.column("expected_density"), "at test time": run.column("test_density")}
    sent = run.column("message_density")
    if not any(sent):  # the method's own schedule, where no round says what it sent
        sent = run.about.get("message_density", [])[: len(rounds)]
    if any(abs(density - target) > NEAR * target for density in sent if density is not None):
        columns["messages"] = sent
    columns = {key: column for key, column in columns.items() if any(v is not None for v in column)}
    kept = run.result["density"] if run.result else None
    end = f" The finished model keeps {kept:.4g}." if kept is not None else ""
    if not columns:
        return section("Density", tag("p", f"Target {target:g}.{end} This method has no gates."), level=3)
    known = [v for column in columns.values() for v in column if v] + [target]
    says = ", ".join(f"{key} {column[-1]:.4g}" for key, column in columns.items() if column[-1] is not None)
    drawn = figure(
        "Density per round",
        f"Target {target:g}; in the last round {says}.{end}",
        line_chart(
            [Line(key, rounds, column) for key, column in columns.items()],
            Axes("round", "density", log_y=min(known) > 0 and max(known) / min(known) > WIDE, zero=False),
            across=[Mark(target, f"target {target:g}")],
            down=turning_points(run),
            points=budget.points,
        ),
        Table("Density per round", ["round", *columns], list(zip(rounds, *columns.values(), strict=True))),
        budget,
    )
    return section("Density and constraint", figures(drawn, *dual(run, budget)), level=3)


def turning_points(run: Record) -> list[Mark]:
    """The rounds in which a method changes what it does."""
    found = [Mark(part * run.rounds, says) for says, part in run.about.get("turns", {}).items() if 0 < part < 1]
    return [mark for mark in found if mark.at <= len(run.rows)]


def dual(run: Record, budget: Budget) -> list[Markup]:
    """The multiplier and the violation, each on its own axis."""
    out = []
    for name, says in (
        ("multiplier", "What the constraint weighs in the loss (for sieve and the natural dual: what it takes from log-alpha)."),
        ("violation", "Expected density less the target; 0 where the constraint holds exactly."),
    ):
        column, rounds = run.column(name), run.column("round")
        if any(v is not None for v in column):
            chart = line_chart([Line(name, rounds, column)], Axes("round", name), across=[Mark(0, "")], points=budget.points)
            numbers = Table(f"{name} per round", ["round", name], list(zip(rounds, column, strict=True)))
            out.append(figure(name.capitalize(), f"{says} Last: {column[-1]:.4g}.", chart, numbers, budget))
    return out


def traffic(run: Record, budget: Budget) -> Markup:
    """What crossed, by part, against the paper's formula and dense messages."""
    parts = {key: says for key, says in PARTS.items() if f"bytes_up_{key}" in run.rows[0]}
    split = {way: [run.total(f"bytes_{way}_{key}") for key in parts] for way in ("up", "down")}
    whole = {way: run.total(f"bytes_{way}") for way in ("up", "down")}
    dense = dense_bytes(run) / 2
    bars = []
    for way in ("up", "down"):
        bars += [(f"{way}: sent", whole[way]), (f"{way}: by the paper's formula", run.total(f"bytes_{way}_formula"))]
        bars += [(f"{way}: dense", dense)] if dense else []
    sampled = " Estimated from one reply an exchange." if run.config.get("bytes") == "sampled" else ""
    totals = figure(
        "Bytes sent",
        f"{size(whole['up'])} up, {size(whole['down'])} down.{sampled} The paper's formula counts four bytes a value and no positions.",
        stacked_bars([(name, [value]) for name, value in bars], ["bytes"], "; ".join(f"{name} {size(value)}" for name, value in bars)),
        Table("Bytes sent", ["what", "bytes"], [(name, int(value)) for name, value in bars]),
        budget,
    )
    if not parts:
        return section("Bytes", figures(totals), level=3)
    said = {way: ", ".join(f"{says} {size(v)}" for says, v in zip(parts.values(), split[way], strict=True) if v) for way in split}
    rows = [(way, says, v) for way in split for says, v in zip(parts.values(), split[way], strict=True)]
    shares = figure(
        "What they are made of",
        f"Up: {said['up'] or 'nothing'}. Down: {said['down'] or 'nothing'}.",
        stacked_bars([(way, split[way]) for way in split], list(parts.values()), f"up: {said['up']}; down: {said['down']}"),
        Table("Bytes by part", ["way", "part", "bytes"], rows),
        budget,
    )
    rounds = run.column("round")
    per_round = figure(
        "Bytes per round",
        "What crossed in each round.",
        line_chart(
            [Line(way, rounds, run.column(f"bytes_{way}")) for way in split], Axes("round", "bytes", zero=True), points=budget.points
        ),
        Table(
            "Bytes per round",
            ["round", "up", "down", *(f"{way} {says}" for way in split for says in parts.values())],
            [
                (row["round"], row["bytes_up"], row["bytes_down"], *(row[f"bytes_{way}_{key}"] for way in split for key in parts))
                for row in run.rows
            ],
        ),
        budget,
    )
    return section("Bytes", figures(totals, shares, per_round), level=3)


def settings(run: Record, toml: str, command: str) -> Markup:
    """What reproduces it: the command, the settings, the machine."""
    known = run.about.get("environment", {})
    machine = facts(known.items()) if known else tag("p", "Not written down by the version that ran it.")
    return section(
        "How to get it again",
        tag("pre", command, class_="command", tabindex="0", role="region", aria_label="command"),
        tag("details", tag("summary", "Settings"), tag("pre", toml, tabindex="0", role="region", aria_label="settings")),
        machine,
        level=3,
    )
