"""The examples of simulated clients: one matrix with the examples of all clients, and their mini-batches."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.batches import BatchSampling, IndexedRows, SparseBatch, gather
from fedsieve.core.optimizers import StepRule
from fedsieve.core.protocols import Objective, Workload
from fedsieve.core.random import generator
from fedsieve.core.types import Batch, Clock, CsrMatrix

MAX_REPETITIONS = 16
"""The largest number of examples that represent n weighted ones, relative to n."""


class ClientData:
    """The examples of all clients, client after client: a tensor, or a CSR matrix that is never made dense at full width."""

    def __init__(
        self,
        x: Tensor | CsrMatrix,
        y: Tensor,
        counts: Sequence[int] | np.ndarray,
        objective: Objective,
        batch_size: int | None,
        batch_sampling: BatchSampling = BatchSampling.SHUFFLED,
        sample_weights: Float[np.ndarray, " n"] | None = None,
    ) -> None:
        if sample_weights is not None and batch_size is None:
            raise ValueError("weights of examples need mini-batches, in which heavy examples occur more often; set batch_size to a number")
        self.x = x
        self.y = y
        self.is_sparse = not isinstance(x, Tensor)
        self.num_features = prod(x.shape[1:])
        """number of values of an example"""
        self.num_examples = [int(count) for count in counts]
        """n_k of every client"""
        self.offsets = np.concatenate(([0], np.cumsum(self.num_examples)))
        self._objective = objective
        self._batch_size = batch_size
        self._batch_sampling = batch_sampling
        self._sample_weights = sample_weights
        """how often an example is drawn, relative to the others; None: all equally often"""
        self._smoothness: dict[int, float] = {}
        self._round_batches: tuple[tuple[int, ...], dict[tuple[int, ...], list[tuple[Tensor, Tensor]]]] = ((), {})
        """the key of the last round, and the indices and labels of its batches by stack of clients"""

    def as_whole_batches(self) -> "ClientData":
        """Return the same examples with one batch per client, of all its examples; heavy ones occur more often."""
        if self._sample_weights is None:
            return ClientData(self.x, self.y, self.num_examples, self._objective, None)
        order, counts = repeat_by_weight(self._sample_weights, self.num_examples)
        x = self.x[torch.from_numpy(order)] if isinstance(self.x, Tensor) else self.x[order]
        return ClientData(x, self.y[torch.from_numpy(order)], counts, self._objective, None)

    def flip_labels(self, clients: Iterable[int]) -> "ClientData":
        """Return the same examples; those of some clients have wrong targets: reflected at the middle of all targets, as c to C - 1 - c."""
        y, low, high = self.y.clone(), self.y.min(), self.y.max()
        for client in clients:
            own = slice(self.offsets[client], self.offsets[client + 1])
            y[own] = low + high - y[own]
        return ClientData(self.x, y, self.num_examples, self._objective, self._batch_size, self._batch_sampling, self._sample_weights)

    @cached_property
    def claimed_examples(self) -> list[float]:
        """What each client counts in the mean: n_k, or the sum of its weights in units of the smallest such sum."""
        if self._sample_weights is None:
            return list(self.num_examples)
        counts = np.asarray(self.num_examples)
        totals = np.bincount(np.repeat(np.arange(len(counts)), counts), self._sample_weights, len(counts))
        return (totals / totals[counts > 0].min()).tolist()

    def epoch_batches(self, seed: int, round: int, client: int, num_batches: int) -> np.ndarray:
        """Return the examples of one client in the batches of a round, (num_batches, b)."""
        if self._sample_weights is not None:
            weights = self._sample_weights[self.offsets[client] : self.offsets[client + 1]]
            return draw_weighted_batches(seed, round, client, weights, self._batch_size or len(weights), num_batches)
        draw = draw_batches if self._batch_sampling is BatchSampling.INDEPENDENT else shuffle_into_batches
        return draw(seed, round, client, self.num_examples[client], self._batch_size, num_batches)

    def batches(self, seed: int, clock: Clock, clients: Sequence[int], workload: Workload) -> Iterator[Batch]:
        """Yield the batches of a stack of clients in one exchange, (k, b, ...).

        Examples are not copied if the objective can read them by index. Indices and labels are kept until the round changes.
        """
        num_batches, first = workload.exchanges * workload.local_steps, clock.exchange * workload.local_steps
        if self._round_batches[0] != (key := (seed, clock.round, num_batches)):
            self._round_batches = (key, {})
        by_stack, stack, x = self._round_batches[1], tuple(clients), self.x
        assert isinstance(x, Tensor)
        indexed = self._objective.supports_indexed_rows and x.ndim == 2
        if stack not in by_stack:
            batches = np.concatenate([self.epoch_batches(seed, clock.round, client, num_batches) for client in clients], axis=1)
            indices = batches.reshape(num_batches, len(clients), -1) + self.offsets[clients][:, None]
            indices = torch.from_numpy(indices).to(self.y.device)
            labels = gather(self.y, indices)
            by_stack[stack] = list(zip(indices, labels.to(x.dtype) if indexed else labels, strict=True))
        for indices, y in by_stack[stack][first : first + workload.local_steps]:
            yield Batch(IndexedRows(x, indices) if indexed else gather(x, indices), y)

    def sparse_batches(self, client: int, batches: np.ndarray, extra_features: np.ndarray | None = None) -> "SparseRoundData":
        """Return the sparse examples of several batches of one client, over their features and `extra_features`."""
        assert not isinstance(self.x, Tensor)
        order = batches.reshape(-1) + self.offsets[client]
        return SparseRoundData(self.x[order], self.y[torch.from_numpy(order)], batches.shape[1], extra_features)

    def client(self, client: int) -> Batch:
        """Return all examples of one client; sparse examples over the features that the client has."""
        if isinstance(self.x, Tensor):
            part = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
            return Batch(self.x[part], self.y[part])
        return self.sparse_batches(client, np.arange(self.num_examples[client])[None]).batch(0)[1]

    def smoothness(self, clients: Sequence[int], step_rule: StepRule, dtype: torch.dtype) -> Tensor | None:
        """Return L of each client's mini-batch loss, computed once per client, or None if the step rule does not need it.

        Polyak's rule assumes a minimal loss of 0. It needs no limit, so L counts as 0, for clients with at most as many examples as
        features: a linear model can fit these exactly.
        """
        if step_rule is StepRule.CONSTANT:
            return None
        for client in clients:
            if client not in self._smoothness:
                num_examples = self.num_examples[client]
                fits_exactly = step_rule is StepRule.POLYAK and num_examples <= self.num_features
                batch_size = self._batch_size or num_examples
                smoothness = 0.0 if fits_exactly else float(self._objective.smoothness(self.client(client), batch_size))
                self._smoothness[client] = smoothness
        return torch.tensor([self._smoothness[client] for client in clients], dtype=dtype, device=self.y.device)


class SparseRoundData:
    """The sparse examples of several batches of one client, batch after batch."""

    def __init__(self, x: CsrMatrix, y: Tensor, batch_size: int, extra_features: np.ndarray | None) -> None:
        self.x = x
        self.y = y
        self.batch_size = batch_size
        self.features, self.columns = compact_indices(x.indices, x.shape[1], extra_features)
        """the features of all batches, increasing, and for each stored value the index of its feature among them"""

    def batch(self, step: int, extra_features: np.ndarray | None = None) -> tuple[np.ndarray, Batch]:
        """Return the indices of the features in a batch (and of `extra_features`), and the batch over these."""
        begin, end = step * self.batch_size, (step + 1) * self.batch_size
        starts = self.x.indptr[begin : end + 1]
        cells = slice(starts[0], starts[-1])
        features, columns = compact_indices(self.columns[cells], len(self.features), extra_features)
        batch = SparseBatch(starts, columns, self.x.data[cells], len(features), type(self.x))
        return features, Batch(batch, self.y[begin:end][None])


def compact_indices(indices: np.ndarray, size: int, extra: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return which numbers below `size` occur (or are in `extra`), and the rank of each index among them; faster than sorting."""
    present = np.zeros(size, dtype=bool)
    present[indices] = True
    if extra is not None:
        present[extra] = True
    occurring, rank = np.flatnonzero(present), np.empty(size, dtype=np.int32)
    rank[occurring] = np.arange(len(occurring), dtype=np.int32)
    return occurring, rank[indices]


