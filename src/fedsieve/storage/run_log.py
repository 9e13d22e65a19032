"""What a run leaves round by round, so that it can go on after any end: metrics.jsonl, supports.bin, supports.npz, checkpoints."""

import json
import os
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from fedsieve.runtime.evaluation import MeasuredRound, RunState
from fedsieve.storage import atomic, checkpoint, run_directory

SUPPORTS_INTERVAL_SECONDS = 5.0
"""Seconds between two writings of the trace of a run under way, for those who watch it."""
CHECKPOINT_TIME_RATIO = 50
"""By default a checkpoint may be written after this many times what the last one took: at most a fiftieth of the time is spent on them."""

ROUND_HEADER = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class CheckpointInterval:
    """How often a run is saved. It decides no result."""

    rounds: int = 1
    """least rounds from one checkpoint to the next; 0 writes none"""
    seconds: float | None = None
    """least seconds from one checkpoint to the next (default: fifty times what writing one takes); 0 for every round, whatever it costs"""

    def __post_init__(self) -> None:
        """Refuse what is no pace."""
        if self.rounds < 0:
            raise ValueError(f"checkpoint.rounds must be at least 0; got {self.rounds}")
        if self.seconds is not None and not self.seconds >= 0:
            raise ValueError(f"checkpoint.seconds must be at least 0; got {self.seconds:g}")


class RunHistory(NamedTuple):
    """The rounds a run has behind it."""

    state: RunState
    metrics_rows: list[dict[str, Any]]
    supports: list[np.ndarray]
    gate_histograms: list[np.ndarray]
    file_ends: tuple[int, int] = (0, 0)
    """where metrics.jsonl and supports.bin end with them"""


def load_history(folder: Path, initial_state: RunState, config: Mapping[str, Any], num_rounds: int) -> tuple[RunHistory, tuple[str, ...]]:
    """The past of the newest checkpoint that is whole, and what is to be said about newer ones; without any, the run's beginning."""
    found = checkpoint.latest(folder / run_directory.CHECKPOINTS)
    if found is None:
        return RunHistory(initial_state, [], [], []), ()
    checkpoint.check_settings(found.settings, config)
    if found.rounds_done > num_rounds:
        raise ValueError(f"rounds can only be raised: {found.rounds_done} are done already; got --rounds {num_rounds}")
    rows, end = read_metrics_rows(folder / run_directory.METRICS, found.rounds_done)
    supports, histograms, stop = read_supports(folder / run_directory.SUPPORTS, found.rounds_done)
    standing = RunState(found.restore(initial_state.server), found.rounds_done, rows[-1]["seconds"])
    return RunHistory(standing, rows, supports, histograms, (end, stop)), found.damage_reports


