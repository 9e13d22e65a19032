"""Execute a run: train, measure every round, sum it up."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.gates import active_probability
from fedsieve.core.optimizers import StepRule
from fedsieve.core.random import derive_key
from fedsieve.core.types import Traffic
from fedsieve.data import user_files
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.run_info import dense_bytes_per_round
from fedsieve.experiments.simulation import Simulation
from fedsieve.models.initial_weights import load_initial_weights
from fedsieve.objectives.linear import Linear
from fedsieve.runtime.failures import LATE_REASON, FaultyExchange
from fedsieve.runtime.privacy import epsilon_by_round
from fedsieve.runtime.rounds import RoundResult, initial_server, train

METRIC_NAMES = ("r2", "mse", "accuracy", "ce", "bce", "micro_f1", "tdr", "tdr_features", "recall")
MAX_ABS_WEIGHT = 1e6
"""A weight this large has left every sensible model."""


class DivergedError(RuntimeError):
    """Training left the numbers; what there is up to that round is kept."""


class MeasuredRound(NamedTuple):
    """A finished round, measured."""

    result: RoundResult
    parameters: Tensor
    metrics: dict[str, Any]
    gate_histogram: np.ndarray | None


class RunState(NamedTuple):
    """Where a run stands between two rounds."""

    server: Any
    num_rounds_done: int = 0
    """rounds that are done"""
    seconds: float = 0.0
    """what they took"""


def initial_state(run: RunConfig, problem: Simulation) -> RunState:
    """Before the first round: drawn from the seed, or from given weights."""
    given = (
        None
        if run.init_weights is None
        else problem.to_standardized(load_initial_weights(run.init_weights, run.objective)).to(device=run.device, dtype=run.dtype)
    )
    return RunState(initial_server(run.algorithm, run.objective, run.seed, run.dtype, run.device, given))


def run_rounds(run: RunConfig, problem: Simulation | None = None, state: RunState | None = None) -> Iterator[MeasuredRound]:
    """Train from where the run stands, measuring every round."""
    torch.set_num_threads(run.threads)
    problem = problem or Simulation(run)
    problem.validate()
    algorithm = run.algorithm
    tune = problem.make_exchange(problem.server_data, derive_key(run.seed, "tune")) if run.federation.server_examples else None
    state = state or initial_state(run, problem)
    exchange = problem.make_exchange(problem.client_data, run.seed)
    if run.failures.is_active:
        present = problem.population.clients_with_data
        exchange = FaultyExchange(
            exchange=exchange, resolve_seed=exchange.resolve_seed, failures=run.failures, clients_with_data=present, seed=run.seed
        )
    participation = 1.0 if run.centralized else run.federation.participation
    epsilons = iterate_epsilon(run, problem, state.num_rounds_done)
    rounds = train(
        algorithm,
        state.server,
        problem.population,
        participation,
        exchange,
        run.rounds,
        run.seed,
        dtype=run.dtype,
        device=run.device,
        first_round=state.num_rounds_done,
        server_exchange=tune,
        start_from_seed=run.init_weights is None,
        limits=problem.reply_limits,
    )
    began = time.perf_counter() - state.seconds
    for done in rounds:
        theta, full = algorithm.parameters(done.server), algorithm.unprojected_parameters(done.server)
        raise_if_diverged(algorithm, done, full, has_malicious_clients=run.failures.malicious_fraction > 0)
        row = {"round": done.round + 1, **problem.evaluate(theta), **problem.support_recovery(theta)}
        if (full != 0).sum() > (theta != 0).sum():
            row["dense_value"] = problem.evaluate(full)[run.metric]
        row |= {name: float(value) for name, value in algorithm.diagnostics(done.server).items()}
        row |= {} if epsilons is None else {"epsilon": next(epsilons)}
        agreeing = () if done.round else (problem.standardization_traffic,)
        row |= traffic_columns(done.uplink.plus(*agreeing), done.downlink.plus(*agreeing))
        row |= {"cohort": done.cohort, "replied": done.replied, "rejected": done.rejected, "seconds": time.perf_counter() - began}
        yield MeasuredRound(done, theta, row, compute_gate_histogram(algorithm, done.server))


def iterate_epsilon(run: RunConfig, problem: Simulation, first_round: int) -> Iterator[float] | None:
    """What has been spent after each round, where clients are hidden."""
    if not run.privacy.noise_multiplier:
        return None
    people = len(problem.population.clients_with_data)
    cohort = min(run.algorithm.privacy.cohort_size, people)
    return epsilon_by_round(run.privacy.noise_multiplier, run.privacy.delta, people, cohort, run.algorithm.exchanges_per_round, first_round)


def traffic_columns(uplink: Traffic, downlink: Traffic) -> dict[str, int]:
    """Bytes by the names users know."""
    return {
        f"bytes_{way}" + (f"_{part}" if part != "total" else ""): size
        for way, sizes in (("up", uplink), ("down", downlink))
        for part, size in sizes._asdict().items()
    }


def raise_if_diverged(algorithm: BaseAlgorithm, result: RoundResult, theta: Tensor, *, has_malicious_clients: bool = False) -> None:
    """Stop once the weights have left the numbers."""
    lost = not bool(torch.isfinite(theta).all()) or float(theta.abs().amax()) > MAX_ABS_WEIGHT
    broken = [] if result.replied or has_malicious_clients else [why for _, why in result.rejected if why != LATE_REASON]
    if broken and all("claims" in why for why in broken):
        raise DivergedError(f"in round {result.round + 1} every reply was rejected: {broken[0]}; raise federation.max-claimed-examples")
    if lost and has_malicious_clients:
        raise DivergedError(
            f"diverged in round {result.round + 1}: hostile clients have carried federation.aggregator {algorithm.aggregator} away; "
            f"use a robust --federation.aggregator"
        )
    if lost or broken:
        gradients = algorithm.exchanges_per_round > 1
        rate = (
            f"algorithm.server-learning-rate {algorithm.server_learning_rate:g}"
            if gradients
            else f"algorithm.learning-rate {algorithm.learning_rate:g}"
        )
        polyak = algorithm.step_rule is StepRule.POLYAK or gradients
        raise DivergedError(
            f"diverged in round {result.round + 1}: weights are no longer finite or sensible with {rate} and algorithm.step-rule "
            f"{algorithm.step_rule}; lower the rate{'' if polyak else ', or use --algorithm.step-rule polyak'}"
        )


def used_features(run: RunConfig, theta: Tensor) -> list[str] | None:
    """The features a linear model reads, strongest first, by name or number, of a user's own rows or where gates are shared by features."""
    objective = run.objective
    if not isinstance(objective, Linear) or not (objective.group_by_feature or run.task == "file"):
        return None
    strength = objective.unflatten(theta)[0].square().sum(0)
    order = strength.argsort(descending=True, stable=True)[: int((strength > 0).sum())].tolist()
    names = user_files.read_table(run.data.path, run.data.target, run.data.client).feature_names if run.task == "file" else None
    return [names[j] if names else str(j) for j in order]


