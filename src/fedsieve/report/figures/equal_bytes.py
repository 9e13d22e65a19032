"""The equal-bytes study from its stored rows: every method at the bytes that sieve's whole run took, seed by seed."""

from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.report.figures.style import METRICS, TASKS, band, called, count, figure, floor, legend, look, panels_of
from fedsieve.studies import results
from fedsieve.studies.results import BASE, DENSE, Row


def entries(rows: list[Row]) -> list[dict[str, Any]]:
    """One entry a task, factor and method, with its paired difference to sieve."""
    found = []
    for place in dict.fromkeys((row["label"]["task"], row["label"]["factor"]) for row in rows):
        part = results.done(results.where(rows, task=place[0], factor=place[1]))
        base = {row["seed"]: row for row in results.where(part, method=BASE)}
        for method in dict.fromkeys(row["label"]["method"] for row in part):
            own = {row["seed"]: row for row in results.where(part, method=method)}
            seeds = sorted(own.keys() & base.keys())
            values = [results.at_bytes(own[seed], base[seed]["curves"]["bytes"][-1]) for seed in seeds]
            difference = results.paired(values, [base[seed]["curves"][base[seed]["metric"]][-1] for seed in seeds])
            found.append(
                {
                    "task": place[0],
                    "factor": place[1],
                    "method": method,
                    "at sieve's bytes": results.spread(values),
                    "less sieve": difference["difference"],
                    "error": difference["error"],
                    "95 %": difference["interval"],
                    "after all rounds": results.mean_sd(own.values(), "value"),
                    "before the cut": results.mean_sd(own.values(), "full"),
                    "bytes": results.spread([row["bytes"]["up"] + row["bytes"]["down"] for row in own.values()]),
                    "seconds": results.spread([row["seconds"] for row in own.values()]),
                }
            )
    return found


def verdict(found: list[dict[str, Any]]) -> str:
    """In how many cells sieve leads or is within one standard error of the best sparse method, and how far behind it is at worst."""
    cells: dict[tuple[str, str], list[float]] = {}
    for entry in found:
        if entry["method"] == BASE or entry["method"].split(",")[0] in DENSE or entry["less sieve"] is None:
            continue
        behind = entry["less sieve"]
        cells.setdefault((entry["task"], entry["factor"]), []).append(behind if behind > (entry["error"] or 0.0) else min(behind, 0.0))
    led = sum(max(gaps) <= 0 for gaps in cells.values())
    worst = max((max(gaps) for gaps in cells.values()), default=0.0)
    leads = f"at equal bytes sieve is best or within one standard error of the best sparse method in {led} of {len(cells)} cells"
    return f"{leads}; at worst {worst:.4f} behind"


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Quality against bytes in the first factor of each task; of a rival's several settings the first, which has no comma."""
    rows = [row for row in rows if "," not in row["label"]["method"]]
    tasks = list(dict.fromkeys(row["label"]["task"] for row in rows))
    with figure(folder / "equal-bytes", 7.2, 3.4 if len(tasks) <= 4 else 6.4) as made:
        columns = min(len(tasks), 4)
        panels = panels_of(made, columns, int(np.ceil(len(tasks) / columns)))
        for axes, task in zip(panels, tasks, strict=False):
            first = next(row["label"]["factor"] for row in rows if row["label"]["task"] == task)
            part = results.where(rows, task=task, factor=first)
            metric = part[0]["metric"]
            for method in dict.fromkeys(row["label"]["method"] for row in part):
                group = results.where(part, method=method)
                band(axes, group, metric, x="bytes", label=called({"method": method}), **look({"method": method}))
            floor(axes, part, metric)
            axes.set(xscale="log", xlabel="bytes both ways", ylabel=METRICS[metric], title=TASKS.get(task, task))
        for axes in panels[len(tasks) :]:
            axes.remove()
        seeds = sorted({count(results.where(rows, task=task)) for task in tasks})
        legend(made, panels[: len(tasks)], seeds[0] if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}")
    return [folder / "equal-bytes.png"]