def shuffle_into_batches(seed: int, round: int, client: int, num_examples: int, batch_size: int | None, num_batches: int) -> np.ndarray:
    """Return the batches of a client in a round, (num_batches, batch_size).

    Examples are shuffled once per round and used in this order, repeatedly if needed. A batch contains an example twice only if the
    client has fewer examples (decision D2).
    """
    if batch_size is None:
        return np.tile(np.arange(num_examples), (num_batches, 1))
    order, total = generator(seed, "rows", round, client).permutation(num_examples), num_batches * batch_size
    return (order[:total] if total <= num_examples else order[np.arange(total) % num_examples]).reshape(num_batches, batch_size)


def draw_batches(seed: int, round: int, client: int, num_examples: int, batch_size: int | None, num_batches: int) -> np.ndarray:
    """Return independent batches of a client in a round, (num_batches, batch_size): each is a random subset of all examples (L161).

    An example is drawn twice into a batch only if the client has fewer examples than a batch.
    """
    if batch_size is None:
        return np.tile(np.arange(num_examples), (num_batches, 1))
    rng = generator(seed, "rows", round, client)
    return np.stack([rng.choice(num_examples, batch_size, replace=num_examples < batch_size) for _ in range(num_batches)])


def repeat_by_weight(weights: Float[np.ndarray, " n"], counts: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """Return examples in proportion to their weights, client after client, and their number at each client.

    Examples of the smallest weight occur once, unless the others would then be more than `MAX_REPETITIONS` n: systematic sampling.
    """
    unit = max(weights.min(), weights.sum() / (MAX_REPETITIONS * len(weights)))
    parts, first = [], 0
    for count in counts:
        part = np.cumsum(weights[first : first + count])
        num_drawn = max(round(part[-1] / unit), 1) if count else 0
        points = (np.arange(num_drawn) + 0.5) * (part[-1] / num_drawn) if count else np.zeros(0)
        parts.append(first + np.searchsorted(part, points, side="right"))
        first += count
    return np.concatenate(parts), [len(part) for part in parts]


def draw_weighted_batches(
    seed: int, round: int, client: int, weights: Float[np.ndarray, " n"], batch_size: int, num_batches: int
) -> np.ndarray:
    """Return the batches of a client in a round, (num_batches, batch_size): an example occurs in proportion to its weight, up to one.

    Systematic sampling: the examples at equidistant points of the cumulated weights, in random order.
    """
    rng, total, cumulated = generator(seed, "rows", round, client), num_batches * batch_size, np.cumsum(weights)
    points = (np.arange(total) + rng.random()) * (cumulated[-1] / total)
    drawn = np.searchsorted(cumulated, points, side="right").clip(max=len(weights) - 1)
    return rng.permutation(drawn).reshape(num_batches, batch_size)
