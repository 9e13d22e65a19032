"""Simulate a federation in memory: the examples of clients in, rounds out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.protocols import Algorithm, Objective
from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.core.types import CsrMatrix
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.buffers import buffer_state
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import require_memory
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.cores import Workers, count_cohort_processes
from fedsieve.runtime.evaluation import RunState
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.refit import Refit
from fedsieve.runtime.rounds import Population, RoundResult, initial_server, train


class Engine(StrEnum):
    """How a simulation computes a cohort."""

    LOOP = "loop"
    """one client after another: the readable reference"""
    BATCHED = "batched"
    """stacks of clients: fast"""


def make_exchange(
    context: RunContext, data: ClientData, *, engine: Engine = Engine.BATCHED, sample_bytes: bool = False, workers: Workers = 1
) -> LoopEngine | BatchedEngine:
    """Return the exchange that trains simulated clients with `engine`; the other options are of the batched engine.

    The workers are processes on this machine's CPU cores, so that a run on another device has one.
    """
    if engine is Engine.LOOP:
        return LoopEngine(context=context, data=data)
    num_workers = count_cohort_processes(workers) if torch.device(context.device).type == "cpu" else 1
    return BatchedEngine(context=context, data=data, sample_bytes=sample_bytes, num_workers=num_workers)


def simulate(
    algorithm: Algorithm,
    objective: Objective,
    x: Tensor | CsrMatrix,
    y: Tensor,
    counts: Sequence[int] | np.ndarray,
    *,
    participation: float,
    rounds: int,
    seed: int,
    weights: Tensor | None = None,
    workers: Workers = "auto",
    refit: bool = False,
    sample_weights: np.ndarray | None = None,
    state: RunState | None = None,
) -> Iterator[RoundResult]:
    """Yield the rounds over examples ordered by client, starting from `weights` or from weights drawn with the seed.

    A `state` is that after some rounds of this run, which continues from there.
    With `refit` the last round ends with the final refit. `sample_weights` are how often examples are drawn, relative to each other.
    """
    dtype, device = (torch.float32, "cpu") if weights is None else (weights.dtype, str(weights.device))
    population = Population(len(counts), np.flatnonzero(counts).tolist())
    require_memory(algorithm, objective.layout, len(population.clients_with_data), dtype)
    workload = algorithm.workload
    data = ClientData(x, y, counts, objective, workload.batch_size, workload.batch_sampling, sample_weights)
    fingerprint = wire.compute_fingerprint(type(algorithm).__name__, objective.layout)
    context = RunContext(algorithm=algorithm, objective=objective, seed=seed, fingerprint=fingerprint, dtype=dtype, device=device)
    exchange = make_exchange(context, data, workers=workers)
    state = state or RunState(initial_server(algorithm, objective, seed, dtype, device, weights))
    rounds_of_training = train(
        algorithm,
        state.server,
        population,
        participation,
        exchange,
        rounds,
        seed,
        dtype=dtype,
        device=device,
        first_round=state.num_rounds_done,
        memories=state.memories,
        start_from_seed=weights is None,
        buffers=buffer_state(objective, seed, state.buffers),
    )
    if not refit:
        return rounds_of_training
    clients = population.clients_with_data
    return Refit(exchange=exchange, clients=clients, num_rounds=rounds, limits=ReplyLimits()).apply(rounds_of_training)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one thread for tensor arithmetic: threads of torch slow small tensors down, and workers use the other cores (decision G2)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
