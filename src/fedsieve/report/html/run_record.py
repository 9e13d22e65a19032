"""Read stored runs, finished or not, and find the runs below a directory."""

import json
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedsieve.storage import run_directory

Row = dict[str, Any]
MAX_DEPTH = 3
"""The depth of directories that are searched for runs."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A stored run: settings, metrics of each round and result. Only the settings always exist."""

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    run_info: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    supports: np.ndarray | None = None
    """(rounds, m): the indices kept in each round; shorter rows end in -1"""
    gate_histograms: np.ndarray | None = None
    """(rounds, 20): histograms of P(z != 0)"""
    indices: np.ndarray | None = None
    """(m,): the indices of nonzero weights"""
    values: np.ndarray | None = None
    """(m,): their weights"""

    @property
    def name(self) -> str:
        """The label of the run."""
        return self.folder.name

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self.config.get("algorithm", {}).get("name", "unknown"))

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.config.get("task", "unknown"))

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config.get("seed", 0))

    @property
    def rounds(self) -> int:
        """The configured number of rounds."""
        return int(self.config.get("rounds", len(self.rows)))

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return self.result is not None

    @cached_property
    def metric(self) -> str:
        """The name of the metric that is compared."""
        known = (self.result or {}).get("metric") or self.run_info.get("metric")
        return known or next((name for name in ("r2", "accuracy", "micro_f1") if self.rows and name in self.rows[0]), "metric")

    @cached_property
    def cumulative_bytes(self) -> np.ndarray:
        """The bytes up to each round, in both directions."""
        return np.cumsum([row["bytes_up"] + row["bytes_down"] for row in self.rows]) if self.rows else np.zeros(0)

    def column(self, name: str) -> list[float | None]:
        """Return one value per round, None if a round has none."""
        return [row.get(name) for row in self.rows]

    def total(self, name: str) -> int:
        """Return the sum of a column."""
        return int(sum(row.get(name) or 0 for row in self.rows))

    def last(self, name: str) -> float | None:
        """Return a value of the last round."""
        return self.rows[-1].get(name) if self.rows else None


def read_run(folder: Path) -> RunRecord:
    """Return the run in a directory without parts that do not exist yet; raise an error if a file is damaged."""
    trace = _read_arrays(folder / run_directory.SUPPORTS_NPZ)
    model = _read_model(folder / run_directory.MODEL)
    return RunRecord(
        folder=folder,
        config=_read_config(folder / run_directory.CONFIG),
        rows=read_round_metrics(folder / run_directory.METRICS),
        run_info=_read_json(folder / run_directory.RUN_INFO) or {},
        result=_read_json(folder / run_directory.RESULT),
        supports=trace.get("supports"),
        gate_histograms=trace.get("gate_histogram"),
        indices=model.get("index"),
        values=model.get("value"),
    )


def read_round_metrics(path: Path) -> list[Row]:
    """Return the metrics of the rounds. Only the last line may be incomplete."""
    if not path.exists():
        return []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise run_directory.RunDirectoryError(f"{path} cannot be read: {error}") from None
    *lines, rest = text.split("\n")
    rows = []
    texts: list[str] = [*lines, *([rest] if rest else [])]
    for number, line in enumerate(texts, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(name), int) for name in ("round", "bytes_up", "bytes_down")):
                raise ValueError("a round has at least round, bytes_up and bytes_down")
        except ValueError as error:
            if number > len(lines):
                break
            raise run_directory.RunDirectoryError(f"{path} is damaged in line {number}: {error}") from None
        rows.append(row)
    return rows


def is_run_directory(folder: Path) -> bool:
    """Return whether a directory is that of a run."""
    return (folder / run_directory.CONFIG).is_file()


def find_runs(folder: Path) -> list[Path]:
    """Return the directory itself if it is that of a run, else the runs below it, by name."""
    if not folder.exists():
        raise run_directory.RunDirectoryError(f"{folder} does not exist")
    if not folder.is_dir():
        raise run_directory.RunDirectoryError(f"{folder} is not a folder; name the folder of a run")
    if is_run_directory(folder):
        return [folder]
    levels = [folder.glob("/".join(["*"] * depth + [run_directory.CONFIG])) for depth in range(1, MAX_DEPTH + 1)]
    found = sorted(path.parent for level in levels for path in level)
    if not found:
        raise run_directory.RunDirectoryError(f"{folder} holds no run: there is no {run_directory.CONFIG} in it or below it")
    return found


def read_comparison(folder: Path) -> dict[str, Any] | None:
    """Return the result of `fedsieve compare`, if the directory is that of a comparison."""
    result = None if is_run_directory(folder) else _read_json(folder / run_directory.RESULT)
    return result if result and "algorithms" in result else None


def _read_config(path: Path) -> dict[str, Any]:
    """Return the settings with underscores in the names of options."""
    try:
        return _with_underscores(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise run_directory.RunDirectoryError(f"{path} cannot be read: {error}") from None


def _with_underscores(table: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): _with_underscores(value) if isinstance(value, dict) else value for key, value in table.items()}


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise run_directory.RunDirectoryError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise run_directory.RunDirectoryError(f"{path} is damaged: it holds {type(found).__name__}, not an object")
    return found


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile) as error:
        raise run_directory.RunDirectoryError(f"{path} is damaged: {error}") from None


def _read_model(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise run_directory.RunDirectoryError(f"{path} is damaged: {error}") from None
