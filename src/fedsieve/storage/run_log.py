"""The log of a run under training, from which it can be resumed: metrics.jsonl, supports.bin, supports.npz and checkpoints."""

import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self
from zlib import crc32

import numpy as np

from fedsieve.runtime.evaluation import MeasuredRound, RunState
from fedsieve.storage import atomic, checkpoint, run_directory

SUPPORTS_INTERVAL_SECONDS = 5.0
"""Minimum seconds between two writes of supports.npz, which the live report reads."""
CHECKPOINT_TIME_RATIO = 50
"""By default the time between checkpoints is at least this many times the time to write one, so they cost at most 2 % of a run."""

ROUND_HEADER = struct.Struct("<III")
"""Of a round in supports.bin: the lengths of support and histogram, and the CRC-32 of both lengths and values."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInterval:
    """How often a checkpoint is written. This does not influence results."""

    rounds: int = 1
    """minimum number of rounds between checkpoints; 0 writes none"""
    seconds: float | None = None
    """minimum seconds between checkpoints (default: 50 times the time to write one)"""

    def __post_init__(self) -> None:
        """Validate the options."""
        if self.rounds < 0:
            raise ValueError(f"checkpoint.rounds must be at least 0; got {self.rounds}")
        if self.seconds is not None and not self.seconds >= 0:
            raise ValueError(f"checkpoint.seconds must be at least 0; got {self.seconds:g}")


class RunHistory(NamedTuple):
    """The finished rounds of a run."""

    state: RunState
    metrics_rows: list[dict[str, Any]]
    supports: list[np.ndarray]
    gate_histograms: list[np.ndarray]
    file_ends: tuple[int, int] = (0, 0)
    """lengths of metrics.jsonl and supports.bin after these rounds"""


def load_history(folder: Path, initial_state: RunState, config: Mapping[str, Any], num_rounds: int) -> tuple[RunHistory, tuple[str, ...]]:
    """The history up to the newest checkpoint that is not damaged, or an empty one, and reports about damaged checkpoints."""
    last = checkpoint.latest(folder / run_directory.CHECKPOINTS)
    if last is None:
        return RunHistory(initial_state, [], [], []), ()
    checkpoint.check_settings(last.settings, config)
    if last.rounds_done > num_rounds:
        raise ValueError(f"--rounds cannot be lower than the rounds already done, {last.rounds_done}; got {num_rounds}")
    rows, metrics_end = read_metrics_rows(folder / run_directory.METRICS, last.rounds_done)
    supports, histograms, supports_end = read_supports(folder / run_directory.SUPPORTS, last.rounds_done)
    state = RunState(last.restore(initial_state.server), last.rounds_done, rows[-1]["seconds"], last.memories, last.buffers)
    return RunHistory(state, rows, supports, histograms, (metrics_end, supports_end)), last.damage_reports


class RunLog:
    """Writes the files of a run under training. All rounds are on disk before the checkpoint that counts them."""

    def __init__(self, folder: Path, config: Mapping[str, Any], interval: CheckpointInterval, history: RunHistory) -> None:
        self.folder, self.config, self.interval = folder, config, interval
        self.metrics_rows, self.supports, self.gate_histograms = history.metrics_rows, history.supports, history.gate_histograms
        self.server, self.file_ends = history.state.server, history.file_ends
        self.memories, self.buffers = history.state.memories, history.state.buffers
        self.rounds_saved = history.state.num_rounds_done
        self.supports_written_at, self.checkpoint_written_at = time.monotonic(), -np.inf
        self.checkpoint_seconds = 0.0

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
        """Log a round, and write a checkpoint if one is due."""
        histogram = np.zeros(0, np.int64) if measured_round.gate_histogram is None else measured_round.gate_histogram
        support = measured_round.parameters.nonzero()[:, 0].numpy(force=True).astype(np.int32)
        self.metrics_rows.append(measured_round.metrics)
        self.supports.append(support)
        self.gate_histograms.append(histogram)
        self.metrics_file.write(run_directory.encode_metrics(measured_round.metrics))
        self.metrics_file.flush()
        self.supports_file.write(encode_round(support, histogram))
        result = measured_round.result
        self.server, self.memories, self.buffers = result.server, result.memories, result.buffers
        if self.checkpoint_due():
            self.save_checkpoint()
        if time.monotonic() - self.supports_written_at > SUPPORTS_INTERVAL_SECONDS:
            self.write_supports()

    def checkpoint_due(self) -> bool:
        """Whether the interval since the last checkpoint is over."""
        elapsed = time.monotonic() - self.checkpoint_written_at
        interval = CHECKPOINT_TIME_RATIO * self.checkpoint_seconds if self.interval.seconds is None else self.interval.seconds
        return len(self.metrics_rows) - self.rounds_saved >= self.interval.rounds and elapsed >= interval

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the last finished round, unless it exists or checkpoints are switched off."""
        if self.interval.rounds == 0 or len(self.metrics_rows) == self.rounds_saved:
            return
        start = time.monotonic()
        for file in (self.metrics_file, self.supports_file):
            file.flush()
            os.fsync(file.fileno())
        folder, num_rounds = self.folder / run_directory.CHECKPOINTS, len(self.metrics_rows)
        checkpoint.save(folder, num_rounds, self.server, self.config, self.memories, self.buffers)
        self.rounds_saved, self.checkpoint_written_at = len(self.metrics_rows), time.monotonic()
        self.checkpoint_seconds = self.checkpoint_written_at - start

    def write_supports(self) -> None:
        """Write supports.npz: supports and gate histograms of all rounds."""
        gates = (
            {"gate_histogram": np.stack(self.gate_histograms), "gate_edges": np.linspace(0, 1, 21)} if self.gate_histograms[0].size else {}
        )
        run_directory.write_supports(self.folder, supports=run_directory.pad_supports(self.supports), **gates)
        self.supports_written_at = time.monotonic()


