"""How many processes a setting of `--workers` means on this machine."""

import multiprocessing
import os
import sys
from math import ceil
from pathlib import Path
from typing import Literal

Workers = int | Literal["auto"]
"""The most processes to use; `auto` is one per core."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The CPU time that a container may use per period, in microseconds, or `max`; and the period."""


def require_workers(workers: Workers) -> None:
    """Raise ValueError unless this is a number of processes or `auto`."""
    if workers != "auto" and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers is a number of processes and must be at least 1, or auto; got {workers}")


def count_cores() -> int:
    """Return the number of cores that this process may use: those it may run on, and at most the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(cores, max(1, ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # not in a container, or without a quota
        return cores


def count_processes(workers: Workers) -> int:
    """Return the number of processes for independent runs: at most one per core, and one in a daemon, which must not start any."""
    if multiprocessing.current_process().daemon:
        return 1
    return count_cores() if workers == "auto" else min(workers, count_cores())


def count_cohort_processes(workers: Workers) -> int:
    """Return the number of processes that may share a cohort: one if this system cannot fork a process safely."""
    return count_processes(workers) if sys.platform == "linux" else 1
