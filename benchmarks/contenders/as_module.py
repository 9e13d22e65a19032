"""fedsieve with the model as any `nn.Module`: what users get who bring their own."""

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload


def prepare(workload: Workload):
    """One round, all clients."""
    return fedsieve.prepare(workload, as_module=True)
