"""The equal-bytes study from its stored rows: every method at the bytes that sieve's whole run took, seed by seed."""

from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.report.figures.style import (
    METRIC_LABELS,
    TASK_LABELS,
    add_legend,
    clip_axis,
    create_panels,
    line_label,
    line_style,
    num_finished_seeds,
    plot_mean_sd,
    saved_figure,
)
from fedsieve.studies import results
from fedsieve.studies.results import DENSE_METHODS, REFERENCE_METHOD, Row


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """One entry a task, factor and method, with its paired difference to sieve."""
    found = []
    for place in dict.fromkeys((row["label"]["task"], row["label"]["factor"]) for row in rows):
        part = results.done_rows(results.filter_rows(rows, task=place[0], factor=place[1]))
        base = {row["seed"]: row for row in results.filter_rows(part, method=REFERENCE_METHOD)}
        for method in dict.fromkeys(row["label"]["method"] for row in part):
            own = {row["seed"]: row for row in results.filter_rows(part, method=method)}
            seeds = sorted(own.keys() & base.keys())
            values = [results.value_at_bytes(own[seed], base[seed]["curves"]["bytes"][-1]) for seed in seeds]
            difference = results.paired_difference(values, [base[seed]["curves"][base[seed]["metric"]][-1] for seed in seeds])
            found.append(
                {
                    "task": place[0],
                    "factor": place[1],
                    "method": method,
                    "at sieve's bytes": results.mean_and_sd(values),
                    "less sieve": difference["difference"],
                    "error": difference["error"],
                    "95 %": difference["interval"],
                    "after all rounds": results.mean_and_sd_over_seeds(own.values(), "value"),
                    "before the cut": results.mean_and_sd_over_seeds(own.values(), "dense_value"),
                    "bytes": results.mean_and_sd([row["bytes"]["up"] + row["bytes"]["down"] for row in own.values()]),
                    "seconds": results.mean_and_sd([row["seconds"] for row in own.values()]),
                }
            )
    return found


def summarize(entries: list[dict[str, Any]]) -> str:
    """In how many cells sieve leads or is within one standard error of the best sparse method, and how far behind it is at worst."""
    cells: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        if entry["method"] == REFERENCE_METHOD or entry["method"].split(",")[0] in DENSE_METHODS or entry["less sieve"] is None:
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
    with saved_figure(folder / "equal-bytes", 7.2, 3.4 if len(tasks) <= 4 else 6.4) as made:
        columns = min(len(tasks), 4)
        panels = create_panels(made, columns, int(np.ceil(len(tasks) / columns)))
        for axes, task in zip(panels, tasks, strict=False):
            first = next(row["label"]["factor"] for row in rows if row["label"]["task"] == task)
            part = results.filter_rows(rows, task=task, factor=first)
            metric = part[0]["metric"]
            for method in dict.fromkeys(row["label"]["method"] for row in part):
                group = results.filter_rows(part, method=method)
                plot_mean_sd(axes, group, metric, x="bytes", label=line_label({"method": method}), **line_style({"method": method}))
            clip_axis(axes, part, metric)
            axes.set(xscale="log", xlabel="bytes both ways", ylabel=METRIC_LABELS[metric], title=TASK_LABELS.get(task, task))
        for axes in panels[len(tasks) :]:
            axes.remove()
        seeds = sorted({num_finished_seeds(results.filter_rows(rows, task=task)) for task in tasks})
        add_legend(made, panels[: len(tasks)], seeds[0] if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}")
    return [folder / "equal-bytes.png"]
