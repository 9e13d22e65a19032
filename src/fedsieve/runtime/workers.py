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
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Workers = int | Literal["auto"]
"""The most processes to use; `auto` is one per core."""


def require_workers(workers: Workers) -> None:
    """Raise ValueError unless this is a number of processes or `auto`."""
    if workers != "auto" and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers is a number of processes and must be at least 1, or auto; got {workers}")


def num_available(workers: Workers) -> int:
    """Return the number of processes to use: at most one per core, and one if this system cannot fork a process safely."""
    if sys.platform != "linux":
        return 1
    cores = len(os.sched_getaffinity(0))
    return cores if workers == "auto" else min(workers, cores)


def split_evenly(items: Sequence[Item], sizes: Sequence[int], num_parts: int) -> list[list[Item]]:
    """Return at most `num_parts` consecutive parts with about equal total sizes; no part is empty."""
    ends = list(accumulate(sizes))
    parts = [int(num_parts * (end - size / 2) / ends[-1]) for end, size in zip(ends, sizes, strict=True)]
    return [[items[i] for i in group] for _, group in groupby(range(len(items)), key=parts.__getitem__)]


class WorkerPool:
    """Forks of this process that call one function; they end when the pool is no longer used, or with this process."""

    def __init__(self, function: Callable[..., Any], num_workers: int) -> None:
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("fork")
        for _ in range(num_workers):
            here, there = context.Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # other threads: of libraries, which reset themselves after a fork
                context.Process(target=_serve, args=(function, there, [*self._connections, here]), daemon=True).start()
            there.close()
            self._connections.append(here)

    def map(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the result of each task in order; the first one is computed by `function` in this process."""
        busy = self._connections[: len(tasks) - 1]
        for connection, task in zip(busy, tasks[1:], strict=True):
            connection.send_bytes(_pickle(task))
        try:
            results = [function(*tasks[0])]
            for connection in busy:
                result = pickle.loads(connection.recv_bytes())
                if isinstance(result, BaseException):
                    raise result
                results.append(result)
        except BaseException as error:
            self.close()  # other workers may still send replies to this exchange
            if isinstance(error, EOFError):
                raise RuntimeError("a worker process ended early, perhaps for lack of memory; use --workers 1") from None
            raise
        return results

    def close(self) -> None:
        """End the workers."""
        for connection in self._connections:
            connection.close()


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
