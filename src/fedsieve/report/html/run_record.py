"""A run as the store holds it, whole or half-written; and the runs below a folder."""

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
"""Folders below the one given in which runs are looked for."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: what was asked for, what every round gave, what came out. Only the settings are always there."""

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    run_info: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    supports: np.ndarray | None = None
    """(rounds, m): the indices kept in each round; shorter rows end in -1"""
    gate_histograms: np.ndarray | None = None
    """(rounds, 20): how P(z != 0) is spread"""
    indices: np.ndarray | None = None
    """(m,): the indices the model keeps"""
    values: np.ndarray | None = None
    """(m,): their weights"""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.folder.name

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self.config.get("algorithm", {}).get("name", "unknown"))

    @property
    def task(self) -> str:
        """What was learned."""
        return str(self.config.get("task", "unknown"))

    @property
    def seed(self) -> int:
        """Where its random numbers begin."""
        return int(self.config.get("seed", 0))

    @property
    def rounds(self) -> int:
        """Rounds asked for."""
        return int(self.config.get("rounds", len(self.rows)))

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.result is not None

    @cached_property
    def metric(self) -> str:
        """The number that is compared."""
        known = (self.result or {}).get("metric") or self.run_info.get("metric")
        return known or next((name for name in ("r2", "accuracy", "micro_f1") if self.rows and name in self.rows[0]), "metric")

    @cached_property
    def cumulative_bytes(self) -> np.ndarray:
        """Bytes that crossed up to each round, both ways."""
        return np.cumsum([row["bytes_up"] + row["bytes_down"] for row in self.rows]) if self.rows else np.zeros(0)

    def column(self, name: str) -> list[float | None]:
        """One number a round, None where a round has none."""
        return [row.get(name) for row in self.rows]

    def total(self, name: str) -> int:
        """A column added up."""
        return int(sum(row.get(name) or 0 for row in self.rows))

    def last(self, name: str) -> float | None:
        """A number of the last round there is."""
        return self.rows[-1].get(name) if self.rows else None


def read_run(folder: Path) -> RunRecord:
    """The run in a folder; what is not there yet is left out, what is damaged is refused in one line."""
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
    """The rounds so far. The last line may be half-written; any other that is no round is an error."""
    if not path.exists():
        return []
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise run_directory.RunDirectoryError(f"{path} cannot be read: {problem}") from None
    *lines, rest = text.split("\n")
    rows = []
    texts: list[str] = [*lines, *([rest] if rest else [])]
    for number, line in enumerate(texts, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(name), int) for name in ("round", "bytes_up", "bytes_down")):
                raise ValueError("a round has at least round, bytes_up and bytes_down")
        except ValueError as problem:
            if number > len(lines):
                break
            raise run_directory.RunDirectoryError(f"{path} is damaged in line {number}: {problem}") from None
        rows.append(row)
    return rows


def is_run_directory(folder: Path) -> bool:
    """Whether the folder itself is a run's."""
    return (folder / run_directory.CONFIG).is_file()


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else those of the runs below it, by name."""
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
    """What `fedsieve compare` found, where the folder is one of its own."""
    result = None if is_run_directory(folder) else _read_json(folder / run_directory.RESULT)
    return result if result and "algorithms" in result else None


def _read_config(path: Path) -> dict[str, Any]:
    """The settings, with underscores in the names of options."""
    try:
        return _with_underscores(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise run_directory.RunDirectoryError(f"{path} cannot be read: {problem}") from None


def _with_underscores(table: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): _with_underscores(value) if isinstance(value, dict) else value for key, value in table.items()}


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise run_directory.RunDirectoryError(f"{path} is damaged: {problem}") from None
    if not isinstance(found, dict):
        raise run_directory.RunDirectoryError(f"{path} is damaged: it holds {type(found).__name__}, not an object")
    return found


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile) as problem:
        raise run_directory.RunDirectoryError(f"{path} is damaged: {problem}") from None


def _read_model(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except (OSError, SafetensorError) as problem:
        raise run_directory.RunDirectoryError(f"{path} is damaged: {problem}") from None
