"""A federation in memory: rows of clients in, rounds out, by the default engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.types import Algorithm, Objective, SparseRows
from fedsieve.runtime.batched import Batched
from fedsieve.runtime.client_data import Rows
from fedsieve.runtime.rounds import Population, Round, start, train


def simulate(
    algorithm: Algorithm,
    objective: Objective,
    x: Tensor | SparseRows,
    y: Tensor,
    counts: Sequence[int] | np.ndarray,
    *,
    participation: float,
    rounds: int,
    seed: int,
    given: Tensor | None = None,
) -> Iterator[Round]:
    """Rounds over rows that stand client after client; from `given` weights, or from a start every party can draw."""
    dtype, device = (torch.float32, "cpu") if given is None else (given.dtype, str(given.device))
    population = Population(len(counts), np.flatnonzero(counts).tolist())
    rows = Rows(x, y, counts, objective, algorithm.batch_rows)
    fingerprint = wire.fingerprint(type(algorithm).__name__, objective.layout)
    where = {"dtype": dtype, "device": device}
    exchange = Batched(algorithm=algorithm, objective=objective, rows=rows, seed=seed, fingerprint=fingerprint, **where)
    server = start(algorithm, objective, seed, given=given, **where)
    return train(algorithm, server, population, participation, exchange, rounds, seed, known_start=given is None, **where)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensor arithmetic on one thread: small tensors gain nothing from two, and one thread count gives one result (decision G2)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
