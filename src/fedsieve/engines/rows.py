"""The rows of simulated clients: one matrix for all of them, a part for each, and the deck they deal batches from."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.streams import stream
from fedsieve.core.types import Batch, Clock, Objective, SparseRows


class Rows:
    """All clients' rows, client after client: a tensor, or a CSR matrix of which no batch is ever made dense at full width."""

    def __init__(
        self, x: Tensor | SparseRows, y: Tensor, counts: Sequence[int] | np.ndarray, objective: Objective, batch_rows: int | None
    ) -> None:
        self.x = x
        self.y = y
        self.counts = np.asarray(counts, dtype=np.int64)
        self.offsets = np.concatenate(([0], np.cumsum(self.counts)))
        self._objective = objective
        self._batch_rows = batch_rows
        self._smoothness: dict[int, Tensor] = {}

    @property
    def sparse(self) -> bool:
        """Whether rows are held as CSR."""
        return not isinstance(self.x, Tensor)

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return int(np.prod(self.x.shape[1:]))

    def examples(self, client: int) -> int:
        """n_k."""
        return int(self.counts[client])

    def take(self, clients: Sequence[int], hands: Sequence[np.ndarray]) -> Batch:
        """The dealt rows of a stack of clients, (k, b, ...); `index_select` is several times faster than advanced indexing."""
        order = np.concatenate([hand + self.offsets[client] for hand, client in zip(hands, clients, strict=True)])
        picked = torch.from_numpy(order).to(self.y.device)
        shape = (len(clients), len(hands[0]))
        x = self.x.index_select(0, picked).view(*shape, *self.x.shape[1:])
        return Batch(x, self.y.index_select(0, picked).view(*shape, *self.y.shape[1:]))

    def take_touched(self, client: int, hand: np.ndarray, also: np.ndarray | None = None) -> tuple[np.ndarray, Batch]:
        """The features present in some rows of one client (and those in `also`), and the rows over these features only, (1, b, t)."""
        rows = self.x[hand + self.offsets[client]]
        touched, columns = np.unique(rows.indices, return_inverse=True)
        if also is not None:
            wider = np.union1d(touched, also)
            columns, touched = np.searchsorted(wider, touched)[columns], wider
        dense = np.zeros((len(hand), len(touched)), dtype=rows.dtype)
        dense[np.repeat(np.arange(len(hand)), np.diff(rows.indptr)), columns] = rows.data
        y = self.y[torch.from_numpy(hand + self.offsets[client])]
        return touched, Batch(torch.from_numpy(dense).to(y.device)[None], y[None])

    def of(self, client: int) -> Batch:
        """One client's rows; of sparse ones, the columns it has."""
        if self.sparse:
            batch = self.take_touched(client, np.arange(self.examples(client)))[1]
            return Batch(batch.x[0], batch.y[0])
        part = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        return Batch(self.x[part], self.y[part])

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
        begin = (clock.exchange * steps + step) * size % count
        if begin + size <= count:
            return order[begin : begin + size]
        return order[np.arange(begin, begin + size) % count]

    return hand


@lru_cache(maxsize=4096)
def shuffled(seed: int, round: int, client: int, count: int) -> np.ndarray:
    """The order of one client's rows in one round."""
    return stream(seed, "rows", round, client).permutation(count)
