"""Convert and validate the arguments of `fedsieve.fit`: errors are one line, before the first round."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatch
from math import ceil, inf
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import batches_per_round, network_options, require_effect
from fedsieve.core.settings import field_types, parse_value
from fedsieve.data.module_examples import ModuleExamples
from fedsieve.objectives.module import GateGranularity, Module

Metric = Callable[[Tensor, Tensor], Any]
"""(outputs, targets) -> a number."""
ARGUMENTS = ("density", "rounds", "participation", "local_epochs", "ungated", "gate_norms", "gate_granularity", "validation", "metrics")
"""Arguments of fit that a misspelled option may mean."""
OTHER_NAMES = {
    "optimizer": "local steps are plain gradient steps; set learning_rate, step_rule or server_optimizer",
    "lr": "set learning_rate",
    "epochs": "set rounds, and local_epochs for passes over the examples of a client in each round",
}
"""What to set instead of names that other libraries use."""


def require_full_precision(module: Any) -> Tensor:
    """Return a trained parameter of a module; raise ValueError if it is no module in single or double precision, or has none."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module; got {module!r}")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("the module has no parameter with requires_grad=True, so there is nothing to train")
    found = {parameter.dtype for parameter in trained}
    if found not in ({torch.float32}, {torch.float64}):
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise ValueError(f"the module has parameters in {names}; train it in one full precision, module.float(), and convert the result")
    return trained[0]


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy of a module; raise ValueError if torch cannot copy it."""
    try:
        return deepcopy(module)
    except RuntimeError as error:
        raise ValueError(
            f"the module cannot be copied: {str(error).splitlines()[0]}; make pruning permanent first, "
            f"torch.nn.utils.prune.remove(layer, 'weight'), and remove weight norm"
        ) from None


def require_device(device: str | torch.device) -> torch.device:
    """Return a torch device; raise ValueError if this machine does not have it."""
    try:
        if (found := torch.ones(1, device=device).device).type == "meta":
            raise RuntimeError("meta tensors have no values")
        return found
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device {device} is not available on this machine; leave it out to train where the module is") from None


def require_patience(patience: int | None, validation: Any, run_dir: Any) -> None:
    """Raise ValueError if early stopping has no loss to watch, or no way to resume."""
    if patience is None:
        return
    if parse_plain(int, patience, "patience") < 1:
        raise ValueError(f"patience is a number of rounds, at least 1; got {patience}")
    if validation is None:
        raise ValueError(f"patience {patience} watches the validation loss; give examples as validation")
    if run_dir is not None:
        raise ValueError("patience keeps the best model in memory, which a resumed run would not have; leave out patience or run_dir")


def check_patterns(patterns: Sequence[str] | str, module: nn.Module) -> tuple[str, ...]:
    """Return the patterns as a tuple; raise ValueError if one matches no parameter."""
    names = [name for name, _ in module.named_parameters()]
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise ValueError(f"ungated {pattern!r} matches no parameter; there are {', '.join(names)}")
    return patterns


def parse_granularity(granularity: GateGranularity | str) -> GateGranularity:
    """Return the granularity with this name."""
    if granularity not in list(GateGranularity):
        raise ValueError(f"unknown gate_granularity {granularity!r}; there are {', '.join(GateGranularity)}")
    return GateGranularity(granularity)


def build_algorithm(
    algorithm: str | BaseAlgorithm, density: float, rounds: int | None, options: Mapping[str, Any] = MappingProxyType({})
) -> BaseAlgorithm:
    """Return the named algorithm with the defaults for networks, or the user's algorithm, with this density and the user's options."""
    if rounds is not None and parse_plain(int, rounds, "rounds") < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    if not isinstance(algorithm, BaseAlgorithm) and algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    cls = type(algorithm) if isinstance(algorithm, BaseAlgorithm) else algorithm_class(algorithm)
    chosen = parse_options(cls, options) | {"density": parse_plain(float, density, "density")}
    if isinstance(algorithm, BaseAlgorithm):
        return require_effect(replace(algorithm, **chosen))
    return require_effect(cls(**network_options(cls) | chosen))


def set_local_epochs(algorithm: BaseAlgorithm, local_epochs: float, options: Mapping[str, Any], counts: np.ndarray) -> BaseAlgorithm:
    """Return the algorithm with as many local steps as an average client needs for some passes over its examples."""
    (name, _), *_ = batches_per_round(type(algorithm), 0).items()
    if name in options:
        raise ValueError(f"local_epochs {local_epochs} sets {name}, which is {options[name]}; leave one of them out")
    if not 0 < parse_plain(float, local_epochs, "local_epochs") < inf:
        raise ValueError(f"local_epochs must be above 0; got {local_epochs:g}")
    average = counts[counts > 0].mean()
    batch_size = average if algorithm.batch_size == "all" else algorithm.batch_size
    return replace(algorithm, **{name: ceil(local_epochs * average / batch_size)})


def parse_options(cls: type[BaseAlgorithm], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an algorithm as their types; raise TypeError for one that it does not have."""
    types = field_types(cls, cls.option_names())
    for name in options:
        if name in OTHER_NAMES:
            raise TypeError(f"fit has no argument {name!r}; {OTHER_NAMES[name]}")
        if name not in types:
            close = get_close_matches(name, [*types, *ARGUMENTS], 1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TypeError(
                f"fit has no argument {name!r}, and {cls.__name__} no such option; {hint}its options are {', '.join(sorted(types))}"
            )
    return {name: parse_plain(types[name], value, name) for name, value in options.items()}


def parse_plain(type_hint: Any, value: Any, name: str) -> Any:
    """Return a word or a number, also one of NumPy, as the type of the argument `name`, or raise ValueError."""
    return parse_value(type_hint, value.item() if isinstance(value, np.generic) else value, name)


def require_participation(participation: float) -> None:
    """Raise ValueError if the fraction of clients is not above 0 and at most 1."""
    if not 0 < parse_plain(float, participation, "participation") <= 1:
        raise ValueError(f"participation is the fraction of clients in a round, above 0 and at most 1; got {participation:g}")


def require_functions(loss: Any, callback: Any) -> None:
    """Raise ValueError if the loss or the callback cannot be called as fit calls them."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ValueError(f"loss must be a function (outputs, targets) -> mean loss; got the class {loss.__name__}; write {loss.__name__}()")
    for name, function in (("loss", loss), ("callback", callback)):
        if function is not None and not callable(function):
            raise ValueError(f"{name} must be a function; got {function!r}")


def check_module(objective: Module, weights: Tensor, examples: ModuleExamples) -> None:
    """Evaluate module and loss on two examples, so that a mismatch is reported before the first round; raise ValueError for NaN."""
    x, y = examples.x[:2], examples.y[:2]
    try:
        value = objective.loss(objective.predict(weights, x), y)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"module and loss do not accept these examples: {str(error).splitlines()[0]}") from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError("loss must return one number, the mean loss of a batch; use reduction='mean'")
    incomplete = (examples.x.isnan().flatten(1).any(1) | examples.y.isnan().reshape(len(examples.y), -1).any(1)).nonzero()[:, 0]
    for row in incomplete[:1]:  # a module may accept missing values
        part = slice(int(row), int(row) + 1)
        if not bool(objective.loss(objective.predict(weights, examples.x[part]), examples.y[part]).isfinite()):
            client = int(np.searchsorted(examples.counts.cumsum(), part.start, side="right"))
            number = part.start - int(examples.counts[:client].sum())
            raise ValueError(
                f"{len(incomplete)} examples have missing values (NaN), the first is example {number} of client {client}; "
                f"fill them in, or remove these examples"
            )


def check_metrics(metrics: Any, outputs: Tensor, y: Tensor, columns: Collection[str]) -> dict[str, Metric]:
    """Return metrics by name after one evaluation; raise ValueError for names that the learning curve has already."""
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics must be a dict of functions (outputs, targets) -> number by name; got a {type(metrics).__name__}")
    for name, function in metrics.items():
        if name in columns or str(name).startswith("val_"):
            raise ValueError(f"metric {name!r} has the name of another column of the learning curve; choose another name")
        try:
            float(function(outputs, y))
        except Exception as error:
            raise ValueError(f"metric {name!r} must return one number for (outputs, targets): {str(error).splitlines()[0]}") from None
    return dict(metrics)
