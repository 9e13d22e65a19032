"""Simulate a federation in memory: the examples of clients in, rounds out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.types import Algorithm, CsrMatrix, Objective
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import require_memory
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.rounds import Population, RoundResult, initial_server, train


class Engine(StrEnum):
    """How a simulation computes a cohort."""

    LOOP = "loop"
    """one client after another: the readable reference"""
    BATCHED = "batched"
    """stacks of clients: fast"""


def make_exchange(
    context: RunContext, data: ClientData, *, engine: Engine = Engine.BATCHED, sample_bytes: bool = False
) -> LoopEngine | BatchedEngine:
    """Return the exchange that trains simulated clients with `engine`; `sample_bytes` is an option of the batched engine."""
    if engine is Engine.LOOP:
        return LoopEngine(context=context, data=data)
    return BatchedEngine(context=context, data=data, sample_bytes=sample_bytes)


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
) -> Iterator[RoundResult]:
    """Yield the rounds over examples ordered by client, starting from `weights` or from weights drawn with the seed."""
    dtype, device = (torch.float32, "cpu") if weights is None else (weights.dtype, str(weights.device))
    population = Population(len(counts), np.flatnonzero(counts).tolist())
    require_memory(algorithm, objective.layout, len(population.clients_with_data), dtype)
    workload = algorithm.workload
    data = ClientData(x, y, counts, objective, workload.batch_size, workload.batch_sampling)
    fingerprint = wire.compute_fingerprint(type(algorithm).__name__, objective.layout)
    context = RunContext(algorithm=algorithm, objective=objective, seed=seed, fingerprint=fingerprint, dtype=dtype, device=device)
    exchange = make_exchange(context, data)
    server = initial_server(algorithm, objective, seed, dtype, device, weights)
    return train(
        algorithm, server, population, participation, exchange, rounds, seed, dtype=dtype, device=device, start_from_seed=weights is None
    )


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one thread for tensor arithmetic: small tensors gain nothing from two, and results repeat bit for bit (decision G2)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
