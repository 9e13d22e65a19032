"""fedsieve with the model as an `nn.Module`, as with a model of the user."""

from benchmarks.contenders import fedsieve
from benchmarks.workloads import Workload


def prepare(workload: Workload):
    """Return a function that trains one round of all clients."""
    return fedsieve.prepare(workload, as_module=True)
