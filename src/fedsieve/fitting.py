"""`fedsieve.fit`: train any nn.Module on the examples of several clients, with an exact number of non-zero weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.random import generator
from fedsieve.core.types import Traffic
from fedsieve.data.module_examples import ClientExamples, ModuleExamples, stack_clients
from fedsieve.experiments.fit_arguments import (
    Metric,
    build_algorithm,
    check_metrics,
    check_module,
    check_patterns,
    copy_module,
    parse_granularity,
    parse_plain,
    require_device,
    require_full_precision,
    require_functions,
    require_participation,
    require_patience,
    set_local_epochs,
)
from fedsieve.formatting import ProgressBar, format_number
from fedsieve.objectives.module import GateGranularity, Module
from fedsieve.runtime.cores import Workers, require_workers
from fedsieve.runtime.evaluation import RunState, measure_rounds, traffic_columns
from fedsieve.runtime.rounds import initial_server
from fedsieve.runtime.simulate import simulate, single_threaded
from fedsieve.storage.run_log import open_log

ROW_COLUMNS = ("loss", "round", "cohort", "replied", "rejected", "seconds")
"""Columns of the learning curve beside bytes and diagnostics, whose names a metric cannot have."""
MAX_EVALUATED_EXAMPLES = 1000
"""Maximum number of training examples on which each round is evaluated."""


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
    """the learning curve, one row per round: loss and metrics on at most 1000 training examples, those on `validation` by names with
    `val_`, densities, bytes, cohort"""
    module: nn.Module = field(repr=False)
    """a copy of the user's module with the weights of this round"""
    best_round: int | None = None
    """with `patience` the round of the returned module, counted from 1"""


def fit(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    clients: Sequence[ClientExamples],
    *,
    density: float,
    algorithm: str | BaseAlgorithm = "sieve",
    rounds: int | None = None,
    participation: float = 1.0,
    local_epochs: float | None = None,
    ungated: Sequence[str] = (),
    gate_norms: bool = False,
    gate_granularity: GateGranularity | str = GateGranularity.WEIGHT,
    seed: int = 0,
    device: str | torch.device | None = None,
    workers: Workers = "auto",
    validation: ClientExamples | None = None,
    metrics: Mapping[str, Metric] | None = None,
    patience: int | None = None,
    callback: Callable[[FitResult], Any] | None = None,
    run_dir: str | Path | None = None,
    verbose: bool = False,
    **options: Any,
) -> tuple[nn.Module, FitResult]:
    """Train a module on the examples of several clients, so that exactly floor(density p) of its p weights are not zero.

    Training starts from the module's current weights, random or pretrained. The module itself is not changed. Parameters with
    `requires_grad=False` are not trained, not sent and not counted.

    Parameters
    ----------
    module
        any `nn.Module` in single or double precision that returns a tensor, or an object or dict with `logits`; its layers keep their
        mode (`train` or `eval`)
    loss
        mean loss of a batch, `loss(module(x), y)`, such as `torch.nn.functional.cross_entropy`
    clients
        the examples of each client: `(x, y)` tensors or arrays, a `Dataset`, or a `DataLoader` (read once). x may be a tuple of inputs,
        or a dict of keyword arguments; an example may be a dict with the key `labels`
    density
        fraction of weights that may be non-zero
    algorithm
        the algorithm, by name or as an object with your options, such as `Sieve(local_steps=20)`
    rounds
        number of rounds (default: the algorithm's, mostly 100)
    participation
        fraction of clients in each round
    local_epochs
        passes over the examples of an average client in a round; sets `local_steps`
    ungated
        patterns of names of parameters without gates, such as `"*.bias"`: always kept, not counted
    gate_norms
        whether parameters of normalization layers (BatchNorm, LayerNorm, ..., classes whose name ends in Norm) have gates
    gate_granularity
        weights that share a gate: `weight` (none), `feature`, `neuron` or `filter`
    seed
        equal seeds give equal bits
    device
        torch device of the training (default: the module's); the returned module is on the module's own device
    workers
        processes that train the clients: at most this many, or "auto" for one per core; the result does not depend on it
    validation
        examples on which each round is evaluated in addition, in a form as those of a client
    metrics
        functions (outputs, targets) -> number by name, evaluated with the loss
    patience
        number of rounds without a lower validation loss after which training stops; the module of the best round is returned
    callback
        called after every round with a `FitResult`; training stops if it returns True, whatever else it returns is ignored
    run_dir
        folder for checkpoints: the same call continues an interrupted run from there, to the same bits
    verbose
        show progress on standard error
    **options
        options of the algorithm by their names on the command line: `learning_rate`, `local_steps`, `batch_size`, `server_optimizer`, ...

    Returns
    -------
    A copy of the module with the trained weights, which does not depend on fedsieve, and the last `FitResult`.
    """
    own = require_full_precision(module)
    require_functions(loss, callback)
    seed = parse_plain(int, seed, "seed")
    where, dtype = require_device(own.device if device is None else device), own.dtype
    examples = stack_clients(clients).to(where, dtype)
    template = copy_module(module).to(where)
    objective = Module(
        module=template,
        loss=loss,
        ungated=check_patterns(ungated, template),
        gate_norms=gate_norms,
        frozen=tuple(name for name, parameter in template.named_parameters() if not parameter.requires_grad),
        granularity=parse_granularity(gate_granularity),
        forward=examples.forward,
    )
    trained = build_algorithm(algorithm, density, rounds, options)
    if local_epochs is not None:
        trained = set_local_epochs(trained, local_epochs, options, examples.counts)
    trained.final_budget(objective.layout)
    weights = objective.flatten(template)
    check_module(objective, weights, examples)
    require_participation(participation)
    require_workers(workers)
    require_patience(patience, validation, run_dir)
    num_rounds = trained.default_rounds if rounds is None else rounds
    state = RunState(initial_server(trained, objective, seed, dtype, str(where), weights))
    columns = {*ROW_COLUMNS, *traffic_columns(Traffic(), Traffic()), *trained.diagnostics(state.server)}
    functions = check_metrics(metrics or {}, objective.predict(weights, examples.x[:2]), examples.y[:2], columns)
    evaluate = make_evaluation(objective, examples, validation, {"loss": objective.loss} | functions, seed)
    make_result = partial(snapshot, module, objective)
    with ExitStack() as stack:
        log = None
        if run_dir is not None:
            settings = describe_fit(trained, objective, examples, {"seed": seed, "participation": participation, "rounds": num_rounds})
            log = stack.enter_context(open_log(Path(run_dir), state, settings, num_rounds))
            state = state._replace(server=log.server, num_rounds_done=len(log.metrics_rows), memories=log.memories, buffers=log.buffers)
        history = [] if log is None else log.metrics_rows
        results = simulate(
            trained,
            objective,
            examples.x,
            examples.y,
            examples.counts,
            participation=participation,
            rounds=num_rounds,
            seed=seed,
            weights=weights,
            workers=workers,
            state=state,
        )
        stack.enter_context(single_threaded())
        bar = stack.enter_context(ProgressBar(num_rounds, "fit", "round", quiet=not verbose, num_done=len(history)))
        last, best, best_loss = (trained.parameters(state.server), state.buffers, len(history)), None, inf
        for measured in measure_rounds(trained, results, evaluate, seconds_before=history[-1]["seconds"] if history else 0.0):
            if log is None:
                history.append(measured.metrics)
            else:
                log.add_round(measured)
            last = (measured.parameters, measured.result.buffers, len(history))
            bar.advance(f"loss {format_number(measured.metrics['loss'])}")
            if patience is not None and (best is None or measured.metrics["val_loss"] < best_loss):
                best, best_loss = last, measured.metrics["val_loss"]
            if callback is not None and is_true(callback(make_result(last, history))):
                break
            if patience is not None and best is not None and len(history) - best[2] >= patience:
                break
    result = make_result(last if best is None else best, history)
    result = replace(result, best_round=None if best is None else best[2])
    return result.module, result


