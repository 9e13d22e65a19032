"""What each part of sieve is worth: every variant against sieve as it comes, seed by seed."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from fedsieve.report.figures.style import METRICS, ORDER, TASKS, count, figure, panels_of
from fedsieve.studies import results
from fedsieve.studies.results import WHOLE, Row

WORST, BEST = -0.1, 0.04
"""Differences beyond these stand at the edge of the picture, with their number."""


NOTE = (
    "one option changed at a time, and with it the rules that hang on it: weights that are told to travel, and a frozen support, "
    "leave gates sampled and messages as they are; what a rule already does changes nothing"
)


def entries(rows: list[Row]) -> list[dict[str, Any]]:
    """One entry a task and part: what it reaches, what it sends, and the paired difference to sieve as it comes."""
    found = []
    for task, setting in places(rows):
        there = results.where(rows, task=task, setting=setting)
        whole = results.where(there, part=WHOLE)
        for part in dict.fromkeys(row["label"]["part"] for row in there):
            group = results.where(there, part=part)
            less = {} if part == WHOLE else results.difference(group, whole, "value")
            tdr = results.mean_sd(group, "tdr")
            found.append(
                {
                    "task": task,
                    "setting": setting,
                    "part": part,
                    "value": results.mean_sd(group, "value"),
                    "less sieve as it comes": less.get("difference"),
                    "error": less.get("error"),
                    "tdr": None if tdr["mean"] is None else tdr,
                    "expected density": results.mean_sd(group, "expected_density"),
                    "bytes": results.spread([row["bytes"]["up"] + row["bytes"]["down"] for row in results.done(group)]),
                    "finished": f"{len(results.done(group))}/{len(group)}",
                }
            )
    return found


def places(rows: list[Row]) -> list[tuple[str, str]]:
    """Tasks with their settings, in the order of the cells."""
    return list(dict.fromkeys((row["label"]["task"], row["label"]["setting"]) for row in rows))


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """For each task: the difference to sieve as it comes, one line a part, with two standard errors."""
    found = [entry for entry in entries(rows) if entry["less sieve as it comes"] is not None]
    parts, shown = list(dict.fromkeys(entry["part"] for entry in found)), places(rows)
    columns = min(len(shown), 4)
    lines = -(-len(shown) // columns)
    with figure(folder / "ablation", 2.2 + 1.7 * columns, 0.9 + 2.6 * lines) as made:
        panels = panels_of(made, columns, lines)
        for i, (axes, (task, setting)) in enumerate(zip(panels, shown, strict=False)):
            group = results.where(rows, task=task, setting=setting)
            for entry in found:
                if (entry["task"], entry["setting"]) == (task, setting):
                    _point(axes, parts.index(entry["part"]), entry)
            axes.axvline(0, color="#7A7A7A", linewidth=0.9)
            measured = next((METRICS[row["metric"]] for row in results.done(group)), "")
            axes.set(ylim=(len(parts) - 0.5, -0.5), xlim=(1.25 * WORST, 1.5 * BEST), xlabel=measured)
            axes.set_yticks(range(len(parts)), parts if i % columns == 0 else [""] * len(parts))
            axes.set_title(f"{TASKS.get(task, task)}\n{setting + ', ' if setting else ''}{count(group)} seeds", fontsize=8.5)
        for axes in panels[len(shown) :]:
            axes.remove()
        made.suptitle("with one part changed, less sieve as it comes; bars: two standard errors; arrows: farther than shown", fontsize=8.5)
    return [folder / "ablation.png"]


def _point(axes: Axes, height: int, entry: dict[str, Any]) -> None:
    """A difference with its error; an arrow and the number where it is off the picture."""
    difference = entry["less sieve as it comes"]
    if WORST <= difference <= BEST:
        axes.errorbar(difference, height, xerr=2 * (entry["error"] or 0), fmt="o", ms=3.5, capsize=2, color=ORDER[0])
        return
    worse = difference < WORST
    axes.plot(1.2 * WORST if worse else 1.4 * BEST, height, marker="<" if worse else ">", ms=4, color=ORDER[1])
    place = {"x": 1.12 * WORST, "ha": "left"} if worse else {"x": 1.2 * BEST, "ha": "right"}
    axes.text(y=height, s=f"{difference:+.2f}", va="center", fontsize=7, **place)
