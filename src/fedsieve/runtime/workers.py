"""Processes that share the clients of a cohort, so that a simulation uses all cores.

A worker is a fork of the run: it has the examples, the algorithm and the objective without a copy, and even a loss that cannot be pickled.
Threads would wait for each other instead: a local step of a small model spends as long in the interpreter as in compiled code. Torch's own
threads are worse: they meet at a barrier after every operation, and each operation of a local step is a few microseconds long.
"""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
MEASURED_SECONDS = 0.05
"""Time over which exchanges are measured with and without workers: far above the precision of the clock and pauses of the system."""
START_SECONDS = 0.5
"""Minimum time that each worker must save in the whole run: ten times what it takes to start and to measure it."""


class WorkerLostError(RuntimeError):
    """A worker process ended before it replied."""


def split_evenly(items: Sequence[Item], sizes: Sequence[int], num_parts: int) -> list[list[Item]]:
    """Return at most `num_parts` consecutive parts with about equal total sizes; no part is empty."""
    ends = list(accumulate(sizes))
    parts = [int(num_parts * (end - size / 2) / ends[-1]) for end, size in zip(ends, sizes, strict=True)]
    return [[items[i] for i in group] for _, group in groupby(range(len(items)), key=parts.__getitem__)]


class WorkerPool:
    """Forks of this process that call one function; they end when the pool is no longer used, or with this process."""

    def __init__(self, function: Callable[..., Any], num_workers: int) -> None:
        self._connections: list[Connection] = []
        processes: list[BaseProcess] = []
        self.close = weakref.finalize(self, _end_workers, os.getpid(), self._connections, processes)
        """End the workers."""
        context = multiprocessing.get_context("fork")
        for _ in range(num_workers):
            here, there = context.Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # other threads: of libraries, which reset themselves after a fork
                process = context.Process(target=_serve, args=(function, there, [*self._connections, here]), daemon=True)
                process.start()
            there.close()
            self._connections.append(here)
            processes.append(process)

    @property
    def size(self) -> int:
        """The number of processes, this one included."""
        return len(self._connections) + 1

    def map(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the result of each task in order; the first one is computed by `function` in this process."""
        busy = self._connections[: len(tasks) - 1]
        try:
            for connection, task in zip(busy, tasks[1:], strict=True):
                message = _pickle(task)
                with _detect_loss():
                    connection.send_bytes(message)
            results = [function(*tasks[0])]
            for connection in busy:
                with _detect_loss():
                    answer = connection.recv_bytes()
                result = pickle.loads(answer)
                if isinstance(result, BaseException):
                    raise result
                results.append(result)
        except BaseException:
            self.close()  # other workers may still send replies to this exchange
            raise
        return results


@contextmanager
def _detect_loss() -> Iterator[None]:
    """Raise WorkerLostError if the other end of a connection is closed."""
    try:
        yield
    except (EOFError, OSError):
        raise WorkerLostError("a worker process ended early, perhaps for lack of memory; use --workers 1") from None


def _end_workers(owner: int, connections: Sequence[Connection], processes: Sequence[BaseProcess]) -> None:
    """End processes, which have nothing to store, and wait until they are gone; only the process that started them may."""
    if os.getpid() != owner:
        return
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


@dataclass
class SharedWork:
    """Exchanges that workers share if this saves time: it is measured alone, then with workers, and the faster form is kept.

    The first exchange of each form is not counted: it loads kernels, or copies the memory that a worker writes to.
    """

    pool: WorkerPool | None = None
    is_decided: bool = False
    is_first: bool = True
    seconds: float = 0.0
    clients: int = 0
    seconds_alone: float = 0.0
    """seconds per client without workers"""

    def map(
        self, function: Callable[..., Any], whole: tuple[Any, ...], parts: Sequence[tuple[Any, ...]], sizes: Sequence[int], num_left: int
    ) -> list[Any]:
        """Return the results of `function` for all parts of a task, or for the whole task if it is not shared.

        Args:
            function: what to compute, here or in the workers.
            whole: arguments for the whole task.
            parts: arguments for each part, of which there are at least two.
            sizes: number of clients of each part.
            num_left: number of exchanges that follow.
        """
        began = time.perf_counter()
        results = [function(*whole)] if self.pool is None else self.pool.map(function, parts)
        if not self.is_decided and self._measure(time.perf_counter() - began, sizes):
            self._decide(function, sizes, num_left)
        return results

    def _measure(self, seconds: float, sizes: Sequence[int]) -> bool:
        """Count an exchange; return whether enough of them are measured."""
        if not self.is_first:
            self.seconds, self.clients = self.seconds + seconds, self.clients + sum(sizes)
        self.is_first = False
        return self.clients > 0 and self.seconds >= MEASURED_SECONDS

    def _decide(self, function: Callable[..., Any], sizes: Sequence[int], num_left: int) -> None:
        """Start workers that would save time, or end those that do not."""
        per_client = self.seconds / self.clients
        if self.pool is not None:
            self.is_decided = True
            if per_client >= self.seconds_alone:
                self.pool.close()
                self.pool = None
        elif num_left * per_client * (sum(sizes) - max(sizes)) > START_SECONDS * (len(sizes) - 1):
            try:
                self.pool = WorkerPool(function, len(sizes) - 1)
            except OSError:  # no memory or no process number is left
                self.is_decided = True
            self.seconds_alone, self.seconds, self.clients, self.is_first = per_client, 0.0, 0, True
        else:
            self.is_decided = True


def ignore_interrupts() -> None:
    """Leave Ctrl-C and the terminal to the parent; a progress bar of the parent may have replaced the streams and hold their lock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


class _TensorPickler(pickle.Pickler):
    """Pickles tensors as their numbers. Torch's own form takes ten times as long, and that for processes needs a file per tensor."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _serve(function: Callable[..., Any], connection: Connection, inherited: Sequence[Connection]) -> None:
    """Answer tasks until the other end is closed. Ctrl-C is handled by the parent."""
    ignore_interrupts()
    torch.set_num_threads(1)
    for other in inherited:  # else this process would keep the ends of the parent open
        other.close()
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = _pickle(function(*task))
        except Exception as error:
            try:
                answer = _pickle(error)
                pickle.loads(answer)
            except Exception:  # an exception of the user's code that cannot be pickled
                answer = _pickle(RuntimeError(f"{type(error).__name__}: {error}"))
        try:
            connection.send_bytes(answer)
        except OSError:
            os._exit(0)
