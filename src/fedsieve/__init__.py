"""fedsieve: federated learning that keeps only the weights that matter."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "RunConfig": "fedsieve.experiments.config",
    "FederationConfig": "fedsieve.experiments.config",
    "Simulation": "fedsieve.experiments.simulation",
    "run_rounds": "fedsieve.experiments.training",
    "Synthetic": "fedsieve.data.synthetic",
    "Linear": "fedsieve.objectives.linear",
    "Loss": "fedsieve.objectives.losses",
    "Loop": "fedsieve.runtime.loop",
    "Batched": "fedsieve.runtime.batched",
    "Rows": "fedsieve.runtime.client_data",
    "Batch": "fedsieve.core.types",
    "Population": "fedsieve.runtime.rounds",
    "algorithm_class": "fedsieve.algorithms",
    "ALGORITHMS": "fedsieve.algorithms",
    "PacketError": "fedsieve.wire",
    "fit": "fedsieve.fitting",
    "SparseFederatedClassifier": "fedsieve.estimators",
    "SparseFederatedRegressor": "fedsieve.estimators",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Public names load when first used, so that `fedsieve --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsieve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
