"""Finished runs of a study on disk, one JSON line each, and what reports ask of them. No torch here."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsieve.experiments.compare import mean_and_sd, paired_difference
from fedsieve.storage.run_directory import RunDirectoryError, atomic_write

ROWS_FILE, PLAN_FILE = "rows.jsonl", "study.json"
DONE, DIVERGED, FAILED = "done", "diverged", "failed"
"""A run that diverged would do so again and is not repeated; one that failed for another reason is tried again."""
REFERENCE_METHOD = "sieve"
"""The method at whose bytes the others are read in `equal-bytes`."""
DENSE_METHODS = ("flops", "fed-ht", "fed-avg")
"""Methods with dense messages: shown there, but no sparse rivals at equal bytes."""
DEFAULT_VARIANT = "default"
"""The variant that the others are held against in `ablation`."""

Row = dict[str, Any]


def write_plan(folder: Path, name: str, description: str, scale: str, keys_and_labels: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Say which rows the study in this folder is made of now: rows of an earlier plan or of another scale stay, unread."""
    runs = [[key, label_key(label)] for key, label in keys_and_labels]
    atomic_write(folder / PLAN_FILE, json.dumps({"name": name, "description": description, "scale": scale, "runs": runs}).encode())


def read_plan(folder: Path) -> dict[str, Any]:
    """Name, scale and runs of the study in a folder."""
    try:
        return json.loads((folder / PLAN_FILE).read_text())
    except OSError:
        raise RunDirectoryError(f"{folder} holds no study; `fedsieve reproduce` fills one") from None


def read_rows(folder: Path) -> list[Row]:
    """The rows of the study that is planned here, in the order of its cells."""
    there = {(row["key"], label_key(row["label"])): row for row in all_rows(folder)}
    return [there[key, label] for key, label in read_plan(folder)["runs"] if (key, label) in there]


def all_rows(folder: Path) -> list[Row]:
    """All rows of a folder, the last one of each run and label; a torn last line is not a row."""
    path = folder / ROWS_FILE
    if not path.exists():
        return []
    found: dict[tuple[str, str], Row] = {}
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        row = json.loads(line)
        found[row["key"], label_key(row["label"])] = row
    return list(found.values())


def label_key(label: Mapping[str, Any]) -> str:
    """A label as text, the same whatever the order of its keys."""
    return json.dumps(label, sort_keys=True)


class RowWriter:
    """Appends rows, each on disk before the next; what a killed process tore is cut off first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROWS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)
        except OSError as problem:
            raise RunDirectoryError(f"cannot write a study into {folder}: {problem.strerror}; choose another folder with --out") from None

    def append(self, row: Row) -> None:
        """One line, in one write."""
        with self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def filter_rows(rows: Iterable[Row], **label: Any) -> list[Row]:
    """The rows whose label has all of these values, by seed."""
    chosen = [row for row in rows if all(row["label"].get(name) == value for name, value in label.items())]
    return sorted(chosen, key=lambda row: row["seed"])


def done_rows(rows: Iterable[Row]) -> list[Row]:
    """Those that came to an end."""
    return [row for row in rows if row["state"] == DONE]


def diverged_or_failed_rows(rows: Iterable[Row]) -> list[Row]:
    """Those that did not."""
    return [row for row in rows if row["state"] != DONE]


def collect_values(rows: Iterable[Row], name: str) -> list[float]:
    """One value of each finished run."""
    return [row["values"][name] for row in done_rows(rows) if row["values"].get(name) is not None]


def mean_and_sd_over_seeds(rows: Iterable[Row], name: str) -> dict[str, float | None]:
    """Mean and sd over seeds."""
    return mean_and_sd(collect_values(rows, name))


def difference_over_seeds(rows: Iterable[Row], reference: Iterable[Row], name: str) -> dict[str, float | None]:
    """Paired over the seeds both finished: the mean difference and the half-width of its 95 % t interval."""
    one, other = ({row["seed"]: row["values"].get(name) for row in done_rows(part)} for part in (rows, reference))
    shared = sorted(one.keys() & other.keys())
    return paired_difference([one[seed] for seed in shared], [other[seed] for seed in shared])


def distinct_seeds(rows: Iterable[Row]) -> list[int]:
    """The seeds, each once."""
    return sorted({row["seed"] for row in rows})


def value_at_bytes(row: Row, max_bytes: float) -> float | None:
    """The metric after the last round that `limit` bytes pay for."""
    curves = row["curves"]
    paid = [value for value, spent in zip(curves[row["metric"]], curves["bytes"], strict=True) if spent <= max_bytes and value is not None]
    return paid[-1] if paid else None


def get_curve(row: Row, name: str) -> Sequence[float | None] | None:
    """A value per stored round, None if the run has no such value."""
    return row["curves"].get(name)
