"""fedsieve without compiled kernels, as it runs without numba."""

from collections.abc import Callable

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload
from fedsieve import kernels


def prepare(workload: Workload) -> Callable[[], None]:
    """Return a function that trains one round of all clients."""
    kernels.load = lambda _: None
    return fedsieve.prepare(workload)