def compute_gate_histogram(algorithm: BaseAlgorithm, server: Any) -> np.ndarray | None:
    """How P(z != 0) is spread, in twentieths; None for methods without gates."""
    if not hasattr(server, "log_alpha"):
        return None
    probability = active_probability(algorithm.shape, server.log_alpha[: server.layout.num_gated]).numpy(force=True)
    return np.histogram(probability, bins=20, range=(0, 1))[0]


def summarize(run: RunConfig, problem: Simulation, rows: list[dict[str, Any]], theta: Tensor) -> dict[str, Any]:
    """The result of a run, by the names of `--json`."""
    last = rows[-1]
    gated = theta[: run.objective.layout.num_gated]
    nonzero = int((gated != 0).sum())
    totals = {name: sum(row[name] for row in rows) for name in last if name.startswith("bytes_")}
    return {
        "run": run.id,
        "task": run.task,
        "method": run.algorithm_name,
        "seed": run.seed,
        "rounds": len(rows),
        "metric": run.metric,
        "value": last[run.metric],
        **{name: last.get(name) for name in METRIC_NAMES},
        "size": gated.numel(),
        "nonzero": nonzero,
        "density": nonzero / gated.numel(),
        "features": used_features(run, theta),
        "expected_density": last.get("expected_density"),
        "test_density": last.get("test_density"),
        **totals,
        "asked": sum(len(row["cohort"]) for row in rows),
        "replied": sum(len(row["replied"]) for row in rows),
        "rejected": sum(len(row["rejected"]) for row in rows),
        "rounds_without_replies": sum(not row["replied"] for row in rows),
        "epsilon": last.get("epsilon"),
        "delta": run.privacy.delta,
        "bytes_counted": run.byte_counting.value,
        "seconds": last["seconds"],
        "oracle_value": None if problem.truth is None else problem.evaluate(problem.truth.reshape(-1))[run.metric],
        "note": problem.dataset.note,
        "bytes_dense": len(rows) * dense_bytes_per_round(run, problem),
    }
