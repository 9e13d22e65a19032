"""fedsieve with two threads, whatever the others have."""

from collections.abc import Callable

import torch

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload


def prepare(workload: Workload) -> Callable[[], None]:
    """One round, all clients."""
    torch.set_num_threads(2)
    return fedsieve.prepare(workload)