class RunLog:
    """A run's folder while it trains. Its files are on the disk before a checkpoint speaks of them."""

    def __init__(self, folder: Path, config: Mapping[str, Any], interval: CheckpointInterval, history: RunHistory) -> None:
        self.folder, self.config, self.interval = folder, config, interval
        self.metrics_rows, self.supports, self.gate_histograms = history.metrics_rows, history.supports, history.gate_histograms
        self.server, self.file_ends = history.state.server, history.file_ends
        self.rounds_saved, self.supports_written_at, self.checkpoint_written_at, self.checkpoint_seconds = (
            history.state.num_rounds_done,
            time.monotonic(),
            -np.inf,
            0.0,
        )

    def __enter__(self) -> Self:
        paths = (self.folder / run_directory.METRICS, self.folder / run_directory.SUPPORTS)
        with ExitStack() as files:
            self.metrics_file, self.supports_file = (
                files.enter_context(open_for_append(path, end)) for path, end in zip(paths, self.file_ends, strict=True)
            )
            atomic.fsync_directory(self.folder)
            self.files = files.pop_all()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error_type is None or issubclass(error_type, KeyboardInterrupt):
                self.save_checkpoint()
            if self.metrics_rows and not isinstance(error, OSError):
                self.write_supports()
        finally:
            self.files.close()

    def add_round(self, measured_round: MeasuredRound) -> None:
        """One round more."""
        histogram = np.zeros(0, np.int64) if measured_round.gate_histogram is None else measured_round.gate_histogram
        support = measured_round.parameters.nonzero()[:, 0].numpy(force=True).astype(np.int32)
        self.metrics_rows.append(measured_round.metrics)
        self.supports.append(support)
        self.gate_histograms.append(histogram)
        self.metrics_file.write(json.dumps(measured_round.metrics).encode() + b"\n")
        self.metrics_file.flush()
        self.supports_file.write(encode_round(support, histogram))
        self.server = measured_round.result.server
        if self.checkpoint_due():
            self.save_checkpoint()
        if time.monotonic() - self.supports_written_at > SUPPORTS_INTERVAL_SECONDS:
            self.write_supports()

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is worth its time."""
        rested = time.monotonic() - self.checkpoint_written_at
        wait = CHECKPOINT_TIME_RATIO * self.checkpoint_seconds if self.interval.seconds is None else self.interval.seconds
        return len(self.metrics_rows) - self.rounds_saved >= self.interval.rounds and rested >= wait

    def save_checkpoint(self) -> None:
        """A checkpoint of the last finished round, unless there is one."""
        if self.interval.rounds == 0 or len(self.metrics_rows) == self.rounds_saved:
            return
        began = time.monotonic()
        for file in (self.metrics_file, self.supports_file):
            file.flush()
            os.fsync(file.fileno())
        checkpoint.save(self.folder / run_directory.CHECKPOINTS, len(self.metrics_rows), self.server, self.config)
        self.rounds_saved, self.checkpoint_written_at = len(self.metrics_rows), time.monotonic()
        self.checkpoint_seconds = self.checkpoint_written_at - began

    def write_supports(self) -> None:
        """Supports and gate histograms of all rounds, for those who look."""
        gates = (
            {"gate_histogram": np.stack(self.gate_histograms), "gate_edges": np.linspace(0, 1, 21)} if self.gate_histograms[0].size else {}
        )
        run_directory.write_supports(self.folder, supports=run_directory.pad_supports(self.supports), **gates)
        self.supports_written_at = time.monotonic()


def open_for_append(path: Path, end: int) -> BinaryIO:
    """A file to append to, cut after what is known: a line that was half written, or rounds after the checkpoint, are computed again."""
    path.touch()
    file = path.open("r+b")
    file.truncate(end)
    file.seek(end)
    return file


def read_metrics_rows(path: Path, num_rounds: int) -> tuple[list[dict[str, Any]], int]:
    """The first rounds in metrics.jsonl, and where they end."""
    rows: list[dict[str, Any]] = []
    with open_binary(path) as file:
        for number in range(1, num_rounds + 1):
            line = file.readline()
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if not isinstance(row, dict) or row.get("round") != number or not isinstance(row.get("seconds"), float):
                raise run_directory.RunDirectoryError(
                    f"{path} is damaged at round {number}; to resume it must hold the {num_rounds} rounds of the checkpoint"
                )
            rows.append(row)
        return rows, file.tell()


def encode_round(support: np.ndarray, histogram: np.ndarray) -> bytes:
    """A round in supports.bin: two lengths, then the numbers, of four and eight bytes, little end first."""
    return ROUND_HEADER.pack(len(support), len(histogram)) + support.astype("<i4").tobytes() + histogram.astype("<i8").tobytes()


def read_supports(path: Path, num_rounds: int) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """The first supports and gate histograms in supports.bin, and where they end."""
    with open_binary(path) as file:
        data = file.read()
    supports, histograms, place = [], [], 0
    try:
        while len(histograms) < num_rounds:
            kept, bins = ROUND_HEADER.unpack_from(data, place)
            place += ROUND_HEADER.size
            supports.append(np.frombuffer(data, "<i4", kept, place))
            histograms.append(np.frombuffer(data, "<i8", bins, place + 4 * kept))
            place += 4 * kept + 8 * bins
    except (ValueError, struct.error):
        raise run_directory.RunDirectoryError(
            f"{path} is damaged at round {len(histograms) + 1}; to resume it must hold the {num_rounds} rounds of the checkpoint"
        ) from None
    return supports, histograms, place


def open_binary(path: Path) -> BinaryIO:
    """A file of a run, or one line about why not."""
    try:
        return path.open("rb")
    except OSError as problem:
        raise run_directory.RunDirectoryError(f"{path} cannot be read, and to resume it must be there: {problem.strerror}") from None
