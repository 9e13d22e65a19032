"""Measure rounds: the parameters, metrics, diagnostics and traffic of every finished round."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.log_alpha import HasGateDistribution, HasGates
from fedsieve.core.gates import active_probability
from fedsieve.core.optimizers import StepRule
from fedsieve.core.reply_validation import CLAIM_REASON
from fedsieve.core.types import ClientMemory, Traffic
from fedsieve.runtime.buffers import append_buffers
from fedsieve.runtime.failures import LATE_REASON
from fedsieve.runtime.rounds import RoundResult

MAX_ABS_WEIGHT = 1e6
"""Training with a larger weight counts as diverged."""


class DivergedError(RuntimeError):
    """Training diverged. The rounds before remain on disk."""


class MeasuredRound(NamedTuple):
    """A finished round and its measurements."""

    result: RoundResult
    parameters: Tensor
    metrics: dict[str, Any]
    gate_histogram: np.ndarray | None


class RunState(NamedTuple):
    """The state of a run between two rounds."""

    server: Any
    num_rounds_done: int = 0
    seconds: float = 0.0
    """time spent on these rounds"""
    memories: Mapping[int, ClientMemory] = {}
    """what each client keeps until its next round"""
    buffers: Tensor | None = None
    """(b,): the buffers of the model; None: the initial ones, or none at all"""


def measure_rounds(
    algorithm: BaseAlgorithm,
    rounds: Iterable[RoundResult],
    evaluate: Callable[[Tensor], Mapping[str, float]],
    *,
    dense_metric: str | None = None,
    extra_columns: Callable[[RoundResult], Mapping[str, Any]] = lambda _: {},
    has_malicious_clients: bool = False,
    seconds_before: float = 0.0,
) -> Iterator[MeasuredRound]:
    """Yield each round with one row of metrics; raise DivergedError if the weights diverge.

    `evaluate` returns the metrics of a vector of parameters and buffers. If `dense_metric` is set, the row also has this metric of the
    parameters before the final projection. `extra_columns` returns further columns of a round.
    """
    started = time.perf_counter() - seconds_before
    for result in rounds:
        parameters, unprojected = algorithm.parameters(result.server), algorithm.unprojected_parameters(result.server)
        raise_if_diverged(algorithm, result, unprojected, has_malicious_clients=has_malicious_clients)
        row: dict[str, Any] = {"round": result.round + 1, **evaluate(append_buffers(parameters, result.buffers))}
        if dense_metric is not None and (unprojected != 0).sum() > (parameters != 0).sum():
            row["dense_value"] = evaluate(append_buffers(unprojected, result.buffers))[dense_metric]
        row |= {name: float(value) for name, value in algorithm.diagnostics(result.server).items()}
        row |= {**traffic_columns(result.uplink, result.downlink), **extra_columns(result)}
        row |= {"cohort": result.cohort, "replied": result.replied, "rejected": result.rejected}
        row["seconds"] = time.perf_counter() - started
        yield MeasuredRound(result, parameters, row, compute_gate_histogram(algorithm, result.server))


def traffic_columns(uplink: Traffic, downlink: Traffic) -> dict[str, int]:
    """Return the bytes of a round by the names of the result."""
    return {
        f"bytes_{direction}" + (f"_{part}" if part != "total" else ""): size
        for direction, traffic in (("up", uplink), ("down", downlink))
        for part, size in asdict(traffic).items()
    }


def raise_if_diverged(algorithm: BaseAlgorithm, result: RoundResult, parameters: Tensor, *, has_malicious_clients: bool = False) -> None:
    """Raise DivergedError if a weight is not finite or too large, or if every reply was rejected."""
    diverged = not bool(torch.isfinite(parameters).all()) or float(parameters.abs().amax()) > MAX_ABS_WEIGHT
    is_expected = result.replied or has_malicious_clients or algorithm.privacy is not None  # a private run does not show who replied
    reasons = [] if is_expected else [reason for _, reason in result.rejected if reason != LATE_REASON]
    if reasons and all(reason.startswith(CLAIM_REASON) for reason in reasons):
        raise DivergedError(f"in round {result.round + 1} every reply was rejected: {reasons[0]}; raise federation.max-claimed-examples")
    if diverged and has_malicious_clients:
        raise DivergedError(
            f"diverged in round {result.round + 1}: federation.aggregator {algorithm.aggregator} did not withstand the malicious clients; "
            f"use a robust --federation.aggregator"
        )
    if (diverged or reasons) and (reason := algorithm.divergence_reason(result.server)) is not None:
        raise DivergedError(f"diverged in round {result.round + 1}: {reason}")
    if diverged or reasons:
        exchanges_gradients = algorithm.workload.exchanges > 1
        rate = (
            f"algorithm.server-learning-rate {algorithm.server_learning_rate:g}"
            if exchanges_gradients
            else f"algorithm.learning-rate {algorithm.learning_rate:g}"
        )
        polyak_helps = algorithm.step_rule is not StepRule.POLYAK and not exchanges_gradients
        raise DivergedError(
            f"diverged in round {result.round + 1}: weights are not finite or above {MAX_ABS_WEIGHT:g} with {rate} and algorithm.step-rule "
            f"{algorithm.step_rule}; lower the rate{', or use --algorithm.step-rule polyak' if polyak_helps else ''}"
        )


def compute_gate_histogram(algorithm: BaseAlgorithm, server: Any) -> np.ndarray | None:
    """Return the histogram of P(z != 0) in 20 bins, or None for an algorithm without gates."""
    if not isinstance(algorithm, HasGateDistribution) or not isinstance(server, HasGates):
        return None
    probability = active_probability(algorithm.shape, server.log_alpha[: server.layout.num_gated]).numpy(force=True)
    return np.histogram(probability, bins=20, range=(0, 1))[0]


def summarize(rows: Sequence[Mapping[str, Any]], parameters: Tensor, num_gated: int) -> dict[str, Any]:
    """Return what every result has: rounds, size of the model, total bytes, number of replies, seconds."""
    gated = parameters[:num_gated]
    nonzero = int((gated != 0).sum())
    return {
        "rounds": len(rows),
        "size": num_gated,
        "nonzero": nonzero,
        "density": nonzero / num_gated,
        **{name: sum(row[name] for row in rows) for name in rows[-1] if name.startswith(("bytes_", "flower_overhead_"))},
        "asked": sum(len(row["cohort"]) for row in rows),
        "replied": sum(len(row["replied"]) for row in rows),
        "rejected": sum(len(row["rejected"]) for row in rows),
        "rounds_without_replies": sum(not row["replied"] for row in rows),
        "seconds": rows[-1]["seconds"],
    }
