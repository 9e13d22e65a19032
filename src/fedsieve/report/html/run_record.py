"""Read stored runs, finished or not, and find the runs below a directory."""

import json
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedsieve.models.sparse_model import read_model
from fedsieve.storage import run_directory
from fedsieve.storage.archives import read_arrays

Row = dict[str, Any]
Content = TypeVar("Content")
MAX_DEPTH = 3
"""The depth of directories that are searched for runs."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A stored run: settings, metrics of each round and result. Only the settings are always present."""

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
        """The name of the algorithm."""
        return str(self.config.get("algorithm", {}).get("name", "unknown"))

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.config.get("task", "unknown"))

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config.get("seed", 0))

    @property
    def num_rounds(self) -> int:
        """The configured number of rounds."""
        return int(self.config.get("rounds", len(self.rows)))

    @property
    def round_numbers(self) -> list[int]:
        """The numbers of the finished rounds."""
        return [row["round"] for row in self.rows]

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
    supports = _read_file(folder / run_directory.SUPPORTS_NPZ, _read_supports) or {}
    model = _read_file(folder / run_directory.MODEL, read_model)
    return RunRecord(
        folder=folder,
        config=_read_file(folder / run_directory.CONFIG, _read_config) or {},
        rows=read_round_metrics(folder / run_directory.METRICS),
        run_info=_read_file(folder / run_directory.RUN_INFO, _read_json) or {},
        result=_read_file(folder / run_directory.RESULT, _read_json),
        supports=supports.get("supports"),
        gate_histograms=supports.get("gate_histogram"),
        indices=None if model is None else model.indices,
        values=None if model is None else model.values,
    )


def read_round_metrics(path: Path) -> list[Row]:
    """Return the metrics of the rounds. Only the last line may be incomplete."""
    *complete_lines, rest = (_read_file(path, Path.read_text) or "").split("\n")
    rows = run_directory.decode_metrics(complete_lines, path)
    if rest:
        with suppress(run_directory.RunDirectoryError):
            rows = run_directory.decode_metrics([*complete_lines, rest], path)
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
    result = None if is_run_directory(folder) else _read_file(folder / run_directory.RESULT, _read_json)
    return result if result and "algorithms" in result else None


def _read_file(path: Path, read: Callable[[Path], Content]) -> Content | None:
    """Return the content of a file, None if it does not exist; raise an error if it is damaged."""
    if not path.exists():
        return None
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise run_directory.RunDirectoryError(f"{path} cannot be read, or is damaged: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    """Return the settings with underscores in the names of options."""
    return _with_underscores(tomllib.loads(path.read_text()))


def _with_underscores(table: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): _with_underscores(value) if isinstance(value, dict) else value for key, value in table.items()}


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, not an object")
    return content


def _read_supports(path: Path) -> dict[str, np.ndarray]:
    """Return supports and gate histograms; raise ValueError if they are not tables of whole numbers, one row per round."""
    arrays = read_arrays(path)
    for name, least in (("supports", -1), ("gate_histogram", 0)):
        table = arrays.get(name)
        if table is not None and (table.ndim != 2 or table.dtype.kind != "i" or table.min(initial=0) < least):
            raise ValueError(f"{name} is {table.dtype} of shape {table.shape}; it must be a table of whole numbers of at least {least}")
    return arrays
