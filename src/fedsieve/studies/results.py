"""Stored runs of a study, one JSON line each, and queries on them. Does not import torch."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fedsieve.experiments.compare import mean_and_sd, paired_difference
from fedsieve.storage.atomic import open_own_file
from fedsieve.storage.run_directory import RunDirectoryError, atomic_write

ROWS_FILE, PLAN_FILE, CLAIMS_FILE = "rows.jsonl", "study.json", "claims.json"
DONE, DIVERGED, FAILED = "done", "diverged", "failed"
"""States of a run. A diverged run would diverge again and is not repeated; a failed run is."""

TUNED, PUBLISHED, RECOMMENDED, CENTRAL = "tuned", "as published", "recommended", "central"
"""Values of the label `setting`. FLoPS and FLoPS-PA run as published (recipe paper) or recommended, FedIter-HT as published or tuned."""
SWEPT_STEP_RULES = {PUBLISHED: "constant", RECOMMENDED: "polyak"}
"""The step rule of FLoPS-PA in `learning-rates` under each recipe; there it is the value of the label `setting`."""
UNCONSTRAINED = {"flops": "fed-sgd", "flops-pa": "fed-avg"}
"""The algorithm that trains the dense model with the same messages as a gated one: gradients or parameters."""
NON_IID, IID = "non-iid", "iid"
"""Values of the label `skew`."""
NO_ATTACK = "none"
"""Value of the label `attack` without malicious clients."""
WEIGHTED_MEAN = "weighted"
"""Label of the default aggregator, with which losses are compared."""
DEFAULT_VARIANT = "default"
"""The variant that `ablation` compares the others with."""
PAPER_RECIPE, PAPER_DUAL, RECOMMENDED_DUAL, BISECTION = "recipe paper", "the paper's dual", "recommended dual", "bisection"
"""Values of the label `variant` in `constraint`. All variants that solve the dual exactly begin with `bisection`."""
THEIRS, OURS = "theirs", "ours"
"""Values of the label `role` in `tables`: an algorithm with the options of a published table, or one of ours with its defaults."""
REFERENCE_ALGORITHM = "sieve"
"""The algorithm whose bytes are the limit in `equal-bytes` and `rivals`."""
DENSE_MODEL = "dense model"
"""Label `model` of a line in `rivals` that shows the model of a compressor before it is cut to the density."""
SPARSE_MODEL = "sparse model"
DENSE_ALGORITHMS = ("flops", "fed-ht", "fed-avg", "eden")
"""Algorithms with dense messages. `equal-bytes` shows them, but does not count them as competitors."""

Row = dict[str, Any]


def write_plan(folder: Path, name: str, description: str, scale: str, keys_and_labels: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Store which runs belong to the study. Rows of an earlier plan or of another scale stay in the folder, unread."""
    runs = [[key, label_key(label)] for key, label in keys_and_labels]
    atomic_write(folder / PLAN_FILE, json.dumps({"name": name, "description": description, "scale": scale, "runs": runs}).encode())


def is_study_directory(folder: Path) -> bool:
    """Return whether a directory is that of a study."""
    return (folder / PLAN_FILE).exists()


def find_studies(folder: Path) -> list[Path]:
    """Return the study in a directory, or those below it."""
    return [folder] if is_study_directory(folder) else sorted(path for path in folder.glob("*") if is_study_directory(path))


def read_plan(folder: Path) -> dict[str, Any]:
    """Return name, description, scale and runs of the study in a folder."""
    try:
        return json.loads((folder / PLAN_FILE).read_text())
    except OSError:
        raise RunDirectoryError(f"{folder} contains no study; `fedsieve reproduce` computes one") from None


def read_rows(folder: Path) -> list[Row]:
    """Return the stored rows of the planned study, in the order of the plan."""
    stored = {(row["key"], label_key(row["label"])): row for row in all_rows(folder)}
    return [stored[key, label] for key, label in read_plan(folder)["runs"] if (key, label) in stored]


def all_rows(folder: Path) -> list[Row]:
    """Return all rows of a folder, the last one of each run and label. An incomplete last line is ignored."""
    path = folder / ROWS_FILE
    if not path.exists():
        return []
    rows: dict[tuple[str, str], Row] = {}
    *lines, _ = path.read_bytes().split(b"\n")
    for line in lines:
        row = json.loads(line)
        rows[row["key"], label_key(row["label"])] = row
    return list(rows.values())


