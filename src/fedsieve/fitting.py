"""The PyTorch face: any module, its loss and the clients' rows in; a plain module with exact zeros out."""

from collections.abc import Callable, Sequence
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
from fedsieve.experiments.tasks import USER_DATA_SIEVE
from fedsieve.experiments.training import raise_if_diverged, traffic_columns
from fedsieve.formatting import ProgressBar, format_number
from fedsieve.objectives.module import GateGranularity, Module
from fedsieve.runtime.simulate import simulate, single_threaded

MAX_EVALUATED_EXAMPLES = 1000
"""Training rows each round is measured on, at most."""

ClientExamples = tuple[Any, Any] | Dataset | DataLoader
"""A client's rows: (x, y) tensors or arrays, a map-style Dataset of such pairs, or a DataLoader that passes over them once."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a callback sees after a round, and what `fit` hands back beside the module at the end."""

    rounds: int
    """rounds done"""
    density: float
    """non-zero weights over weights, those without a gate apart"""
    nonzero: int
    """weights that are not zero, those without a gate apart"""
    bytes_up: int
    """all that clients sent"""
    bytes_down: int
    """all that clients received"""
    history: tuple[dict[str, Any], ...] = field(repr=False)
    """one row a round: loss on up to 1000 training rows, densities, bytes, who took part"""
    module: nn.Module = field(repr=False)
    """a copy of the module given, with the weights of this round"""


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
    """Train a module over clients so that exactly floor(density p) of its p weights are not zero.

    Training begins at the module's own weights: fresh ones, or pretrained. The module given stays as it is. Parameters with
    `requires_grad=False` are not trained, not sent and not counted.

    Parameters
    ----------
    module
        any `nn.Module` of one input; its layers keep the mode they are in (`train` or `eval`)
    loss
        mean loss of a batch, `loss(module(x), y)`, such as `torch.nn.functional.cross_entropy`
    clients
        for each client its rows: `(x, y)` tensors or arrays, a `Dataset`, or a `DataLoader` (passed over once)
    density
        fraction of weights that may be non-zero
    algorithm
        who learns, by name or with options of your own, such as `Sieve(steps=20)`
    rounds
        rounds of training (default: the method's, mostly 100)
    participation
        fraction of clients in each round
    ungated
        patterns of parameter names without gates, such as `"*.bias"`: always kept, not counted
    gate_granularity
        what is kept or dropped whole: `weight`, `feature`, `neuron` or `filter`
    seed
        with the same seed everything repeats bit for bit
    callback
        called after every round with a `FitResult`; training stops there if it returns True
    verbose
        progress on standard error

    Returns
    -------
    A plain module, which needs nothing of this package to be saved, loaded and run, and the `FitResult`.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module; got {module!r}")
    own = deepcopy(module)
    frozen = tuple(name for name, part in own.named_parameters() if not part.requires_grad)
    objective = Module(
        module=own, loss=loss, ungated=check_patterns(ungated, own), frozen=frozen, granularity=parse_granularity(gate_granularity)
    )
    resolved_algorithm = build_algorithm(algorithm, density, rounds)
    resolved_algorithm.final_budget(objective.layout)
    given = objective.flatten(own)
    x, y, counts = stack_clients(clients, given.device)
    if x.is_floating_point():
        x = x.to(given.dtype)
    check_module(objective, given, x[:2], y[:2])
    if not 0 < participation <= 1:
        raise ValueError(f"participation is the fraction of clients in a round, above 0 and at most 1; got {participation:g}")
    total = resolved_algorithm.default_rounds if rounds is None else rounds
    steps = simulate(resolved_algorithm, objective, x, y, counts, participation=participation, rounds=total, seed=seed, weights=given)
    sample = torch.from_numpy(generator(seed, "measured").permutation(len(y))[:MAX_EVALUATED_EXAMPLES]).to(given.device)
    seen, wanted = x[sample], y[sample]
    history: list[dict[str, Any]] = []
    with single_threaded(), ProgressBar(total, "fit", "round", quiet=not verbose) as bar:
        for done in steps:
            theta = resolved_algorithm.parameters(done.server)
            raise_if_diverged(resolved_algorithm, done, resolved_algorithm.unprojected_parameters(done.server))
            row = {"round": done.round + 1, "loss": float(loss(objective.predict(theta, seen), wanted))}
            row |= {name: float(value) for name, value in resolved_algorithm.diagnostics(done.server).items()}
            history.append(row | traffic_columns(done.uplink, done.downlink) | {"clients": done.cohort})
            bar.advance(f"loss {format_number(row['loss'])}")
            if callback is not None and should_stop(callback(snapshot(module, objective, theta, history))):
                break
    found = snapshot(module, objective, theta, history)
    return found.module, found


def check_patterns(patterns: Sequence[str] | str, module: nn.Module) -> tuple[str, ...]:
    """Patterns of names; one that fits no parameter is a slip."""
    names = [name for name, _ in module.named_parameters()]
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in given:
        if not any(fnmatch(name, pattern) for name in names):
            raise ValueError(f"ungated {pattern!r} fits no parameter; there are {', '.join(names)}")
    return given


def parse_granularity(granularity: GateGranularity | str) -> GateGranularity:
    """What shares a gate, by its name."""
    if granularity not in list(GateGranularity):
        raise ValueError(f"unknown gate_granularity {granularity!r}; there are {', '.join(GateGranularity)}")
    return GateGranularity(granularity)


def should_stop(callback_result: Any) -> bool:
    """What a callback's answer means."""
    if callback_result is not None and not isinstance(callback_result, (bool, np.bool_)):
        raise TypeError(f"callback must return True to stop, or False or None to go on; got {callback_result!r}")
    return bool(callback_result)


