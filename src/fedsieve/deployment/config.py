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
from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.algorithms.base import Method
from fedsieve.algorithms.defaults import CAREFUL, fitting
from fedsieve.core.aggregation import Mean, Weighting
from fedsieve.core.reply_validation import Screen
from fedsieve.core.types import Objective
from fedsieve.deployment.plan import Plan
from fedsieve.objectives.module import Module

DTYPES = {"single": torch.float32, "double": torch.float64}
OF_THE_PLAN = {
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
OF_THE_SCREEN = {"norm-limit": float, "most-examples": int}
OTHERS = {"method": str, "density": float, "weights": str, "mean": str, "tolerate": float, "precision": str, "run-dir": str}
ALGORITHM = "algorithm."
Settings = Mapping[str, str | int | float | bool]


def plan_from(config: Settings, objective: Objective, measure: Callable[[Tensor], dict[str, float]] | None = None) -> Plan:
    """The plan that a run configuration names. Names with a dot outside `algorithm.` are the app's own; all others must be known.

    `measure` is what the server can say of a model's parameters after every round.
    """
    known = OF_THE_PLAN | OF_THE_SCREEN | OTHERS
    for name in config:
        if name not in known and "." not in name:
            raise ValueError(f"run config {name} is no setting; there are {', '.join(known)}, and {ALGORITHM}* of the method")
    values = {name: valued(name, config[name], kind) for name, kind in known.items() if name in config}
    algorithm, method = algorithm_from(config, values, objective)
    precision = values.get("precision", "single")
    if precision not in DTYPES:
        raise ValueError(f"run config precision is single or double; got {precision}")
    if "clients" not in values:
        raise ValueError("run config clients is missing: how many nodes there will be, with partition-id 0, 1, ...")
    chosen, limits = ({n.replace("-", "_"): values[n] for n in names if n in values} for names in (OF_THE_PLAN, OF_THE_SCREEN))
    return Plan(
        **{"rounds": algorithm.usual_rounds, "seed": 0} | chosen,
        algorithm=algorithm,
        objective=objective,
        fingerprint=wire.fingerprint(method, objective.layout),
        dtype=DTYPES[precision],
        run_dir=Path(values["run-dir"]) if values.get("run-dir") else None,
        known_start=not isinstance(objective, Module) or objective.build is not None,
        screen=Screen(**{"norm_limit": algorithm.usual_norm_limit} | limits),
        measure=measure,
        settings=dict(config),
    )


def algorithm_from(config: Settings, values: Mapping[str, Any], objective: Objective) -> tuple[Method, str]:
    """The method with its settings, and its name."""
    method = values.get("method", "sieve")
    if method not in METHODS:
        raise ValueError(f"run config method {method} is unknown; there are {', '.join(METHODS)}")
    cls = algorithm_class(method)
    hints = get_type_hints(cls)
    own = {name.replace("_", "-"): name for name in sorted(cls.offered())}
    settings: dict[str, Any] = fitting(cls, CAREFUL) if isinstance(objective, Module) else {}
    for name, value in config.items():
        if name.startswith(ALGORITHM):
            short = name.removeprefix(ALGORITHM)
            if short not in own:
                raise ValueError(f"run config {name} is no setting of {method}; there are {', '.join(own)}")
            settings[own[short]] = valued(name, value, hints[own[short]])
    algorithm = cls(**settings)
    mean = valued("mean", values.get("mean", "weighted"), Mean)
    usual = algorithm.weights if mean is Mean.WEIGHTED else Weighting.UNIFORM
    weights = valued("weights", values["weights"], Weighting) if "weights" in values else usual
    shared = {name: values[name] for name in ("density", "tolerate") if name in values}
    return replace(algorithm, weights=weights, mean=mean, **shared), method


def valued(name: str, value: Any, kind: Any) -> Any:
    """A plain value as the kind a setting has, or one line about why it is not."""
    for option in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if isinstance(option, type) and issubclass(option, Enum) and value in [member.value for member in option]:
            return option(value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise ValueError(f"run config {name} takes {named(kind)}; got {value!r}")


def named(kind: Any) -> str:
    """A kind in words."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(named(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(member.value) for member in kind)
    return {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}.get(kind, str(kind))
