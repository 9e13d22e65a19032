"""`fedsieve.fit`: train any nn.Module on the examples of several clients, with an exact number of non-zero weights."""

from collections.abc import Callable, Sequence, Sized
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import NETWORK_DEFAULTS, select_supported
from fedsieve.core.random import generator
from fedsieve.formatting import ProgressBar, format_number
from fedsieve.objectives.module import GateGranularity, Module
from fedsieve.runtime.evaluation import measure_rounds
from fedsieve.runtime.simulate import simulate, single_threaded

MAX_EVALUATED_EXAMPLES = 1000
"""Maximum number of training examples on which each round is evaluated."""

ClientExamples = tuple[Any, Any] | Dataset | DataLoader
"""A client's examples: (x, y) tensors or arrays, a map-style Dataset of such pairs, or a DataLoader, which is read once."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The state of training after a round: the argument of a callback, and the second result of `fit`."""

    rounds: int
    """number of finished rounds"""
    density: float
    """fraction of the gated weights that are not zero"""
    nonzero: int
    """number of gated weights that are not zero"""
    bytes_up: int
    """bytes that clients sent"""
    bytes_down: int
    """bytes that clients received"""
    history: tuple[dict[str, Any], ...] = field(repr=False)
    """metrics of each round: loss on at most 1000 training examples, densities, bytes, cohort"""
    module: nn.Module = field(repr=False)
    """a copy of the user's module with the weights of this round"""


def fit(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    clients: Sequence[ClientExamples],
    *,
    density: float,
    algorithm: str | BaseAlgorithm = "sieve",
    rounds: int | None = None,
    participation: float = 1.0,
    ungated: Sequence[str] = (),
    gate_granularity: GateGranularity | str = GateGranularity.WEIGHT,
    seed: int = 0,
    callback: Callable[[FitResult], bool | None] | None = None,
    verbose: bool = False,
) -> tuple[nn.Module, FitResult]:
    """Train a module on the examples of several clients, so that exactly floor(density p) of its p weights are not zero.

    Training starts from the module's current weights, random or pretrained. The module itself is not changed. Parameters with
    `requires_grad=False` are not trained, not sent and not counted.

    Parameters
    ----------
    module
        any `nn.Module` with one input; its layers keep their mode (`train` or `eval`)
    loss
        mean loss of a batch, `loss(module(x), y)`, such as `torch.nn.functional.cross_entropy`
    clients
        the examples of each client: `(x, y)` tensors or arrays, a `Dataset`, or a `DataLoader` (read once)
    density
        fraction of weights that may be non-zero
    algorithm
        the algorithm, by name or as an object with your options, such as `Sieve(local_steps=20)`
    rounds
        number of rounds (default: the algorithm's, mostly 100)
    participation
        fraction of clients in each round
    ungated
        patterns of names of parameters without gates, such as `"*.bias"`: always kept, not counted
    gate_granularity
        weights that share a gate: `weight` (none), `feature`, `neuron` or `filter`
    seed
        equal seeds give equal bits
    callback
        called after every round with a `FitResult`; training stops if it returns True
    verbose
        show progress on standard error

    Returns
    -------
    A copy of the module with the trained weights, which does not depend on fedsieve, and the last `FitResult`.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module; got {module!r}")
    template = deepcopy(module)
    frozen = tuple(name for name, parameter in template.named_parameters() if not parameter.requires_grad)
    objective = Module(
        module=template,
        loss=loss,
        ungated=check_patterns(ungated, template),
        frozen=frozen,
        granularity=parse_granularity(gate_granularity),
    )
    resolved_algorithm = build_algorithm(algorithm, density, rounds)
    resolved_algorithm.final_budget(objective.layout)
    weights = objective.flatten(template)
    x, y, counts = stack_clients(clients, weights.device)
    if x.is_floating_point():
        x = x.to(weights.dtype)
    check_module(objective, weights, x[:2], y[:2])
    if not 0 < participation <= 1:
        raise ValueError(f"participation is the fraction of clients in a round, above 0 and at most 1; got {participation:g}")
    num_rounds = resolved_algorithm.default_rounds if rounds is None else rounds
    results = simulate(
        resolved_algorithm, objective, x, y, counts, participation=participation, rounds=num_rounds, seed=seed, weights=weights
    )
    sample = torch.from_numpy(generator(seed, "measured").permutation(len(y))[:MAX_EVALUATED_EXAMPLES]).to(weights.device)
    inputs, targets = x[sample], y[sample]
    history: list[dict[str, Any]] = []

    def evaluate(parameters: Tensor) -> dict[str, float]:
        return {"loss": float(loss(objective.predict(parameters, inputs), targets))}

    with single_threaded(), ProgressBar(num_rounds, "fit", "round", quiet=not verbose) as bar:
        for measured in measure_rounds(resolved_algorithm, results, evaluate):
            history.append(measured.metrics)
            bar.advance(f"loss {format_number(measured.metrics['loss'])}")
            if callback is not None and should_stop(callback(snapshot(module, objective, measured.parameters, history))):
                break
    result = snapshot(module, objective, measured.parameters, history)
    return result.module, result


def check_patterns(patterns: Sequence[str] | str, module: nn.Module) -> tuple[str, ...]:
    """Return the patterns as a tuple; refuse a pattern that matches no parameter."""
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


def should_stop(callback_result: Any) -> bool:
    """Return whether a callback asked to stop."""
    if callback_result is not None and not isinstance(callback_result, (bool, np.bool_)):
        raise TypeError(f"callback must return True to stop, or False or None to continue; got {callback_result!r}")
    return bool(callback_result)


def build_algorithm(algorithm: str | BaseAlgorithm, density: float, rounds: int | None) -> BaseAlgorithm:
    """Return the named algorithm with the defaults for networks, or the user's algorithm with this density."""
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    if isinstance(algorithm, BaseAlgorithm):
        return replace(algorithm, density=density)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    cls = algorithm_class(algorithm)
    return cls(density=density, **select_supported(cls, NETWORK_DEFAULTS))