@contextmanager
def open_log(folder: Path, initial_state: RunState, config: Mapping[str, Any], num_rounds: int) -> Iterator[RunLog]:
    """Open the log of a run in its folder, with the rounds that it has already; the folder is locked."""
    with run_directory.report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with run_directory.lock(folder):
            history, _ = load_history(folder, initial_state, config, num_rounds)
            with RunLog(folder, config, CheckpointInterval(), history) as log:
                yield log


def open_for_append(path: Path, end: int) -> BinaryIO:
    """Open a file for appending after `end`; what follows is removed, as these rounds are computed again."""
    file = os.fdopen(atomic.open_own_file(path, os.O_RDWR | os.O_CREAT), "r+b")
    file.truncate(end)
    file.seek(end)
    return file


def read_metrics_rows(path: Path, num_rounds: int) -> tuple[list[dict[str, Any]], int]:
    """The first `num_rounds` rows of metrics.jsonl, and the position after them."""
    with open_binary(path) as file:
        lines = [line for _ in range(num_rounds) if (line := file.readline()).endswith(b"\n")]
        end = file.tell()
    rows = run_directory.decode_metrics([line.decode(errors="replace").rstrip("\n") for line in lines], path)
    if len(rows) < num_rounds or not all(isinstance(row.get("seconds"), float) for row in rows):
        raise run_directory.RunDirectoryError(
            f"{path} is damaged: it has {len(rows)} rounds with their time, and to resume it must hold the {num_rounds} of the checkpoint"
        )
    return rows, end


def encode_round(support: np.ndarray, histogram: np.ndarray) -> bytes:
    """A round in supports.bin: two lengths, a checksum, then the support as int32 and the histogram as int64, little-endian."""
    values = support.astype("<i4").tobytes() + histogram.astype("<i8").tobytes()
    return ROUND_HEADER.pack(len(support), len(histogram), _round_checksum(len(support), len(histogram), values)) + values


def _round_checksum(num_kept: int, num_bins: int, values: bytes) -> int:
    return crc32(values, crc32(f"{num_kept} {num_bins}".encode()))


def read_supports(path: Path, num_rounds: int) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """The first `num_rounds` supports and gate histograms of supports.bin, and the position after them."""
    with open_binary(path) as file:
        data = file.read()
    supports, histograms, position = [], [], 0
    try:
        while len(histograms) < num_rounds:
            num_kept, num_bins, checksum = ROUND_HEADER.unpack_from(data, position)
            position += ROUND_HEADER.size
            end = position + 4 * num_kept + 8 * num_bins
            if checksum != _round_checksum(num_kept, num_bins, data[position:end]):
                raise ValueError
            supports.append(np.frombuffer(data, "<i4", num_kept, position))
            histograms.append(np.frombuffer(data, "<i8", num_bins, position + 4 * num_kept))
            position = end
    except (ValueError, struct.error):
        raise run_directory.RunDirectoryError(
            f"{path} is damaged at round {len(histograms) + 1}; to resume it must hold the {num_rounds} rounds of the checkpoint"
        ) from None
    return supports, histograms, position


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading; raises RunDirectoryError if this fails."""
    try:
        return path.open("rb")
    except OSError as error:
        raise run_directory.RunDirectoryError(f"{path} cannot be read, which is needed to resume: {error.strerror}") from None
