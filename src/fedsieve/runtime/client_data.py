"""The rows of simulated clients: one matrix for all of them, a part for each, and the deck they deal batches from."""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.batches import IndexedRows, SparseBatch
from fedsieve.core.random import generator
from fedsieve.core.types import Batch, CsrMatrix, Objective


class ClientData:
    """All clients' rows, client after client: a tensor, or a CSR matrix of which no batch is ever made dense at full width."""

    def __init__(
        self, x: Tensor | CsrMatrix, y: Tensor, counts: Sequence[int] | np.ndarray, objective: Objective, batch_rows: int | None
    ) -> None:
        self.x = x
        self.y = y
        self.counts = np.asarray(counts, dtype=np.int64)
        self.offsets = np.concatenate(([0], np.cumsum(self.counts)))
        self._objective = objective
        self._batch_rows = batch_rows
        self._smoothness: dict[int, Tensor] = {}
        self._dealt: tuple[tuple[int, ...], dict[tuple[int, ...], list[tuple[Tensor, Tensor]]]] = ((), {})

    @property
    def is_sparse(self) -> bool:
        """Whether rows are held as CSR."""
        return not isinstance(self.x, Tensor)

    @property
    def num_features(self) -> int:
        """Numbers in a row."""
        return prod(self.x.shape[1:])

    def num_examples(self, client: int) -> int:
        """n_k."""
        return int(self.counts[client])

    def epoch_batches(self, seed: int, round: int, client: int, hands: int) -> np.ndarray:
        """The rows of one client for a round, (hands, b)."""
        return shuffle_into_batches(seed, round, client, self.num_examples(client), self._batch_rows, hands)

    def batch_indices(self, seed: int, round: int, clients: Sequence[int], hands: int) -> Tensor:
        """Where the rows of a stack of clients stand, (hands, k, b)."""
        dealt = np.concatenate([self.epoch_batches(seed, round, client, hands) for client in clients], axis=1)
        dealt = dealt.reshape(hands, len(clients), -1) + self.offsets[clients][:, None]
        return torch.from_numpy(dealt).to(self.y.device)

    def batches(self, seed: int, round: int, clients: Sequence[int], hands: int, played: slice) -> Iterator[Batch]:
        """The rows of a stack of clients, (k, b, ...), in some of a round's hands, left where they are if the model can read them there.

        Where they stand, and their labels, are kept while the round lasts.
        """
        if self._dealt[0] != (turn := (seed, round, hands)):
            self._dealt = (turn, {})
        known, stack = self._dealt[1], tuple(clients)
        suits = self._objective.supports_indexed_rows and self.x.ndim == 2
        if stack not in known:
            places = self.batch_indices(seed, round, clients, hands)
            labels = _gather(self.y, places)
            known[stack] = list(zip(places, labels.to(self.x.dtype) if suits else labels, strict=True))
        for at, y in known[stack][played]:
            yield Batch(IndexedRows(self.x, at) if suits else _gather(self.x, at), y)

    def sparse_batches(self, client: int, hands: np.ndarray, also: np.ndarray | None = None) -> "SparseRoundData":
        """The sparse rows of one client for several batches, cut out at once, and their features (with those in `also`)."""
        order = hands.reshape(-1) + self.offsets[client]
        return SparseRoundData(self.x[order], self.y[torch.from_numpy(order)], hands.shape[1], also)

    def client(self, client: int) -> Batch:
        """One client's rows; of sparse ones, the columns it has."""
        if self.is_sparse:
            batch = self.sparse_batches(client, np.arange(self.num_examples(client))[None]).batch(0)[1]
            return Batch(batch.x.dense[0].to(batch.y.device), batch.y[0])
        part = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        return Batch(self.x[part], self.y[part])

    def smoothness(self, clients: Sequence[int]) -> Tensor:
        """L of each client's mini-batch loss, computed once a client."""
        for client in clients:
            if client not in self._smoothness:
                rows = self.client(client)
                self._smoothness[client] = self._objective.smoothness(rows, self._batch_rows or len(rows.x))
        return torch.stack([self._smoothness[client] for client in clients])


def _gather(rows: Tensor, places: Tensor) -> Tensor:
    """`index_select` is several times faster than advanced indexing."""
    return rows.index_select(0, places.view(-1)).view(*places.shape, *rows.shape[1:])


class SparseRoundData:
    """Sparse rows of several batches, one batch after another."""

    def __init__(self, rows: CsrMatrix, y: Tensor, size: int, also: np.ndarray | None) -> None:
        self.rows = rows
        self.y = y
        self.size = size
        self.features, self.columns = compact_indices(rows.indices, rows.shape[1], also)
        """the features of all batches, increasing, and the place of each cell's feature among them"""

    def batch(self, step: int, also: np.ndarray | None = None) -> tuple[np.ndarray, Batch]:
        """The places of the features present in a batch (and of those in `also`), and its rows over these."""
        begin, end = step * self.size, (step + 1) * self.size
        starts = self.rows.indptr[begin : end + 1]
        cells = slice(starts[0], starts[-1])
        at, columns = compact_indices(self.columns[cells], len(self.features), also)
        return at, Batch(SparseBatch(starts, columns, self.rows.data[cells], len(at), type(self.rows)), self.y[begin:end][None])


def compact_indices(numbers: np.ndarray, size: int, also: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Which of the numbers below `size` occur (or are in `also`), and the place of each among those; much faster than sorting."""
    present = np.zeros(size, dtype=bool)
    present[numbers] = True
    if also is not None:
        present[also] = True
    found, place = np.flatnonzero(present), np.empty(size, dtype=np.int32)
    place[found] = np.arange(len(found), dtype=np.int32)
    return found, place[numbers]


def shuffle_into_batches(seed: int, round: int, client: int, count: int, size: int | None, hands: int) -> np.ndarray:
    """A client's rows shuffled once a round and dealt in hands of one size, (hands, size), the deck starting over when it is used up.

    Rows repeat within a hand only where the client has fewer (decision D2).
    """
    if size is None:
        return np.tile(np.arange(count), (hands, 1))
    order, dealt = generator(seed, "rows", round, client).permutation(count), hands * size
    return (order[:dealt] if dealt <= count else order[np.arange(dealt) % count]).reshape(hands, size)