def build_algorithm(algorithm: str | BaseAlgorithm, density: float, rounds: int | None) -> BaseAlgorithm:
    """The method by its name, with the settings of networks, or the user's own with this density."""
    if rounds is not None and rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    if isinstance(algorithm, BaseAlgorithm):
        return replace(algorithm, density=density)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    cls = algorithm_class(algorithm)
    return cls(density=density, **select_supported(cls, NETWORK_DEFAULTS), **(USER_DATA_SIEVE if cls.holds_everywhere else {}))


def snapshot(module: nn.Module, objective: Module, theta: Tensor, history: list[dict[str, Any]]) -> FitResult:
    """Where a fit stands: the weights in a copy of the module given, and what it took."""
    plain = deepcopy(module)
    with torch.no_grad():
        for name, part in plain.named_parameters():
            if name in objective.slices:
                part.copy_(objective.unflatten(theta)[name])
    gated = theta[: objective.layout.num_gated]
    nonzero = int((gated != 0).sum())
    up, down = (sum(row[f"bytes_{way}"] for row in history) for way in ("up", "down"))
    return FitResult(
        rounds=len(history),
        density=nonzero / gated.numel(),
        nonzero=nonzero,
        bytes_up=up,
        bytes_down=down,
        history=tuple(history),
        module=plain,
    )


def stack_clients(clients: Sequence[ClientExamples], device: torch.device) -> tuple[Tensor, Tensor, np.ndarray]:
    """All clients' rows, client after client, and how many each holds."""
    if isinstance(clients, (Dataset, DataLoader, Tensor, np.ndarray)) or not isinstance(clients, Sequence):
        raise ValueError(f"clients is a list with the rows of each client; got one {type(clients).__name__}; for a single client use [it]")
    if not clients:
        raise ValueError("clients is empty; there must be at least one, with its rows")
    parts = [client_tensors(client, number) for number, client in enumerate(clients)]
    counts = np.array([len(y) for _, y in parts])
    if not counts.any():
        raise ValueError("no client holds a row; there is nothing to learn from")
    held = [part for part, count in zip(parts, counts, strict=True) if count]
    for name, column in (("x", 0), ("y", 1)):
        kinds = {(tuple(part[column].shape[1:]), part[column].dtype) for part in held}
        if len(kinds) > 1:
            raise ValueError(f"rows must be alike at all clients; {name} comes as {' and '.join(sorted(map(str, kinds)))}")
    return torch.cat([x for x, _ in held]).to(device), torch.cat([y for _, y in held]).to(device), counts


def client_tensors(client: ClientExamples, client_id: int) -> tuple[Tensor, Tensor]:
    """One client's rows as two tensors."""
    if isinstance(client, DataLoader):
        pairs = list(client)
        x, y = (torch.cat([torch.as_tensor(pair[i]) for pair in pairs]) for i in (0, 1)) if pairs else (torch.empty(0),) * 2
    elif isinstance(client, Dataset):
        x, y = default_collate([client[i] for i in range(len(client))]) if len(client) else (torch.empty(0),) * 2
    elif isinstance(client, (tuple, list)) and len(client) == 2:
        x, y = (torch.as_tensor(part) for part in client)
    else:
        raise ValueError(f"client {client_id} must be a pair (x, y), a Dataset or a DataLoader; got {type(client).__name__}")
    if len(x) != len(y):
        raise ValueError(f"client {client_id} has {len(x)} rows x but {len(y)} targets y")
    return x, y


def check_module(objective: Module, theta: Tensor, x: Tensor, y: Tensor) -> None:
    """Two rows through module and loss, so that what does not fit shows before the first round."""
    try:
        value = objective.loss(objective.predict(theta, x), y)
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        raise ValueError(f"module and loss cannot take these rows: {str(problem).splitlines()[0]}") from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError("loss must give the mean loss of a batch, one number; use reduction='mean'")
