"""DeploymentConfig, and how it is built from Flower's run config. A Flower client imports this file: it needs only torch and numpy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import NETWORK_DEFAULTS, select_supported
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.core.settings import parse_value
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.module import Module
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.loop import LoopEngine

DTYPES = {"single": torch.float32, "double": torch.float64}
DEPLOYMENT_KEYS = {
    "clients": int,
    "rounds": int,
    "seed": int,
    "participation": float,
    "quorum": float,
    "retries": int,
    "round-seconds": float,
    "start-seconds": float,
    "threads": int,
}
LIMIT_KEYS = {"max-norm-ratio": float, "max-claimed-examples": int}
NAME_KEY = "algorithm.name"
OTHER_KEYS = {
    NAME_KEY: str,
    "density": float,
    "client-weighting": str,
    "aggregator": str,
    "max-malicious-fraction": float,
    "precision": str,
    "run-dir": str,
}
ALGORITHM_PREFIX = "algorithm."
DEFAULT_ALGORITHM = "sieve"
Settings = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, kw_only=True)
class DeploymentConfig(RunContext):
    """The settings that the server and every client of a deployment share."""

    algorithm: BaseAlgorithm
    objective: Linear | Module
    clients: int
    """number of clients, numbered from 0"""
    rounds: int
    participation: float = 1.0
    """fraction of the clients sampled in each round"""
    quorum: float = 0.5
    """fraction of the sampled clients that must reply; below it the exchange is repeated"""
    retries: int = 2
    """how often an exchange below the quorum is repeated before the run stops"""
    round_seconds: float = 600.0
    """how long the server waits for the replies of one exchange"""
    start_seconds: float = 300.0
    """how long the server waits for all clients before the first round"""
    reply_limits: ReplyLimits = ReplyLimits()  # noqa: RUF009
    """limits that a reply must keep to be aggregated"""
    threads: int = 1
    """threads for tensor arithmetic; results repeat bit for bit for a fixed number of threads"""
    run_dir: Path | None = None
    """where the server stores rounds, checkpoints and the model; None stores nothing"""
    start_from_seed: bool = True
    """whether every client can compute the initial weights from the seed"""
    evaluate: Callable[[Tensor], dict[str, float]] | None = None
    """metrics of the model's parameters, computed by the server after every round"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """the run config this was built from, for the run directory"""

    def __post_init__(self) -> None:
        """Validate the settings."""
        for name, least in (("clients", 1), ("rounds", 1), ("retries", 0), ("threads", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("participation", "quorum"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction, above 0 and at most 1; got {getattr(self, name):g}")
        for name in ("round_seconds", "start_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name.replace('_', '-')} must be above 0 and finite; got {getattr(self, name):g}")
        self.algorithm.final_budget(self.objective.layout)

    @property
    def algorithm_name(self) -> str:
        """The algorithm's name in the run config."""
        return str(self.settings.get(NAME_KEY, DEFAULT_ALGORITHM))

    def min_replies(self, num_asked: int) -> int:
        """Return how many of `num_asked` clients must reply."""
        return max(1, ceil(self.quorum * num_asked - 1e-9))

    def client_engine(self, client: int, x: np.ndarray | Tensor, y: np.ndarray | Tensor) -> LoopEngine:
        """Return the engine of client number `client`, over the client's own examples."""
        x, y = (self._to_tensor(array) for array in (x, y))
        if not 0 <= client < self.clients:
            raise ValueError(f"partition-id {client} is not below clients {self.clients}; number the nodes from 0")
        if len(x) != len(y):
            raise ValueError(f"x has {len(x)} examples and y has {len(y)}; the numbers must be equal")
        if not all(array.isfinite().all() for array in (x, y)):
            raise ValueError("an example has a value that is not a finite number; clean the examples first")
        torch.set_num_threads(self.threads)
        data = ClientData(x, y, [0] * client + [len(y)], self.objective, self.algorithm.workload.batch_size)
        return LoopEngine(context=self, data=data)

    def _to_tensor(self, array: np.ndarray | Tensor) -> Tensor:
        tensor = torch.as_tensor(array)
        return tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else torch.int64)


def deployment_config(
    run_config: Settings, objective: Linear | Module, evaluate: Callable[[Tensor], dict[str, float]] | None = None
) -> DeploymentConfig:
    """Build the DeploymentConfig that Flower's run config describes.

    Keys with a dot outside `algorithm.` belong to the app and are ignored; every other key must be known. `evaluate` returns the
    metrics that the server computes from the model's parameters after every round.
    """
    known = DEPLOYMENT_KEYS | LIMIT_KEYS | OTHER_KEYS
    for name in run_config:
        if name not in known and "." not in name:
            raise ValueError(f"run config {name} is no setting; there are {', '.join(known)}, and {ALGORITHM_PREFIX}* of the algorithm")
    values = {
        name: parse_value(type_hint, run_config[name], f"run config {name}") for name, type_hint in known.items() if name in run_config
    }
    algorithm_name = values.get(NAME_KEY, DEFAULT_ALGORITHM)
    algorithm = build_algorithm(algorithm_name, run_config, values, objective)
    precision = values.get("precision", "single")
    if precision not in DTYPES:
        raise ValueError(f"run config precision is single or double; got {precision}")
    if "clients" not in values:
        raise ValueError("run config clients is missing; set it to the number of nodes, whose partition-id is 0, 1, ...")
    deployment: dict[str, Any] = {"rounds": algorithm.default_rounds, "seed": 0}
    deployment |= {name.replace("-", "_"): values[name] for name in DEPLOYMENT_KEYS if name in values}
    limits: dict[str, Any] = {"max_norm_ratio": algorithm.default_max_norm_ratio}
    limits |= {name.replace("-", "_"): values[name] for name in LIMIT_KEYS if name in values}
    return DeploymentConfig(
        **deployment,
        algorithm=algorithm,
        objective=objective,
        fingerprint=wire.compute_fingerprint(algorithm_name, objective.layout),
        dtype=DTYPES[precision],
        run_dir=Path(values["run-dir"]) if values.get("run-dir") else None,
        start_from_seed=not isinstance(objective, Module) or objective.factory is not None,
        reply_limits=ReplyLimits(**limits),
        evaluate=evaluate,
        settings=dict(run_config),
    )


def build_algorithm(algorithm_name: str, run_config: Settings, values: Mapping[str, Any], objective: Linear | Module) -> BaseAlgorithm:
    """Return the algorithm with the options of the run config; `values` are the parsed settings outside `algorithm.`."""
    if algorithm_name not in ALGORITHMS:
        raise ValueError(f"run config {NAME_KEY} {algorithm_name} is unknown; there are {', '.join(ALGORITHMS)}")
    cls = algorithm_class(algorithm_name)
    hints = get_type_hints(cls)
    option_names = {name.replace("_", "-"): name for name in sorted(cls.option_names())}
    options: dict[str, Any] = select_supported(cls, NETWORK_DEFAULTS) if isinstance(objective, Module) else {}
    for key, value in run_config.items():
        if key.startswith(ALGORITHM_PREFIX) and key not in OTHER_KEYS:
            name = option_names.get(key.removeprefix(ALGORITHM_PREFIX))
            if name is None:
                raise ValueError(f"run config {key} is no option of {algorithm_name}; there are {', '.join(option_names)}")
            options[name] = parse_value(hints[name], value, f"run config {key}")
    algorithm = cls(**options)
    aggregator = parse_value(Aggregator, values.get("aggregator", "weighted"), "run config aggregator")
    weighting = algorithm.client_weighting if aggregator is Aggregator.WEIGHTED else ClientWeighting.UNIFORM
    if "client-weighting" in values:
        weighting = parse_value(ClientWeighting, values["client-weighting"], "run config client-weighting")
    others = {name.replace("-", "_"): values[name] for name in ("density", "max-malicious-fraction") if name in values}
    return replace(algorithm, client_weighting=weighting, aggregator=aggregator, **others)