def label_key(label: Mapping[str, Any]) -> str:
    """Return a label as text that does not depend on the order of its keys."""
    return json.dumps(label, sort_keys=True)


class RowWriter:
    """Appends rows and flushes each to disk. An incomplete last line of a killed process is removed first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROWS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._open(os.O_RDWR) as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        except OSError as error:
            raise RunDirectoryError(f"cannot write a study into {folder}: {error.strerror}; choose another folder with --out") from None

    def append(self, row: Row) -> None:
        """Append one row as one line."""
        with self._open(os.O_WRONLY | os.O_APPEND) as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _open(self, flags: int) -> BinaryIO:
        return os.fdopen(open_own_file(self.path, flags | os.O_CREAT), "ab" if flags & os.O_APPEND else "r+b")


def filter_rows(rows: Iterable[Row], **label: Any) -> list[Row]:
    """Return the rows whose label has all these values, sorted by seed."""
    selected = [row for row in rows if all(row["label"].get(name) == value for name, value in label.items())]
    return sorted(selected, key=lambda row: row["seed"])


def group_by_label(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each condition, in the order of the conditions."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label_key(row["label"]), []).append(row)
    return list(groups.values())


def label_values(rows: Iterable[Row], *names: str) -> list[Any]:
    """Return the distinct values of a label, or tuples of several, in the order of the rows."""
    return list(dict.fromkeys(row["label"][names[0]] if len(names) == 1 else tuple(row["label"][name] for name in names) for row in rows))


def done_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of finished runs."""
    return [row for row in rows if row["state"] == DONE]


def diverged_or_failed_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of runs that did not finish."""
    return [row for row in rows if row["state"] != DONE]


def collect_values(rows: Iterable[Row], name: str) -> list[float]:
    """Return one value of each finished run that has it."""
    return [row["values"][name] for row in done_rows(rows) if row["values"].get(name) is not None]


def mean_and_sd_over_seeds(rows: Iterable[Row], name: str) -> dict[str, float | None]:
    """Return mean and standard deviation over the seeds."""
    return mean_and_sd(collect_values(rows, name))


def mean_over_seeds(rows: Iterable[Row], name: str) -> float | None:
    """Return the mean over the seeds."""
    return mean_and_sd_over_seeds(rows, name)["mean"]


def difference_over_seeds(rows: Iterable[Row], reference: Iterable[Row], name: str) -> dict[str, float | None]:
    """Return the mean difference over the seeds that both finished, and the half-width of its 95 % t interval."""
    values, base = ({row["seed"]: row["values"].get(name) for row in done_rows(part)} for part in (rows, reference))
    shared = sorted(values.keys() & base.keys())
    return paired_difference([values[seed] for seed in shared], [base[seed] for seed in shared])


def total_bytes(row: Row, count: str = "") -> int:
    """Return the bytes of a run, uplink and downlink. `count` is empty (wire), `_payload` or `_paper_formula`."""
    return row["bytes"]["up" + count] + row["bytes"]["down" + count]


def bytes_over_seeds(rows: Iterable[Row], count: str = "") -> dict[str, float | None]:
    """Return mean and standard deviation of the bytes of finished runs."""
    return mean_and_sd([total_bytes(row, count) for row in done_rows(rows)])


def describe_data(rows: Iterable[Row]) -> str:
    """Return one sentence on the examples of each task: source, number and split."""
    tasks: dict[str, list[str]] = {}
    for row in rows:
        if row.get("data"):
            tasks.setdefault(row["data"], []).append(row["label"]["task"])
    return "; ".join(f"{', '.join(dict.fromkeys(names))}: {sentence}" for sentence, names in tasks.items())


def distinct_seeds(rows: Iterable[Row]) -> list[int]:
    """Return the sorted seeds."""
    return sorted({row["seed"] for row in rows})


def value_at_bytes(row: Row, max_bytes: float, curve: str | None = None) -> float | None:
    """Return the metric, or another curve, after the last stored round that needs at most `max_bytes`."""
    curves = row["curves"]
    pairs = zip(curves.get(curve or row["metric"]) or (), curves["bytes"], strict=False)
    values = [value for value, num_bytes in pairs if num_bytes <= max_bytes and value is not None]
    return values[-1] if values else None


def get_curve(row: Row, name: str) -> Sequence[float | None] | None:
    """Return one value per stored round, None if the run has no such curve."""
    return row["curves"].get(name)