def make_evaluation(
    objective: Module, examples: ModuleExamples, validation: Any, metrics: Mapping[str, Metric], seed: int
) -> Callable[[Tensor], dict[str, float]]:
    """Return the function from parameters to loss and metrics, on some training examples and on the validation examples."""
    sample = torch.from_numpy(generator(seed, "measured").permutation(len(examples.y))[:MAX_EVALUATED_EXAMPLES]).to(examples.y.device)
    parts = {"": (examples.x[sample], examples.y[sample])}
    if validation is not None:
        held = stack_clients([validation])
        if held.input_format != examples.input_format or held.x.shape[1:] != examples.x.shape[1:]:
            raise ValueError("validation has inputs of another form than those of the clients; use one form for both")
        held = held.to(examples.x.device, examples.x.dtype)
        parts["val_"] = (held.x, held.y)

    def evaluate(parameters: Tensor) -> dict[str, float]:
        values = {}
        for prefix, (x, y) in parts.items():
            outputs = objective.predict(parameters, x)
            values |= {prefix + name: float(function(outputs, y)) for name, function in metrics.items()}
        return values

    return evaluate


def describe_fit(algorithm: BaseAlgorithm, objective: Module, examples: ModuleExamples, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what determines the result, by which a checkpoint is recognized: settings, layers, and a hash of weights and examples."""
    digest = blake2b(digest_size=8)
    for tensor in (objective.flatten(objective.module), examples.x, examples.y):
        digest.update(tensor.numpy(force=True).tobytes())
    options = {name: getattr(algorithm, name) for name in sorted(algorithm.option_names())}
    layers = {name: list(shape) for name, (_, shape) in objective.slices.items()}
    start = {"layers": layers, "clients": examples.counts.tolist(), "weights and examples": digest.hexdigest()}
    return settings | start | {"density": algorithm.density, "algorithm": {"name": type(algorithm).__name__} | options}


def is_true(callback_result: Any) -> bool:
    """Return whether a callback asked to stop: only True does."""
    return callback_result is True or (isinstance(callback_result, np.bool_) and bool(callback_result))


def snapshot(
    module: nn.Module, objective: Module, state: tuple[Tensor, Tensor | None, int], history: Sequence[dict[str, Any]]
) -> FitResult:
    """Return the FitResult with a copy of the user's module that has these parameters and buffers."""
    parameters, buffers, _ = state
    trained, tensors = deepcopy(module), objective.unflatten(parameters)
    tensors |= {} if buffers is None else objective.make_buffers(buffers)
    with torch.no_grad():
        for name, tensor in (*trained.named_parameters(), *trained.named_buffers()):
            if name in tensors:
                tensor.copy_(tensors[name])
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
