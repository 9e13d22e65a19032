"""fedsieve without the compiled passes: as it is where numba is not installed."""

from collections.abc import Callable

from benchmarks.contenders import ours
from benchmarks.workloads import Workload
from fedsieve.core import compiled, streams
from fedsieve.objectives import images


def prepare(work: Workload) -> Callable[[], None]:
    """One round, all clients."""
    for module in (compiled, streams, images):
        module.passes = lambda: None
    return ours.prepare(work)
