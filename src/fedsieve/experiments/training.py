"""Execute a run: train, measure every round, sum it up."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsieve.algorithms.base import Method
from fedsieve.core.gates import active_probability
from fedsieve.core.optimizers import StepRule
from fedsieve.core.random import key
from fedsieve.core.types import Bytes
from fedsieve.data import user_files
from fedsieve.experiments.config import Run
from fedsieve.experiments.run_info import bytes_dense
from fedsieve.experiments.simulation import Problem
from fedsieve.models.initial_weights import load_start
from fedsieve.objectives.linear import Linear
from fedsieve.runtime.failures import LATE, Unreliable
from fedsieve.runtime.privacy import spent
from fedsieve.runtime.rounds import Round, start, train

COLUMNS = ("r2", "mse", "accuracy", "ce", "bce", "micro_f1", "tdr", "tdr_rows", "recall")
DIVERGED = 1e6
"""A weight this large has left every sensible model."""


class DivergedError(RuntimeError):
    """Training left the numbers; what there is up to that round is kept."""


class Progress(NamedTuple):
    """A finished round, measured."""

    round: Round
    theta: Tensor
    row: dict[str, Any]
    histogram: np.ndarray | None


class Standing(NamedTuple):
    """Where a run stands between two rounds."""

    server: Any
    rounds: int = 0
    """rounds that are done"""
    seconds: float = 0.0
    """what they took"""


def opening(run: Run, problem: Problem) -> Standing:
    """Before the first round: drawn from the seed, or from given weights."""
    given = None if run.start is None else problem.inward(load_start(run.start, run.objective)).to(device=run.device, dtype=run.dtype)
    return Standing(start(run.algorithm, run.objective, run.seed, run.dtype, run.device, given))


def execute(run: Run, problem: Problem | None = None, standing: Standing | None = None) -> Iterator[Progress]:
    """Train from where the run stands, measuring every round."""
    torch.set_num_threads(run.threads)
    problem = problem or Problem(run)
    problem.check()
    algorithm = run.algorithm
    tune = problem.exchange(problem.server_rows, key(run.seed, "tune")) if run.federation.server_rows else None
    standing = standing or opening(run, problem)
    exchange = problem.exchange(problem.rows, run.seed)
    if run.failures.any:
        present = problem.population.present
        exchange = Unreliable(exchange=exchange, opened=exchange.opened, failures=run.failures, present=present, seed=run.seed)
    participation = 1.0 if run.federation.central else run.federation.participation
    epsilons = epsilon_by_round(run, problem, standing.rounds)
    rounds = train(
        algorithm,
        standing.server,
        problem.population,
        participation,
        exchange,
        run.rounds,
        run.seed,
        dtype=run.dtype,
        device=run.device,
        first=standing.rounds,
        tune=tune,
        known_start=run.start is None,
        screen=problem.screen,
    )
    began = time.perf_counter() - standing.seconds
    for done in rounds:
        theta, full = algorithm.theta(done.server), algorithm.full_theta(done.server)
        refuse_divergence(algorithm, done, full, hostile=run.failures.hostile > 0)
        row = {"round": done.number + 1, **problem.measure(theta), **problem.recovery(theta)}
        if (full != 0).sum() > (theta != 0).sum():
            row["full"] = problem.measure(full)[run.metric]
        row |= {name: float(value) for name, value in algorithm.info(done.server).items()}
        row |= {} if epsilons is None else {"epsilon": next(epsilons)}
        agreeing = () if done.number else (problem.agreeing,)
        row |= traffic(done.up.plus(*agreeing), done.down.plus(*agreeing))
        row |= {"cohort": done.cohort, "replied": done.replied, "rejected": done.rejected, "seconds": time.perf_counter() - began}
        yield Progress(done, theta, row, gate_histogram(algorithm, done.server))


def epsilon_by_round(run: Run, problem: Problem, first: int) -> Iterator[float] | None:
    """What has been spent after each round, where clients are hidden."""
    if not run.privacy.noise:
        return None
    people = len(problem.population.present)
    cohort = min(run.algorithm.private.cohort, people)
    return spent(run.privacy.noise, run.privacy.delta, people, cohort, run.algorithm.exchanges, first)


def traffic(up: Bytes, down: Bytes) -> dict[str, int]:
    """Bytes by the names users know."""
    return {
        f"bytes_{way}" + (f"_{part}" if part != "wire" else ""): size
        for way, sizes in (("up", up), ("down", down))
        for part, size in sizes._asdict().items()
    }


def refuse_divergence(algorithm: Method, done: Round, theta: Tensor, *, hostile: bool = False) -> None:
    """Stop once the weights have left the numbers."""
    lost = not bool(torch.isfinite(theta).all()) or float(theta.abs().amax()) > DIVERGED
    broken = [] if done.replied or hostile else [why for _, why in done.rejected if why != LATE]
    if broken and all("claims" in why for why in broken):
        raise DivergedError(f"in round {done.number + 1} every reply was rejected: {broken[0]}; raise federation.most-examples")
    if lost and hostile:
        raise DivergedError(
            f"diverged in round {done.number + 1}: hostile clients have carried federation.mean {algorithm.mean} away; "
            f"use a robust --federation.mean"
        )
    if lost or broken:
        gradients = algorithm.exchanges > 1
        rate = f"algorithm.server-rate {algorithm.server_rate:g}" if gradients else f"algorithm.rate {algorithm.rate:g}"
        polyak = algorithm.step_rule is StepRule.POLYAK or gradients
        raise DivergedError(
            f"diverged in round {done.number + 1}: weights are no longer finite or sensible with {rate} and algorithm.step-rule "
            f"{algorithm.step_rule}; lower the rate{'' if polyak else ', or use --algorithm.step-rule polyak'}"
        )


def features_used(run: Run, theta: Tensor) -> list[str] | None:
    """The features a linear model reads, strongest first, by name or number, of a user's own rows or where gates are shared by features."""
    objective = run.objective
    if not isinstance(objective, Linear) or not (objective.by_feature or run.task == "file"):
        return None
    strength = objective.parts(theta)[0].square().sum(0)
    order = strength.argsort(descending=True, stable=True)[: int((strength > 0).sum())].tolist()
    names = user_files.read(run.data.path, run.data.target, run.data.client).names if run.task == "file" else None
    return [names[j] if names else str(j) for j in order]


