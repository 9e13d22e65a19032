"""Table and figure of the topologies study: nodes against the server of a star, and bytes to a target against the spectral gap."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedsieve.report.figures import style
from fedsieve.report.figures.style import FigureWriter
from fedsieve.studies import results
from fedsieve.studies.results import REFERENCE_ALGORITHM, Row

STAR = "star"
TARGET_LOSS = 0.01
"""The target is this much below the final value of the star."""
NODE_METRICS = ("worst_node", "mean_node", "consensus_distance", "support_agreement")
NOTE = (
    "worst and mean node: test metric of single nodes, cut to m weights; bytes: sent and received by a node, or by a client of a star; "
    f"rounds and bytes to target: until the mean node is within {TARGET_LOSS} of the star's end, at the resolution of 20 measurements a run"
)


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per task, algorithm and topology."""
    entries = []
    for task, algorithm, topology, gap in results.label_values(rows, "task", "algorithm", "topology", "gap"):
        group = results.filter_rows(rows, task=task, algorithm=algorithm, topology=topology)
        reached = [found for row in results.done_rows(group) if (found := cost_to_target(row, target_value(rows, row)))]
        entries.append(
            {
                "task": task,
                "algorithm": algorithm,
                "topology": topology,
                "gap": gap,
                "mean model": results.mean_and_sd_over_seeds(group, "value"),
                **{name.replace("_", " "): optional_mean(group, name) for name in NODE_METRICS},
                "bytes of a node": float(np.mean([node_bytes(row) for row in results.done_rows(group)])) if group else None,
                "bytes of the busiest": results.mean_over_seeds(group, "busiest_node_bytes"),
                "rounds to target": float(np.mean([rounds for rounds, _ in reached])) if reached else None,
                "bytes to target": float(np.mean([num_bytes for _, num_bytes in reached])) if reached else None,
                "reached": f"{len(reached)}/{len(group)}",
            }
        )
    return entries


def optional_mean(rows: list[Row], name: str) -> dict[str, float | None] | None:
    """Return mean and sd over seeds, None for a star, which has no such value."""
    found = results.mean_and_sd_over_seeds(rows, name)
    return None if found["mean"] is None else found


def node_bytes(row: Row) -> float:
    """Return the bytes that a node, or a client of a star, sent and received in a run."""
    return (row["bytes"]["up"] + row["bytes"]["down"]) / row["config"]["federation"]["clients"]


def target_value(rows: list[Row], row: Row) -> float | None:
    """Return the target of a run: just below the end of the default algorithm over a star, with the same task and seed."""
    label = {"task": row["label"]["task"], "algorithm": REFERENCE_ALGORITHM, "topology": STAR}
    star = [each for each in results.done_rows(results.filter_rows(rows, **label)) if each["seed"] == row["seed"]]
    return star[0]["values"]["value"] - TARGET_LOSS if star else None


def cost_to_target(row: Row, target: float | None) -> tuple[int, float] | None:
    """Return rounds and bytes per node until the mean node (of a star: the server) reaches the target, None if it never does."""
    curves, num_nodes = row["curves"], row["config"]["federation"]["clients"]
    values = curves.get("mean_node") or curves.get(row["metric"]) or ()
    for round, num_bytes, value in zip(curves["round"], curves["bytes"], values, strict=True):
        if target is not None and value is not None and value >= target:
            return round, num_bytes / num_nodes
    return None


def log_log_slope(x: list[float], y: list[float]) -> float | None:
    """Return the slope of a line through log y over log x; None for fewer than two different x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(set(x)) > 1 else None


def draw(rows: list[Row], writer: FigureWriter) -> None:
    """Draw per task the mean node over bytes, and the rounds to the target over the spectral gap."""
    for task in results.label_values(rows, "task"):
        part = results.filter_rows(rows, task=task)
        first = results.label_values(part, "algorithm")[0]
        group = results.filter_rows(part, algorithm=first)
        with writer.figure(f"topologies-{task}", 7.2, 3.4) as figure:
            left, right = style.create_panels(figure, 2)
            for colour, topology in zip(style.PALETTE, results.label_values(group, "topology"), strict=False):
                for row in results.done_rows(results.filter_rows(group, topology=topology))[:1]:
                    _draw_values(left, row, colour)
            left.set(xscale="log", xlabel="bytes per node", title=f"{style.TASK_LABELS.get(task, task)}: mean node, first seed")
            left.legend(fontsize=6)
            _draw_gaps(right, rows, group)
            figure.suptitle(f"{style.ALGORITHM_LABELS.get(first, first)} without a server", fontsize=8.5)


def _draw_values(axes: Axes, row: Row, colour: Any) -> None:
    """Draw the measured rounds of one run."""
    curves, num_nodes = row["curves"], row["config"]["federation"]["clients"]
    values = curves.get("mean_node") or curves[row["metric"]]
    points = [(num_bytes / num_nodes, value) for num_bytes, value in zip(curves["bytes"], values, strict=True) if value is not None]
    axes.plot([x for x, _ in points], [max(y, 0.0) for _, y in points], ".-", ms=3, lw=0.9, color=colour, label=row["label"]["topology"])


def _draw_gaps(axes: Axes, rows: list[Row], group: list[Row]) -> None:
    """Draw the rounds to the target over the spectral gap of every graph, with the slope of a line through them."""
    points: list[tuple[float, float]] = []
    for row in results.done_rows(group):
        if row["label"]["topology"] != STAR and (found := cost_to_target(row, target_value(rows, row))):
            points.append((row["label"]["gap"], found[0]))
    gaps, rounds = [gap for gap, _ in points], [number for _, number in points]
    axes.plot(gaps, rounds, "o", ms=4, color=style.PALETTE[0])
    slope = log_log_slope(gaps, rounds)
    axes.set(xlabel="spectral gap", title="rounds to target" + ("" if slope is None else f", slope {slope:.2f}"))
    if points:
        axes.set(xscale="log", yscale="log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter("{x:g}")
