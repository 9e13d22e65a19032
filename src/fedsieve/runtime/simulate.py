"""A federation in memory: rows of clients in, rounds out, by the default engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.types import Algorithm, CsrMatrix, Objective
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.rounds import Population, RoundResult, initial_server, train


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
    """Rounds over rows that stand client after client; from `given` weights, or from a start every party can draw."""
    dtype, device = (torch.float32, "cpu") if weights is None else (weights.dtype, str(weights.device))
    population = Population(len(counts), np.flatnonzero(counts).tolist())
    rows = ClientData(x, y, counts, objective, algorithm.examples_per_step)
    fingerprint = wire.compute_fingerprint(type(algorithm).__name__, objective.layout)
    where = {"dtype": dtype, "device": device}
    exchange = BatchedEngine(algorithm=algorithm, objective=objective, data=rows, seed=seed, fingerprint=fingerprint, **where)
    server = initial_server(algorithm, objective, seed, weights=weights, **where)
    return train(algorithm, server, population, participation, exchange, rounds, seed, start_from_seed=weights is None, **where)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Tensor arithmetic on one thread: small tensors gain nothing from two, and one thread count gives one result (decision G2)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