def gate_histogram(algorithm: Method, server: Any) -> np.ndarray | None:
    """How P(z != 0) is spread, in twentieths; None for methods without gates."""
    if not hasattr(server, "log_alpha"):
        return None
    probability = active_probability(algorithm.shape, server.log_alpha[: server.layout.gated]).numpy(force=True)
    return np.histogram(probability, bins=20, range=(0, 1))[0]


def summary(run: Run, problem: Problem, rows: list[dict[str, Any]], theta: Tensor) -> dict[str, Any]:
    """The result of a run, by the names of `--json`."""
    last = rows[-1]
    gated = theta[: run.objective.layout.gated]
    nonzero = int((gated != 0).sum())
    totals = {name: sum(row[name] for row in rows) for name in last if name.startswith("bytes_")}
    return {
        "run": run.id,
        "task": run.task,
        "method": run.method,
        "seed": run.seed,
        "rounds": len(rows),
        "metric": run.metric,
        "value": last[run.metric],
        **{name: last.get(name) for name in COLUMNS},
        "size": gated.numel(),
        "nonzero": nonzero,
        "density": nonzero / gated.numel(),
        "features": features_used(run, theta),
        "expected_density": last.get("expected_density"),
        "test_density": last.get("test_density"),
        **totals,
        "asked": sum(len(row["cohort"]) for row in rows),
        "replied": sum(len(row["replied"]) for row in rows),
        "rejected": sum(len(row["rejected"]) for row in rows),
        "silent_rounds": sum(not row["replied"] for row in rows),
        "epsilon": last.get("epsilon"),
        "delta": run.privacy.delta,
        "bytes_counted": run.bytes.value,
        "seconds": last["seconds"],
        "best_possible": None if problem.truth is None else problem.measure(problem.truth.reshape(-1))[run.metric],
        "note": problem.drawn.note,
        "bytes_dense": len(rows) * bytes_dense(run, problem),
    }