def snapshot(module: nn.Module, objective: Module, parameters: Tensor, history: list[dict[str, Any]]) -> FitResult:
    """Return the FitResult after a round, with a copy of the user's module that has these parameters."""
    trained, tensors = deepcopy(module), objective.unflatten(parameters)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name])
    gated = parameters[: objective.layout.num_gated]
    nonzero = int((gated != 0).sum())
    return FitResult(
        rounds=len(history),
        density=nonzero / gated.numel(),
        nonzero=nonzero,
        bytes_up=sum(row["bytes_up"] for row in history),
        bytes_down=sum(row["bytes_down"] for row in history),
        history=tuple(history),
        module=trained,
    )


def stack_clients(clients: Sequence[ClientExamples], device: torch.device) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return the examples of all clients in the order of the clients, and the number of examples of each."""
    if isinstance(clients, (Dataset, DataLoader, Tensor, np.ndarray)) or not isinstance(clients, Sequence):
        raise ValueError(
            f"clients must be a list with the examples of each client; got a {type(clients).__name__}; put a single client into a list"
        )
    if not clients:
        raise ValueError("clients is empty; give the examples of at least one client")
    tensors = [client_tensors(client, client_id) for client_id, client in enumerate(clients)]
    counts = np.array([len(y) for _, y in tensors])
    if not counts.any():
        raise ValueError("no client has an example; give at least one client some examples")
    pairs = [pair for pair, count in zip(tensors, counts, strict=True) if count]
    for name, column in (("x", 0), ("y", 1)):
        kinds = {(tuple(pair[column].shape[1:]), pair[column].dtype) for pair in pairs}
        if len(kinds) > 1:
            raise ValueError(f"examples must have one shape and type at all clients; {name} has {' and '.join(sorted(map(str, kinds)))}")
    return torch.cat([x for x, _ in pairs]).to(device), torch.cat([y for _, y in pairs]).to(device), counts


def client_tensors(client: ClientExamples, client_id: int) -> tuple[Tensor, Tensor]:
    """Return one client's examples as two tensors."""
    if isinstance(client, DataLoader):
        batches = list(client)
        x, y = (torch.cat([torch.as_tensor(batch[i]) for batch in batches]) for i in (0, 1)) if batches else (torch.empty(0),) * 2
    elif isinstance(client, Dataset) and isinstance(client, Sized):
        x, y = default_collate([client[i] for i in range(len(client))]) if len(client) else (torch.empty(0),) * 2
    elif isinstance(client, (tuple, list)) and len(client) == 2:
        x, y = (torch.as_tensor(array) for array in client)
    else:
        raise ValueError(f"client {client_id} must be a pair (x, y), a Dataset with a length or a DataLoader; got {type(client).__name__}")
    if len(x) != len(y):
        raise ValueError(f"client {client_id} has {len(x)} examples in x but {len(y)} targets in y")
    return x, y


def check_module(objective: Module, theta: Tensor, x: Tensor, y: Tensor) -> None:
    """Evaluate module and loss on two examples, so that a mismatch is reported before the first round."""
    try:
        value = objective.loss(objective.predict(theta, x), y)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"module and loss do not accept these examples: {str(error).splitlines()[0]}") from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError("loss must return one number, the mean loss of a batch; use reduction='mean'")
