"""fedsieve without the compiled passes: as it is where numba is not installed."""

from collections.abc import Callable

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload
from fedsieve import kernels
from fedsieve.core import random
from fedsieve.objectives import fast_conv


def prepare(workload: Workload) -> Callable[[], None]:
    """One round, all clients."""
    for module in (kernels, random, fast_conv):
        module.available = lambda: None
    return fedsieve.prepare(workload)
