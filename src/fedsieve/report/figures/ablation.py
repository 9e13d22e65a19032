"""What each part of sieve is worth: every variant against sieve as it comes, seed by seed."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fedsieve.report.figures.style import METRIC_LABELS, PALETTE, TASK_LABELS, create_panels, num_finished_seeds, saved_figure
from fedsieve.studies import results
from fedsieve.studies.results import DEFAULT_VARIANT, Row

MIN_DIFFERENCE, MAX_DIFFERENCE = -0.1, 0.04
"""Differences beyond these stand at the edge of the picture, with their number."""


NOTE = (
    "one option changed at a time, and with it the rules that hang on it: weights that are told to travel, and a frozen support, "
    "leave gates sampled and messages as they are; what a rule already does changes nothing"
)


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """One entry a task and part: what it reaches, what it sends, and the paired difference to sieve as it comes."""
    found = []
    for task, setting in task_setting_pairs(rows):
        there = results.filter_rows(rows, task=task, setting=setting)
        whole = results.filter_rows(there, part=DEFAULT_VARIANT)
        for part in dict.fromkeys(row["label"]["part"] for row in there):
            group = results.filter_rows(there, part=part)
            less = {} if part == DEFAULT_VARIANT else results.difference_over_seeds(group, whole, "value")
            tdr = results.mean_and_sd_over_seeds(group, "tdr")
            found.append(
                {
                    "task": task,
                    "setting": setting,
                    "part": part,
                    "value": results.mean_and_sd_over_seeds(group, "value"),
                    "less sieve default": less.get("difference"),
                    "error": less.get("error"),
                    "tdr": None if tdr["mean"] is None else tdr,
                    "expected density": results.mean_and_sd_over_seeds(group, "expected_density"),
                    "bytes": results.mean_and_sd([row["bytes"]["up"] + row["bytes"]["down"] for row in results.done_rows(group)]),
                    "finished": f"{len(results.done_rows(group))}/{len(group)}",
                }
            )
    return found


def task_setting_pairs(rows: list[Row]) -> list[tuple[str, str]]:
    """Tasks with their settings, in the order of the cells."""
    return list(dict.fromkeys((row["label"]["task"], row["label"]["setting"]) for row in rows))


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """For each task: the difference to sieve as it comes, one line a part, with two standard errors."""
    found = [entry for entry in table_entries(rows) if entry["less sieve default"] is not None]
    parts, shown = list(dict.fromkeys(entry["part"] for entry in found)), task_setting_pairs(rows)
    columns = min(len(shown), 4)
    lines = -(-len(shown) // columns)
    with saved_figure(folder / "ablation", 2.2 + 1.7 * columns, 0.9 + 2.6 * lines) as made:
        panels = create_panels(made, columns, lines)
        for i, (axes, (task, setting)) in enumerate(zip(panels, shown, strict=False)):
            group = results.filter_rows(rows, task=task, setting=setting)
            for entry in found:
                if (entry["task"], entry["setting"]) == (task, setting):
                    _draw_difference(axes, parts.index(entry["part"]), entry)
            axes.axvline(0, color="#7A7A7A", linewidth=0.9)
            measured = next((METRIC_LABELS[row["metric"]] for row in results.done_rows(group)), "")
            axes.set(ylim=(len(parts) - 0.5, -0.5), xlim=(1.25 * MIN_DIFFERENCE, 1.5 * MAX_DIFFERENCE), xlabel=measured)
            axes.set_yticks(range(len(parts)), parts if i % columns == 0 else [""] * len(parts))
            axes.set_title(
                f"{TASK_LABELS.get(task, task)}\n{setting + ', ' if setting else ''}{num_finished_seeds(group)} seeds", fontsize=8.5
            )
        for axes in panels[len(shown) :]:
            axes.remove()
        made.suptitle("with one part changed, less sieve default; bars: two standard errors; arrows: farther than shown", fontsize=8.5)
    return [folder / "ablation.png"]


def _draw_difference(axes: Axes, y: int, entry: dict[str, Any]) -> None:
    """A difference with its error; an arrow and the number where it is off the picture."""
    difference = entry["less sieve default"]
    if MIN_DIFFERENCE <= difference <= MAX_DIFFERENCE:
        axes.errorbar(difference, y, xerr=2 * (entry["error"] or 0), fmt="o", ms=3.5, capsize=2, color=PALETTE[0])
        return
    worse = difference < MIN_DIFFERENCE
    axes.plot(1.2 * MIN_DIFFERENCE if worse else 1.4 * MAX_DIFFERENCE, y, marker="<" if worse else ">", ms=4, color=PALETTE[1])
    place = {"x": 1.12 * MIN_DIFFERENCE, "ha": "left"} if worse else {"x": 1.2 * MAX_DIFFERENCE, "ha": "right"}
    axes.text(y=y, s=f"{difference:+.2f}", va="center", fontsize=7, **place)
