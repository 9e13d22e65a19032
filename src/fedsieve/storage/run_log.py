"""What a run leaves round by round, so that it can go on after any end: metrics.jsonl, rounds.bin, trace.npz, checkpoints."""

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

from fedsieve.experiments.training import Progress, Standing
from fedsieve.storage import atomic, checkpoint, run_directory

TRACE_EVERY = 5.0
"""Seconds between two writings of the trace of a run under way, for those who watch it."""
SHARE = 50
"""By default a checkpoint may be written after this many times what the last one took: at most a fiftieth of the time is spent on them."""

LENGTHS = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class Pace:
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


class Past(NamedTuple):
    """The rounds a run has behind it."""

    standing: Standing
    rows: list[dict[str, Any]]
    supports: list[np.ndarray]
    histograms: list[np.ndarray]
    ends: tuple[int, int] = (0, 0)
    """where metrics.jsonl and rounds.bin end with them"""


def past(folder: Path, begun: Standing, config: Mapping[str, Any], rounds: int) -> tuple[Past, tuple[str, ...]]:
    """The past of the newest checkpoint that is whole, and what is to be said about newer ones; without any, the run's beginning."""
    found = checkpoint.newest(folder / run_directory.CHECKPOINTS)
    if found is None:
        return Past(begun, [], [], []), ()
    checkpoint.refuse_changes(found.settings, config)
    if found.rounds > rounds:
        raise ValueError(f"rounds can only be raised: {found.rounds} are done already; got --rounds {rounds}")
    rows, end = read_rows(folder / run_directory.METRICS, found.rounds)
    supports, histograms, stop = read_rounds(folder / run_directory.ROUNDS, found.rounds)
    standing = Standing(found.restore(begun.server), found.rounds, rows[-1]["seconds"])
    return Past(standing, rows, supports, histograms, (end, stop)), found.damaged


class Journal:
    """A run's folder while it trains. Its files are on the disk before a checkpoint speaks of them."""

    def __init__(self, folder: Path, config: Mapping[str, Any], pace: Pace, past: Past) -> None:
        self.folder, self.config, self.pace = folder, config, pace
        self.rows, self.supports, self.histograms = past.rows, past.supports, past.histograms
        self.server, self.ends = past.standing.server, past.ends
        self.saved, self.traced, self.written, self.cost = past.standing.rounds, time.monotonic(), -np.inf, 0.0

    def __enter__(self) -> Self:
        paths = (self.folder / run_directory.METRICS, self.folder / run_directory.ROUNDS)
        with ExitStack() as files:
            self.metrics, self.rounds = (files.enter_context(continued(path, end)) for path, end in zip(paths, self.ends, strict=True))
            atomic.settle(self.folder)
            self.files = files.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt):
                self.save()
            if self.rows and not isinstance(error, OSError):
                self.trace()
        finally:
            self.files.close()

    def add(self, step: Progress) -> None:
        """One round more."""
        histogram = np.zeros(0, np.int64) if step.histogram is None else step.histogram
        support = step.theta.nonzero()[:, 0].numpy(force=True).astype(np.int32)
        self.rows.append(step.row)
        self.supports.append(support)
        self.histograms.append(histogram)
        self.metrics.write(json.dumps(step.row).encode() + b"\n")
        self.metrics.flush()
        self.rounds.write(record(support, histogram))
        self.server = step.round.server
        if self.due():
            self.save()
        if time.monotonic() - self.traced > TRACE_EVERY:
            self.trace()

    def due(self) -> bool:
        """Whether a checkpoint is worth its time."""
        rested = time.monotonic() - self.written
        wait = SHARE * self.cost if self.pace.seconds is None else self.pace.seconds
        return len(self.rows) - self.saved >= self.pace.rounds and rested >= wait

    def save(self) -> None:
        """A checkpoint of the last finished round, unless there is one."""
        if self.pace.rounds == 0 or len(self.rows) == self.saved:
            return
        began = time.monotonic()
        for file in (self.metrics, self.rounds):
            file.flush()
            os.fsync(file.fileno())
        checkpoint.save(self.folder / run_directory.CHECKPOINTS, len(self.rows), self.server, self.config)
        self.saved, self.written = len(self.rows), time.monotonic()
        self.cost = self.written - began

    def trace(self) -> None:
        """Supports and gate histograms of all rounds, for those who look."""
        gates = {"gate_histogram": np.stack(self.histograms), "gate_edges": np.linspace(0, 1, 21)} if self.histograms[0].size else {}
        run_directory.write_trace(self.folder, supports=run_directory.padded(self.supports), **gates)
        self.traced = time.monotonic()


def continued(path: Path, end: int) -> BinaryIO:
    """A file to append to, cut after what is known: a line that was half written, or rounds after the checkpoint, are computed again."""
    path.touch()
    file = path.open("r+b")
    file.truncate(end)
    file.seek(end)
    return file


def read_rows(path: Path, count: int) -> tuple[list[dict[str, Any]], int]:
    """The first rounds in metrics.jsonl, and where they end."""
    rows: list[dict[str, Any]] = []
    with opened(path) as file:
        for number in range(1, count + 1):
            line = file.readline()
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if not isinstance(row, dict) or row.get("round") != number or not isinstance(row.get("seconds"), float):
                raise run_directory.FolderError(
                    f"{path} is damaged at round {number}; to resume it must hold the {count} rounds of the checkpoint"
                )
            rows.append(row)
        return rows, file.tell()


def record(support: np.ndarray, histogram: np.ndarray) -> bytes:
    """A round in rounds.bin: two lengths, then the numbers, of four and eight bytes, little end first."""
    return LENGTHS.pack(len(support), len(histogram)) + support.astype("<i4").tobytes() + histogram.astype("<i8").tobytes()


def read_rounds(path: Path, count: int) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """The first supports and gate histograms in rounds.bin, and where they end."""
    with opened(path) as file:
        data = file.read()
    supports, histograms, place = [], [], 0
    try:
        while len(histograms) < count:
            kept, bins = LENGTHS.unpack_from(data, place)
            place += LENGTHS.size
            supports.append(np.frombuffer(data, "<i4", kept, place))
            histograms.append(np.frombuffer(data, "<i8", bins, place + 4 * kept))
            place += 4 * kept + 8 * bins
    except (ValueError, struct.error):
        raise run_directory.FolderError(
            f"{path} is damaged at round {len(histograms) + 1}; to resume it must hold the {count} rounds of the checkpoint"
        ) from None
    return supports, histograms, place


def opened(path: Path) -> BinaryIO:
    """A file of a run, or one line about why not."""
    try:
        return path.open("rb")
    except OSError as problem:
        raise run_directory.FolderError(f"{path} cannot be read, and to resume it must be there: {problem.strerror}") from None
