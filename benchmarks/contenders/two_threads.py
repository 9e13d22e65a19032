"""fedsieve with two threads."""

from collections.abc import Callable

import torch

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload


def prepare(workload: Workload) -> Callable[[], None]:
    """Return a function that trains one round of all clients."""
    torch.set_num_threads(2)
    return fedsieve.prepare(workload)
