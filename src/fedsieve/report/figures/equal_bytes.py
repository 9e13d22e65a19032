"""Table and figure of the equal-bytes study: every algorithm at the bytes that a whole run of sieve sends, paired by seed."""

from typing import Any

from fedsieve.report.figures import style
from fedsieve.report.figures.style import FigureWriter
from fedsieve.studies import results
from fedsieve.studies.results import DENSE_ALGORITHMS, REFERENCE_ALGORITHM, Row

DIFFERENCE_TO_SIEVE = "difference to sieve"


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per task, factor and algorithm, with its paired difference to sieve."""
    entries = []
    for task, factor in results.label_values(rows, "task", "factor"):
        group = results.done_rows(results.filter_rows(rows, task=task, factor=factor))
        reference = {row["seed"]: row for row in results.filter_rows(group, algorithm=REFERENCE_ALGORITHM)}
        for algorithm in results.label_values(group, "algorithm"):
            by_seed = {row["seed"]: row for row in results.filter_rows(group, algorithm=algorithm)}
            seeds = sorted(by_seed.keys() & reference.keys())
            values = [results.value_at_bytes(by_seed[seed], reference[seed]["curves"]["bytes"][-1]) for seed in seeds]
            reference_values = [reference[seed]["curves"][reference[seed]["metric"]][-1] for seed in seeds]
            paired = results.paired_difference(values, reference_values)
            entries.append(
                {
                    "task": task,
                    "factor": factor,
                    "algorithm": algorithm,
                    "at sieve's bytes": results.mean_and_sd(values),
                    DIFFERENCE_TO_SIEVE: paired["difference"],
                    "error": paired["error"],
                    "95 %": paired["interval"],
                    "after all rounds": results.mean_and_sd_over_seeds(by_seed.values(), "value"),
                    "before projection": results.mean_and_sd_over_seeds(by_seed.values(), "dense_value"),
                    "bytes": results.bytes_over_seeds(by_seed.values()),
                    "seconds": results.mean_and_sd([row["seconds"] for row in by_seed.values()]),
                }
            )
    return entries


def summarize(entries: list[dict[str, Any]]) -> str:
    """Return in how many cases sieve is best or within one standard error of the best sparse algorithm, and its largest deficit."""
    deficits: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        algorithm, difference = entry["algorithm"], entry[DIFFERENCE_TO_SIEVE]
        if algorithm == REFERENCE_ALGORITHM or algorithm.split(",")[0] in DENSE_ALGORITHMS or difference is None:
            continue
        is_significant = difference > (entry["error"] or 0.0)
        deficits.setdefault((entry["task"], entry["factor"]), []).append(difference if is_significant else min(difference, 0.0))
    num_best = sum(max(case) <= 0 for case in deficits.values())
    largest = max((max(case) for case in deficits.values()), default=0.0)
    best = f"at equal bytes sieve is best or within one standard error of the best sparse algorithm in {num_best} of {len(deficits)} cells"
    return f"{best}; at worst {largest:.4f} behind"


def draw(rows: list[Row], writer: FigureWriter) -> None:
    """Draw quality against bytes for the first factor of each task. Only the first setting of an algorithm, without a comma, is drawn."""
    rows = [row for row in rows if "," not in row["label"]["algorithm"]]
    tasks = results.label_values(rows, "task")
    num_columns = min(len(tasks), 4)
    with writer.figure("equal-bytes", 7.2, 3.4 if len(tasks) <= 4 else 6.4) as figure:
        panels = style.create_panels(figure, num_columns, -(-len(tasks) // num_columns), num_used=len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            part = results.filter_rows(rows, task=task)
            part = results.filter_rows(part, factor=next(row["label"]["factor"] for row in rows if row["label"]["task"] == task))
            style.plot_quality_against_bytes(axes, part, part[0]["metric"], task)
        counts = sorted({style.num_finished_seeds(results.filter_rows(rows, task=task)) for task in tasks})
        style.add_legend(figure, panels, counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}")
