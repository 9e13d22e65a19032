"""What each part of sieve is worth: every variant against sieve as it comes, seed by seed."""

from pathlib import Path
from typing import Any

from fedsieve.experiments import results
from fedsieve.experiments.results import WHOLE, Row
from fedsieve.report.style import METRICS, ORDER, TASKS, count, figure, panels_of

FAR = 0.1
"""Differences beyond this stand at the edge of the picture, with their number."""


def entries(rows: list[Row]) -> list[dict[str, Any]]:
    """One entry a task and part: what it reaches, what it sends, and the paired difference to sieve as it comes."""
    found = []
    for task, setting in places(rows):
        there = results.where(rows, task=task, setting=setting)
        whole = results.where(there, part=WHOLE)
        for part in dict.fromkeys(row["label"]["part"] for row in there):
            group = results.where(there, part=part)
            difference = results.difference(group, whole, "value")
            found.append(
                {
                    "task": task,
                    "setting": setting,
                    "part": part,
                    "value": results.mean_sd(group, "value"),
                    "less sieve as it comes": None if part == WHOLE else difference["difference"],
                    "error": None if part == WHOLE else difference["error"],
                    "tdr": results.mean_sd(group, "tdr"),
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
    found = [entry for entry in entries(rows) if entry["part"] != WHOLE]
    parts, shown = list(dict.fromkeys(entry["part"] for entry in found)), places(rows)
    columns = min(len(shown), 4)
    with figure(folder / "ablation", 2.2 + 1.7 * columns, 0.9 + 2.6 * -(-len(shown) // columns)) as made:
        panels = panels_of(made, columns, -(-len(shown) // columns))
        for i, (axes, (task, setting)) in enumerate(zip(panels, shown, strict=False)):
            group = results.where(rows, task=task, setting=setting)
            for entry in found:
                if (entry["task"], entry["setting"]) == (task, setting) and entry["less sieve as it comes"] is not None:
                    _point(axes, parts.index(entry["part"]), entry)
            axes.axvline(0, color="#7A7A7A", linewidth=0.9)
            axes.set(ylim=(len(parts) - 0.5, -0.5), xlim=(-1.25 * FAR, 0.5 * FAR), xlabel=METRICS[group[0]["metric"]])
            axes.set_yticks(range(len(parts)), parts if i % columns == 0 else [""] * len(parts))
            axes.set_title(f"{TASKS.get(task, task)}{', ' + setting if setting else ''}, {count(group)} seeds", fontsize=8.5)
        for axes in panels[len(shown) :]:
            axes.remove()
        made.suptitle("with one part changed, less sieve as it comes; bars: two standard errors; arrows: farther than shown", fontsize=8.5)
    return [folder / "ablation.png"]


def _point(axes: Any, height: int, entry: dict[str, Any]) -> None:
    difference = entry["less sieve as it comes"]
    if difference < -FAR:
        axes.plot(-1.2 * FAR, height, marker="<", ms=4, color=ORDER[1])
        axes.text(-1.12 * FAR, height, f"{difference:+.2f}", va="center", fontsize=7)
    else:
        axes.errorbar(difference, height, xerr=2 * (entry["error"] or 0), fmt="o", ms=3.5, capsize=2, color=ORDER[0])
