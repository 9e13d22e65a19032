"""Buffers of a model that training changes, such as the running statistics of BatchNorm: sent dense as float32 and averaged.

Messages contain the buffers that the receiver does not know: a broadcast those that differ from their initial values, a reply those that
differ from the broadcast. Constant buffers are never sent.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.aggregation import Aggregator, ClientWeighting, client_weights
from fedsieve.core.packets import Packet
from fedsieve.core.protocols import AggregationOptions, Algorithm, BufferedObjective, Objective
from fedsieve.core.random import server_sampler
from fedsieve.core.reply_validation import MAX_MAGNITUDE
from fedsieve.core.robust_aggregation import robust_aggregate
from fedsieve.core.types import ExchangeResult, Reply


def has_buffers(objective: Objective) -> TypeGuard[BufferedObjective]:
    """Return whether the model has buffers that training may change."""
    return isinstance(objective, BufferedObjective) and bool(objective.buffer_slices)


def num_buffer_values(objective: Objective) -> int:
    """Return b, the number of values of all buffers."""
    return sum(part.stop - part.start for part, _ in objective.buffer_slices.values()) if has_buffers(objective) else 0


def initial_buffers(objective: BufferedObjective, seed: int) -> Float[Tensor, " b"]:
    """Return the buffers before the first round, which every client can compute from the seed or from its module."""
    return objective.initial_buffers(server_sampler(seed, 0, 0, torch.float32, "cpu")).cpu()


def find_changes(objective: BufferedObjective, values: Float[Tensor, "*k b"], known: Float[Tensor, " b"]) -> dict[int, Tensor]:
    """Return the values of the buffers that differ from the known ones in any of the vectors, by number."""
    changes = {}
    for number, part in enumerate(_slices(objective)):
        if not torch.equal(values[..., part], known[part].expand_as(values[..., part])):
            changes[number] = values[..., part]
    return changes


def apply_changes(objective: BufferedObjective, known: Float[Tensor, " b"], changes: Mapping[int, Tensor]) -> Float[Tensor, " b"]:
    """Return the known values with the changed buffers replaced."""
    values, slices = known.clone(), _slices(objective)
    for number, changed in changes.items():
        values[slices[number]] = changed
    return values


def _slices(objective: BufferedObjective) -> list[slice]:
    first = objective.layout.size
    return [slice(part.start - first, part.stop - first) for part, _ in objective.buffer_slices.values()]


class BufferState(NamedTuple):
    """The buffers of a model between two exchanges."""

    objective: BufferedObjective
    initial: Tensor
    """(b,) float32: what every client knows before the first message"""
    values: Tensor
    """(b,) float32"""

    def attach(self, packet: Packet) -> Packet:
        """Return the broadcast with the buffers that differ from their initial values."""
        return packet._replace(buffers=find_changes(self.objective, self.values, self.initial))

    def receive(self, packet: Packet) -> "BufferState":
        """Return the buffers of a client after this broadcast."""
        return self._replace(values=apply_changes(self.objective, self.initial, packet.buffers))

    def make_stack(self, num_clients: int) -> list[dict[str, Tensor]]:
        """Return the buffers of a stack of clients that start from these values."""
        return [self.objective.make_buffers(self.values) for _ in range(num_clients)]

    def stack_changes(self, buffers: Sequence[dict[str, Tensor]]) -> dict[int, Tensor]:
        """Return the buffers of a stack of clients that differ from these values at any of them."""
        return find_changes(self.objective, torch.stack([self.objective.buffer_values(each).cpu() for each in buffers]), self.values)

    def validate(self, result: ExchangeResult) -> ExchangeResult:
        """Reject replies whose buffers do not fit the model."""
        errors = {reply.client: error for reply in result.replies if (error := self._find_error(reply)) is not None}
        if not errors:
            return result
        replies = [reply for reply in result.replies if reply.client not in errors]
        return result._replace(replies=replies, rejected=[*result.rejected, *errors.items()])

    def _find_error(self, reply: Reply) -> str | None:
        slices, names = _slices(self.objective), list(self.objective.buffer_slices)
        for number, values in reply.packet.buffers.items():
            if number >= len(slices) or len(values) != slices[number].stop - slices[number].start:
                return f"its buffer {number} does not fit the model"
            if not bool((values.abs() <= MAX_MAGNITUDE).all()):
                return f"its buffer {names[number]} is not finite, or above {MAX_MAGNITUDE:g}"
            if names[number].endswith("running_var") and bool((values < 0).any()):
                return f"its buffer {names[number]} is a negative variance"
        return None

    def aggregate(self, algorithm: Algorithm, replies: Sequence[Reply]) -> "BufferState":
        """Return the state after the replies: averaged by examples, or by the aggregator of the algorithm."""
        if not replies:
            return self
        rows = torch.stack([apply_changes(self.objective, self.values, reply.packet.buffers) for reply in replies])
        weights = client_weights(tuple(reply.num_examples for reply in replies), ClientWeighting.EXAMPLES, rows.dtype, rows.device)
        if not isinstance(algorithm, AggregationOptions) or algorithm.aggregator is Aggregator.WEIGHTED:
            return self._replace(values=self.objective.average_buffers(rows, weights))
        update = robust_aggregate({"buffers": rows - self.values}, weights, algorithm.aggregator, algorithm.max_malicious_fraction)
        return self._replace(values=self.values + update["buffers"])


def append_buffers(parameters: Float[Tensor, " p"], buffers: Float[Tensor, " b"] | None) -> Float[Tensor, " _n"]:
    """Return the vector (p + b,) from which a model predicts: the parameters, and the buffers if there are any."""
    return parameters if buffers is None else torch.cat((parameters, buffers.to(parameters)))


def buffer_state(objective: Objective, seed: int, values: Tensor | None = None) -> BufferState | None:
    """Return the state with these values (default: the initial ones), or None for a model without buffers."""
    if not has_buffers(objective):
        return None
    initial = initial_buffers(objective, seed)
    return BufferState(objective, initial, initial if values is None else values)
