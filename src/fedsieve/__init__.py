"""fedsieve: federated learning of sparse models."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_MODULES = {
    "ALGORITHMS": "fedsieve.algorithms",
    "algorithm_class": "fedsieve.algorithms",
    "Batch": "fedsieve.core.types",
    "BatchedEngine": "fedsieve.runtime.batched",
    "BuiltinFiles": "fedsieve.data.builtin",
    "ClientData": "fedsieve.runtime.client_data",
    "Failures": "fedsieve.runtime.failures",
    "FederationConfig": "fedsieve.experiments.config",
    "fit": "fedsieve.fitting",
    "FitResult": "fedsieve.fitting",
    "GateGranularity": "fedsieve.objectives.module",
    "initial_server": "fedsieve.runtime.rounds",
    "Linear": "fedsieve.objectives.linear",
    "LoopEngine": "fedsieve.runtime.loop",
    "Loss": "fedsieve.objectives.losses",
    "Module": "fedsieve.objectives.module",
    "PacketError": "fedsieve.wire",
    "Population": "fedsieve.runtime.rounds",
    "Privacy": "fedsieve.runtime.privacy",
    "read_model": "fedsieve.models.sparse_model",
    "resolve": "fedsieve.experiments.resolve",
    "ResolvedRun": "fedsieve.experiments.resolve",
    "run_rounds": "fedsieve.experiments.training",
    "RunConfig": "fedsieve.experiments.config",
    "Simulation": "fedsieve.experiments.simulation",
    "SparseFederatedClassifier": "fedsieve.estimators",
    "SparseFederatedRegressor": "fedsieve.estimators",
    "SparseModel": "fedsieve.models.sparse_model",
    "Synthetic": "fedsieve.data.synthetic",
    "train": "fedsieve.runtime.rounds",
    "UserFiles": "fedsieve.data.user_files",
}
"""Module of each public name. No name may also be the name of a submodule: importing the submodule would replace it."""
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Load public names when they are first used, so that `fedsieve --help` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedsieve' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
