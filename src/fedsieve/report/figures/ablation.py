"""Table and figure of the ablation study: every variant against the default, paired by seed."""

from typing import Any

from matplotlib.axes import Axes

from fedsieve.report.figures import style
from fedsieve.report.figures.style import FigureWriter
from fedsieve.studies import results
from fedsieve.studies.results import DEFAULT_VARIANT, Row

MIN_DIFFERENCE, MAX_DIFFERENCE = -0.1, 0.04
"""Larger differences are drawn at the edge of the panel, as a number."""
DIFFERENCE_TO_DEFAULT = "difference to default"
NOTE = "one part is changed at a time; all other options keep their defaults; differences are paired by seed"


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per task and variant: quality, paired difference to the default, densities and bytes."""
    entries = []
    for task, setting in results.label_values(rows, "task", "setting"):
        case = results.filter_rows(rows, task=task, setting=setting)
        default = results.filter_rows(case, part=DEFAULT_VARIANT)
        for part in results.label_values(case, "part"):
            group = results.filter_rows(case, part=part)
            paired = {} if part == DEFAULT_VARIANT else results.difference_over_seeds(group, default, "value")
            tdr = results.mean_and_sd_over_seeds(group, "tdr")
            entries.append(
                {
                    "task": task,
                    "setting": setting,
                    "part": part,
                    "value": results.mean_and_sd_over_seeds(group, "value"),
                    DIFFERENCE_TO_DEFAULT: paired.get("difference"),
                    "error": paired.get("error"),
                    "tdr": None if tdr["mean"] is None else tdr,
                    "expected density": results.mean_and_sd_over_seeds(group, "expected_density"),
                    "bytes": results.bytes_over_seeds(group),
                    "finished": f"{len(results.done_rows(group))}/{len(group)}",
                }
            )
    return entries


def draw(rows: list[Row], writer: FigureWriter) -> None:
    """Draw the difference to the default with two standard errors, one panel per task, one line per variant."""
    entries = [entry for entry in table_entries(rows) if entry[DIFFERENCE_TO_DEFAULT] is not None]
    parts, cases = list(dict.fromkeys(entry["part"] for entry in entries)), results.label_values(rows, "task", "setting")
    num_columns = min(len(cases), 4)
    num_rows = -(-len(cases) // num_columns)
    with writer.figure("ablation", 2.2 + 1.7 * num_columns, 0.9 + 2.6 * num_rows) as figure:
        panels = style.create_panels(figure, num_columns, num_rows, num_used=len(cases))
        for i, (axes, (task, setting)) in enumerate(zip(panels, cases, strict=True)):
            group = results.filter_rows(rows, task=task, setting=setting)
            for entry in entries:
                if (entry["task"], entry["setting"]) == (task, setting):
                    _draw_difference(axes, parts.index(entry["part"]), entry)
            axes.axvline(0, color=style.REFERENCE_COLOUR, linewidth=0.9)
            metric = next((style.METRIC_LABELS[row["metric"]] for row in results.done_rows(group)), "")
            axes.set(ylim=(len(parts) - 0.5, -0.5), xlim=(1.25 * MIN_DIFFERENCE, 1.5 * MAX_DIFFERENCE), xlabel=metric)
            axes.set_yticks(range(len(parts)), parts if i % num_columns == 0 else [""] * len(parts))
            title = f"{style.TASK_LABELS.get(task, task)}\n{setting + ', ' if setting else ''}{style.num_finished_seeds(group)} seeds"
            axes.set_title(title, fontsize=8.5)
        figure.suptitle("one part changed: difference to default; bars: two standard errors; arrows: outside the panel", fontsize=8.5)


def _draw_difference(axes: Axes, y: int, entry: dict[str, Any]) -> None:
    """Draw a difference with its error, or an arrow and the number if it is outside the panel."""
    difference = entry[DIFFERENCE_TO_DEFAULT]
    if MIN_DIFFERENCE <= difference <= MAX_DIFFERENCE:
        axes.errorbar(difference, y, xerr=2 * (entry["error"] or 0), fmt="o", ms=3.5, capsize=2, color=style.PALETTE[0])
        return
    is_worse = difference < MIN_DIFFERENCE
    axes.plot(1.2 * MIN_DIFFERENCE if is_worse else 1.4 * MAX_DIFFERENCE, y, marker="<" if is_worse else ">", ms=4, color=style.PALETTE[1])
    x, alignment = (1.12 * MIN_DIFFERENCE, "left") if is_worse else (1.2 * MAX_DIFFERENCE, "right")
    axes.text(x, y, f"{difference:+.2f}", ha=alignment, va="center", fontsize=7)
