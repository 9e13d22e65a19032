"""The rows of simulated clients: one tensor for all of them, a slice for each, and the deck they deal batches from."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.streams import stream
from fedsieve.core.types import Batch, Clock, Objective


class Rows:
    """All clients' rows, client after client."""

    def __init__(self, batch: Batch, counts: Sequence[int] | np.ndarray, objective: Objective, batch_rows: int | None) -> None:
        self.all = batch
        self.counts = np.asarray(counts, dtype=np.int64)
        self.offsets = np.concatenate(([0], np.cumsum(self.counts)))
        self._objective = objective
        self._batch_rows = batch_rows
        self._smoothness: dict[int, Tensor] = {}

    def examples(self, client: int) -> int:
        """n_k."""
        return int(self.counts[client])

    def of(self, client: int) -> Batch:
        """One client's rows."""
        part = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        return Batch(self.all.x[part], self.all.y[part])

    def smoothness(self, clients: Sequence[int]) -> Tensor:
        """L of each client's mini-batch loss, computed once a client."""
        for client in clients:
            if client not in self._smoothness:
                rows = self.of(client)
                self._smoothness[client] = self._objective.smoothness(rows, self._batch_rows or len(rows.x))
        return torch.stack([self._smoothness[client] for client in clients])


Deck = Callable[[int | None, int, int], np.ndarray]


def deal(seed: int, clock: Clock, client: int, count: int) -> Deck:
    """A client's rows shuffled once a round and dealt in turn, the deck starting over when it is used up.

    Rows repeat within a batch only where the client has fewer than a batch (decision D2). Gradient methods deal one hand per exchange.
    """
    order = shuffled(seed, clock.round, client, count)

    def hand(size: int | None, step: int, steps: int) -> np.ndarray:
        if size is None:
            return np.arange(count)
        begin = (clock.exchange * steps + step) * size
        return order[np.arange(begin, begin + size) % count]

    return hand


@lru_cache(maxsize=4096)
def shuffled(seed: int, round: int, client: int, count: int) -> np.ndarray:
    """The order of one client's rows in one round."""
    return stream(seed, "rows", round, client).permutation(count)
