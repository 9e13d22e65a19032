"""Table and figure of the equal-bytes study: every algorithm at the bytes that a whole run of sieve sends, paired by seed."""

from collections.abc import Mapping
from typing import Any

from fedsieve.report.figures import style
from fedsieve.report.figures.style import FigureWriter
from fedsieve.studies import results
from fedsieve.studies.results import DENSE_ALGORITHMS, DENSE_MODEL, REFERENCE_ALGORITHM, SPARSE_MODEL, Row

DIFFERENCE_TO_SIEVE = "difference to sieve"


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per task, factor and line, with its paired difference to sieve."""
    entries = []
    for task, factor in results.label_values(rows, "task", "factor"):
        group = results.done_rows(results.filter_rows(rows, task=task, factor=factor))
        reference = {row["seed"]: row for row in results.filter_rows(group, algorithm=REFERENCE_ALGORITHM)}
        for line in dict.fromkeys((row["label"]["algorithm"], row["label"].get("model")) for row in group):
            label = {"algorithm": line[0]} | ({"model": line[1]} if line[1] else {})
            entries.append({"task": task, "factor": factor, **label, **compare(results.filter_rows(group, **label), reference)})
    return entries


def compare(group: list[Row], reference: dict[int, Row]) -> dict[str, Any]:
    """Return the values of one line at the bytes of sieve and after all rounds: those of the dense model if its label says so."""
    by_seed = {row["seed"]: row for row in group}
    seeds = sorted(by_seed.keys() & reference.keys())
    curve = shown_curve(group[0])
    values = [results.value_at_bytes(by_seed[seed], reference[seed]["curves"]["bytes"][-1], curve) for seed in seeds]
    reference_values = [reference[seed]["curves"][reference[seed]["metric"]][-1] for seed in seeds]
    paired = results.paired_difference(values, reference_values)
    return {
        "at sieve's bytes": results.mean_and_sd(values),
        DIFFERENCE_TO_SIEVE: paired["difference"],
        "error": paired["error"],
        "95 %": paired["interval"],
        "after all rounds": results.mean_and_sd_over_seeds(group, "dense_value" if is_dense_model(group[0]["label"]) else "value"),
        "before projection": results.mean_and_sd_over_seeds(group, "dense_value"),
        "bytes": results.bytes_over_seeds(group),
        "seconds": results.mean_and_sd([row["seconds"] for row in group]),
    }


def is_dense_model(label: Mapping[str, Any]) -> bool:
    """Return whether a line shows the model before it is cut to the density."""
    return label.get("model") == DENSE_MODEL


def shown_curve(row: Row) -> str:
    """Return the name of the curve that a line shows."""
    return "dense_value" if is_dense_model(row["label"]) else row["metric"]


def is_competitor(entry: Mapping[str, Any]) -> bool:
    """Return whether a line is compared with sieve: another algorithm, with sparse messages or with its model cut to the density."""
    if entry["algorithm"] == REFERENCE_ALGORITHM:
        return False
    return entry["model"] == SPARSE_MODEL if "model" in entry else entry["algorithm"].split(",")[0] not in DENSE_ALGORITHMS


def summarize(entries: list[dict[str, Any]]) -> str:
    """Return in how many cases sieve is best or within one standard error of the best sparse algorithm, and its largest deficit."""
    deficits: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        difference = entry[DIFFERENCE_TO_SIEVE]
        if not is_competitor(entry) or difference is None:
            continue
        is_significant = difference > (entry["error"] or 0.0)
        deficits.setdefault((entry["task"], entry["factor"]), []).append(difference if is_significant else min(difference, 0.0))
    num_best = sum(max(case) <= 0 for case in deficits.values())
    largest = max((max(case) for case in deficits.values()), default=0.0)
    best = f"at equal bytes sieve is best or within one standard error of the best sparse algorithm in {num_best} of {len(deficits)} cells"
    return f"{best}; at worst {largest:.4f} behind"


def draw(rows: list[Row], writer: FigureWriter) -> None:
    """Draw quality against bytes for the first factor of each task. Only the first setting of an algorithm, without a comma, is drawn."""
    draw_first_factors([row for row in rows if "," not in row["label"]["algorithm"]], writer, "equal-bytes")


def draw_first_factors(rows: list[Row], writer: FigureWriter, name: str) -> None:
    """Draw one panel per task: quality against bytes."""
    tasks = results.label_values(rows, "task")
    num_columns = min(len(tasks), 4)
    with writer.figure(name, 7.2, 3.4 if len(tasks) <= 4 else 6.4) as figure:
        panels = style.create_panels(figure, num_columns, -(-len(tasks) // num_columns), num_used=len(tasks))
        for axes, task in zip(panels, tasks, strict=True):
            part = results.filter_rows(rows, task=task)
            part = results.filter_rows(part, factor=next(row["label"]["factor"] for row in rows if row["label"]["task"] == task))
            style.plot_quality_against_bytes(axes, part, part[0]["metric"], task)
        counts = sorted({style.num_finished_seeds(results.filter_rows(rows, task=task)) for task in tasks})
        style.add_legend(figure, panels, counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}")
