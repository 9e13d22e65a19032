"""Independent runs in several processes."""

import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from typing import Any, TypeVar

from fedsieve.runtime.cores import Workers, count_processes, require_workers
from fedsieve.runtime.workers import WorkerLostError, ignore_interrupts

Result = TypeVar("Result")


def divide_workers(workers: Workers, num_runs: int) -> tuple[int, int]:
    """Return the number of processes that compute runs, and the number of workers of each run."""
    require_workers(workers)
    num_workers = count_processes(workers)
    num_parallel = max(1, min(num_workers, num_runs))
    return num_parallel, num_workers // num_parallel


def map_runs(function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], num_parallel: int) -> Iterator[Result]:
    """Yield the result of each task as it finishes; with one process in order, in this process.

    Processes are forks if the system allows it: they need not import torch again.
    """
    if num_parallel == 1:
        yield from (function(*task) for task in tasks)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(num_parallel, mp_context=context, initializer=_init_process, initargs=(stop,))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside the threads of libraries, which reset themselves
            futures = [pool.submit(function, *task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise WorkerLostError("a process that computed a run ended early, perhaps for lack of memory; use --workers 1") from None
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _init_process(stop_event: Event) -> None:
    """Ignore Ctrl-C, which the parent handles; exit if the parent sets the event or is gone."""
    ignore_interrupts()
    parent = multiprocessing.parent_process()

    def watch() -> None:
        while not stop_event.wait(1.0):
            if parent is None or not parent.is_alive():
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
