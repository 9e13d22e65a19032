"""DeploymentConfig, and how it is built from Flower's run config. A Flower client imports this file: it needs only torch and numpy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import network_options, recipe_options, require_recipes
from fedsieve.algorithms.recipes import Recipe
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.core.settings import ALGORITHM_KEY, build_settings, field_types, normalize_key, parse_settings, parse_value
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.module import Module
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.loop import LoopEngine

DTYPES = {"single": torch.float32, "double": torch.float64}
DEPLOYMENT_FIELDS = (
    "clients",
    "rounds",
    "seed",
    "participation",
    "quorum",
    "retries",
    "round_seconds",
    "grace_seconds",
    "start_seconds",
    "run_dir",
)
"""Fields of DeploymentConfig that the run config sets."""
ALGORITHM_FIELDS = ("density", "client_weighting", "aggregator", "max_malicious_fraction")
"""Fields of the algorithm that are no options of its own."""
NAME_KEY = "algorithm.name"
ALGORITHM_PREFIX = "algorithm."
PRIVACY_PREFIX = "privacy."
DEFAULT_ALGORITHM = "sieve"
AlgorithmName = Literal[tuple(ALGORITHMS)]
PREFIX = "run config "
"""How error messages name a setting."""
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
    grace_seconds: float = 60.0
    """how long the server waits for more replies at least when it has a quorum"""
    start_seconds: float = 300.0
    """how long the server waits for all clients before the first round"""
    reply_limits: ReplyLimits = ReplyLimits()  # noqa: RUF009
    """limits that a reply must keep to be aggregated"""
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
        for name, least in (("clients", 1), ("rounds", 1), ("retries", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("participation", "quorum"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction, above 0 and at most 1; got {getattr(self, name):g}")
        for name in ("round_seconds", "start_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name.replace('_', '-')} must be above 0 and finite; got {getattr(self, name):g}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ValueError(f"grace-seconds must be at least 0 and finite; got {self.grace_seconds:g}")
        self.algorithm.final_budget(self.objective.layout)

    @property
    def algorithm_name(self) -> str:
        """The algorithm's name in the run config."""
        return str(self.settings.get(NAME_KEY, DEFAULT_ALGORITHM))

    @property
    def has_claim_limit(self) -> bool:
        """Whether the user limits the number of examples that a client may claim."""
        return self.reply_limits.max_claimed_examples != ReplyLimits.max_claimed_examples

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
        torch.set_num_threads(1)
        workload = self.algorithm.workload
        data = ClientData(x, y, [0] * client + [len(y)], self.objective, workload.batch_size, workload.batch_sampling)
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
    if private := sorted(key for key in run_config if key.startswith(PRIVACY_PREFIX)):
        raise ValueError(
            f"run config {private[0]}: a Flower deployment has no differential privacy, only simulated runs have it; leave it out"
        )
    own = {key: value for key, value in run_config.items() if "." not in key or key.startswith(ALGORITHM_PREFIX)}
    values = {normalize_key(key): value for key, value in own.items() if (key, value) != ("run-dir", "")}
    algorithm_name = parse_value(AlgorithmName, values.get(ALGORITHM_KEY, DEFAULT_ALGORITHM), PREFIX + NAME_KEY)
    require_recipes(algorithm_name, values.get(ALGORITHM_PREFIX + "recipe"))
    algorithm_type = algorithm_class(algorithm_name)
    parsed = parse_settings(setting_types(algorithm_type), values, PREFIX)
    algorithm = build_algorithm(algorithm_type, parsed, objective)
    if "clients" not in parsed:
        raise ValueError("run config clients is missing; set it to the number of nodes, whose partition-id is 0, 1, ...")
    deployment: dict[str, Any] = {"rounds": algorithm.default_rounds, "seed": 0}
    deployment |= {name: parsed[name] for name in DEPLOYMENT_FIELDS if name in parsed}
    return DeploymentConfig(
        **deployment,
        algorithm=algorithm,
        objective=objective,
        fingerprint=wire.compute_fingerprint(algorithm_name, objective.layout),
        dtype=DTYPES[parsed.get("precision", "single")],
        start_from_seed=not isinstance(objective, Module) or objective.factory is not None,
        reply_limits=build_settings(ReplyLimits, {"max_norm_ratio": algorithm.default_max_norm_ratio} | parsed),
        evaluate=evaluate,
        settings=dict(run_config),
    )


def setting_types(algorithm_type: type[BaseAlgorithm]) -> dict[str, Any]:
    """Return the type of every setting of the run config by key."""
    types = field_types(DeploymentConfig, DEPLOYMENT_FIELDS) | field_types(ReplyLimits) | field_types(algorithm_type, ALGORITHM_FIELDS)
    types |= {"precision": Literal[tuple(DTYPES)], ALGORITHM_KEY: AlgorithmName}
    return types | field_types(algorithm_type, algorithm_type.option_names(), ALGORITHM_KEY)


def build_algorithm(cls: type[BaseAlgorithm], parsed: Mapping[str, Any], objective: Linear | Module) -> BaseAlgorithm:
    """Return the algorithm with the options of the run config, over the defaults for networks if the model is a module."""
    options = network_options(cls) if isinstance(objective, Module) else {}
    loss = objective.loss if isinstance(objective, Linear) else None
    options |= recipe_options(cls, parsed.get(ALGORITHM_PREFIX + "recipe", Recipe.RECOMMENDED), loss)
    if parsed.get("aggregator", Aggregator.WEIGHTED) is not Aggregator.WEIGHTED:
        options["client_weighting"] = ClientWeighting.UNIFORM
    options |= {name: parsed[name] for name in ALGORITHM_FIELDS if name in parsed}
    return cls(**options | {key.removeprefix(ALGORITHM_PREFIX): value for key, value in parsed.items() if key.startswith(ALGORITHM_PREFIX)})
