"""Flower's run configuration, plain values by kebab-case names, as the plan of a deployment. Needs torch and numpy alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import NETWORK_DEFAULTS, select_supported
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.core.types import Objective
from fedsieve.deployment.plan import DeploymentConfig
from fedsieve.objectives.module import Module

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
OTHER_KEYS = {
    "algorithm.name": str,
    "density": float,
    "client-weighting": str,
    "aggregator": str,
    "max-malicious-fraction": float,
    "precision": str,
    "run-dir": str,
}
ALGORITHM_PREFIX = "algorithm."
Settings = Mapping[str, str | int | float | bool]


def deployment_config(
    config: Settings, objective: Objective, evaluate: Callable[[Tensor], dict[str, float]] | None = None
) -> DeploymentConfig:
    """The plan that a run configuration names. Names with a dot outside `algorithm.` are the app's own; all others must be known.

    `measure` is what the server can say of a model's parameters after every round.
    """
    known = DEPLOYMENT_KEYS | LIMIT_KEYS | OTHER_KEYS
    for name in config:
        if name not in known and "." not in name:
            raise ValueError(f"run config {name} is no setting; there are {', '.join(known)}, and {ALGORITHM_PREFIX}* of the method")
    values = {name: parse_value(name, config[name], kind) for name, kind in known.items() if name in config}
    algorithm, method = build_algorithm(config, values, objective)
    precision = values.get("precision", "single")
    if precision not in DTYPES:
        raise ValueError(f"run config precision is single or double; got {precision}")
    if "clients" not in values:
        raise ValueError("run config clients is missing: how many nodes there will be, with partition-id 0, 1, ...")
    chosen, limits = ({n.replace("-", "_"): values[n] for n in names if n in values} for names in (DEPLOYMENT_KEYS, LIMIT_KEYS))
    return DeploymentConfig(
        **{"rounds": algorithm.default_rounds, "seed": 0} | chosen,
        algorithm=algorithm,
        objective=objective,
        fingerprint=wire.compute_fingerprint(method, objective.layout),
        dtype=DTYPES[precision],
        run_dir=Path(values["run-dir"]) if values.get("run-dir") else None,
        start_from_seed=not isinstance(objective, Module) or objective.factory is not None,
        reply_limits=ReplyLimits(**{"max_norm_ratio": algorithm.default_max_norm_ratio} | limits),
        evaluate=evaluate,
        settings=dict(config),
    )


def build_algorithm(config: Settings, values: Mapping[str, Any], objective: Objective) -> tuple[BaseAlgorithm, str]:
    """The method with its settings, and its name."""
    method = values.get("algorithm.name", "sieve")
    if method not in ALGORITHMS:
        raise ValueError(f"run config algorithm.name {method} is unknown; there are {', '.join(ALGORITHMS)}")
    cls = algorithm_class(method)
    hints = get_type_hints(cls)
    own = {name.replace("_", "-"): name for name in sorted(cls.option_names())}
    settings: dict[str, Any] = select_supported(cls, NETWORK_DEFAULTS) if isinstance(objective, Module) else {}
    for name, value in config.items():
        if name.startswith(ALGORITHM_PREFIX) and name not in OTHER_KEYS:
            short = name.removeprefix(ALGORITHM_PREFIX)
            if short not in own:
                raise ValueError(f"run config {name} is no setting of {method}; there are {', '.join(own)}")
            settings[own[short]] = parse_value(name, value, hints[own[short]])
    algorithm = cls(**settings)
    mean = parse_value("aggregator", values.get("aggregator", "weighted"), Aggregator)
    usual = algorithm.client_weighting if mean is Aggregator.WEIGHTED else ClientWeighting.UNIFORM
    weights = parse_value("client-weighting", values["client-weighting"], ClientWeighting) if "client-weighting" in values else usual
    shared = {name.replace("-", "_"): values[name] for name in ("density", "max-malicious-fraction") if name in values}
    return replace(algorithm, client_weighting=weights, aggregator=mean, **shared), method


def parse_value(name: str, value: Any, type_hint: Any) -> Any:
    """A plain value as the kind a setting has, or one line about why it is not."""
    for option in get_args(type_hint) if get_origin(type_hint) in (Union, UnionType) else (type_hint,):
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if isinstance(option, type) and issubclass(option, Enum) and value in [member.value for member in option]:
            return option(value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise ValueError(f"run config {name} takes {type_name(type_hint)}; got {value!r}")


def type_name(type_hint: Any) -> str:
    """A kind in words."""
    if get_origin(type_hint) in (Union, UnionType):
        return " or ".join(type_name(option) for option in get_args(type_hint))
    if get_origin(type_hint) is Literal:
        return " or ".join(map(str, get_args(type_hint)))
    if isinstance(type_hint, type) and issubclass(type_hint, Enum):
        return ", ".join(str(member.value) for member in type_hint)
    return {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}.get(type_hint, str(type_hint))
