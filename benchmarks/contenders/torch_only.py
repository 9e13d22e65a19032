"""fedsieve without compiled kernels, as it runs without numba."""

from collections.abc import Callable

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload
from fedsieve import kernels


def prepare(workload: Workload) -> Callable[[], None]:
    """One round, all clients."""
    kernels.load = lambda _: None
    return fedsieve.prepare(workload)
