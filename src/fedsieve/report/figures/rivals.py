"""Table and figure of the rivals study: every line at the bytes of sieve, and the bytes that it needs for a target."""

import json
from typing import Any

from fedsieve.report.figures import equal_bytes
from fedsieve.report.figures.style import FigureWriter
from fedsieve.studies import results
from fedsieve.studies.results import SPARSE_MODEL, Row

TARGET_FRACTION = 0.95
NOTE = (
    f"target: {TARGET_FRACTION:.0%} of the best value that a sparse model reaches in the cell at the end of its run, mean over seeds; "
    "bytes to target: up to the first stored round that reaches it, empty if a seed does not; "
    "dense model: before the cut to the density, no competitor at this density"
)


def table_entries(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one entry per cell and line: values at the bytes of sieve, bytes to the target, density, options and finished seeds."""
    entries = equal_bytes.table_entries(rows)
    for entry in entries:
        cell = [other for other in entries if (other["task"], other["factor"]) == (entry["task"], entry["factor"])]
        best = max(other["after all rounds"]["mean"] for other in cell if other["model"] == SPARSE_MODEL)
        label = {name: entry[name] for name in ("task", "factor", "algorithm", "model")}
        group = results.filter_rows(rows, **label)
        done = results.done_rows(group)
        target = TARGET_FRACTION * best
        needed = [bytes_to_target(row, target) for row in done]
        entry |= {
            "target": target,
            "bytes to target": results.mean_and_sd(needed) if None not in needed else None,
            "density": 1.0 if equal_bytes.is_dense_model(entry) else done[0]["density"],
            "data": done[0]["data"],
            "command": train_command(done[0]),
            "seeds": " ".join(str(row["seed"]) for row in done),
            "finished": f"{len(done)}/{len(group)}",
        }
    return entries


def train_command(row: Row) -> str:
    """Return the command that repeats a run: the settings of its cell, then the options that differ from the defaults."""
    config, options = row["config"], json.loads(row["label"]["options"])
    words = ["fedsieve train", f"--task {row['label']['task']}", f"--algorithm {row['label']['algorithm']}", f"--seed {row['seed']}"]
    words += [f"--rounds {config['rounds']}", f"--density {row['density']:g}"]
    words += [f"--federation.participation {config['federation']['participation']:g}"]
    words += [f"--algorithm.{name.replace('_', '-')} {'none' if value is None else value}" for name, value in options.items()]
    return " ".join(words)


def bytes_to_target(row: Row, target: float) -> float | None:
    """Return the bytes until the first stored round whose value is at least the target, None if there is none."""
    pairs = zip(row["curves"][equal_bytes.shown_curve(row)], row["curves"]["bytes"], strict=True)
    return next((num_bytes for value, num_bytes in pairs if value is not None and value >= target), None)


def draw(rows: list[Row], writer: FigureWriter) -> None:
    """Draw quality against bytes of the sparse models for the first factor of each task."""
    equal_bytes.draw_first_factors(results.filter_rows(rows, model=SPARSE_MODEL), writer, "rivals")
