"""fedsieve with the model as any `nn.Module`: what users get who bring their own."""

from benchmarks.contenders import ours
from benchmarks.workloads import Workload


def prepare(workload: Workload):
    """One round, all clients."""
    return ours.prepare(workload, as_module=True)
