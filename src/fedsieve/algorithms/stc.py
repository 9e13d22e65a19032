"""STC, sparse ternary compression (Sattler et al. 2019, arXiv 1903.02891): top-k signs with one magnitude, up and down.

1. A client sends the ternary top k of v = (theta_local - model) + A: the signs of its k largest entries and their mean magnitude. It
   keeps A <- v - sent until its next round.
2. The server does the same with V = R + mean: U is the ternary top k of V, R <- V - U, and the model becomes W + U.
3. A client keeps the model it received. In its next round it receives what it missed: the list of all U since then, their sum with
   `bits` per value, or the whole model, whichever is shortest.

The top k is taken over all weights, not layer by layer. The model is dense; the trained model has its m largest weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.common_options import DENSITY_SCHEDULE_OPTIONS
from fedsieve.algorithms.option_rules import require_fraction, require_positive
from fedsieve.core import budgets, topk
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.packets import Packet, dense_packet, sparse_packet
from fedsieve.core.protocols import CatchUp, EngineSupport, MemorySupport, Objective
from fedsieve.core.quantization import Coding, QuantizedField, quantize_signs
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Updates(NamedTuple):
    """All updates U of the server so far, and the round of each."""

    rounds: Tensor
    indices: Tensor
    signs: Tensor
    magnitudes: Tensor

    def packet(self, size: int) -> Packet:
        """The updates as a list of ternary vectors."""
        return Packet(size, self.indices, {"update": QuantizedField(self.signs, self.magnitudes, Coding.SIGNS)}, {})

    def since(self, round: int) -> "Updates":
        """The updates of a round and later."""
        first = int((self.rounds < round).sum())
        return Updates(*(part[first:] for part in self))

    def append(self, round: int, packet: Packet) -> "Updates":
        """The updates and one more."""
        update = packet.fields["update"]
        assert packet.support is not None
        assert update.scale is not None
        last = (torch.tensor(round), packet.support, update.codes, update.scale)
        return Updates(*(torch.cat((part, one[None].to(part.device))) for part, one in zip(self, last, strict=True)))


class Server(NamedTuple):
    """The model W, the residual R, and the updates that clients may have missed."""

    theta: Tensor
    residual: Tensor
    updates: Updates
    layout: Layout


class Client(NamedTuple):
    """A stack of clients: weights, residuals, and the model from which they started."""

    theta: Tensor
    residual: Tensor
    model: Tensor


@dataclass(frozen=True, kw_only=True)
class STC(BaseAlgorithm):
    """Ternary top-k messages with residuals at the clients and at the server."""

    unsupported_options: ClassVar[frozenset[str]] = DENSITY_SCHEDULE_OPTIONS | {"server_optimizer", "server_momentum", "residual_decay"}

    client_weighting: ClientWeighting = field(default=ClientWeighting.UNIFORM, metadata={"section": "federation"})
    batch_size: int | Literal["all"] = 64
    uplink_density: float | None = None
    """fraction of the weights in a reply (default: the density of the model)"""
    downlink_density: float | None = None
    """fraction of the weights in an update of the server (default: a fifth of the density of the model)"""
    server_learning_rate: float = 1.0
    """factor of the mean reply"""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        require_positive(uplink_density=self.reply_density, downlink_density=self.update_density)
        require_fraction(uplink_density=self.reply_density, downlink_density=self.update_density)

    @property
    def reply_density(self) -> float:
        """The fraction of the weights in a reply."""
        return self.density if self.uplink_density is None else self.uplink_density

    @property
    def update_density(self) -> float:
        """The fraction of the weights in an update of the server. A client receives many of them at once, so they are shorter."""
        return self.density / 5 if self.downlink_density is None else self.downlink_density

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights, without a residual and without updates."""
        count = num_entries(self.update_density, layout.size)
        integers, signs = weights.new_empty(0, dtype=torch.int64), weights.new_empty((0, count), dtype=torch.int8)
        updates = Updates(integers, integers.new_empty((0, count)), signs, weights.new_empty(0, dtype=torch.float32))
        return Server(weights, torch.zeros_like(weights), updates, layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the whole model, to clients that have no earlier one."""
        return dense_packet({"theta": server.theta}, 32, draw)

    def missed_updates(self, server: Server, first_round: int, draw: Draw) -> list[Packet]:
        """Return the updates since a round: as a list of ternary vectors, and as their sum with `bits` per value."""
        missed = server.updates.since(first_round)
        packet = missed.packet(server.layout.size)
        total = add_updates(packet, torch.zeros_like(server.theta))
        changed = missed.indices.unique()
        return [packet, *([sparse_packet(changed, {"update": total}, self.bits, draw)] if len(changed) else [])]

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the model, without a residual."""
        theta = packet.field_dense("theta", dtype)
        return Client(theta, torch.zeros_like(theta), theta)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        gradient, step_size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return client._replace(theta=client.theta - step_size * gradient)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the ternary top k of v = theta - model + A."""
        return ternary_packet(client.theta - client.model + client.residual, self.reply_density)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """V <- R + rate * mean; U is its ternary top k; W <- W + U; R <- V - U."""
        mean = self.aggregate_replies(packet, replies, server.theta, clock, draw)["update"]
        total = server.residual + self.server_learning_rate * mean
        sent = ternary_packet(total, self.update_density)
        update = sent.field_dense("update", total.dtype)
        return Server(server.theta + update, total - update, server.updates.append(clock.round, sent), server.layout)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return the dense model."""
        return server.theta

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The update."""
        return frozenset({"update"})

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change; every client keeps its residual and the model it received."""
        catch_up = CatchUp("model", self.missed_updates, receive_updates)
        memory = MemorySupport(vectors=("residual",), after_reply=residual_after_reply, catch_up=catch_up)
        return EngineSupport(vector_fields=("theta",), replies_have_equal_length=lambda _: True, memory=memory)


def num_entries(density: float, size: int) -> int:
    """Return k, at least 1."""
    return max(1, budgets.floor_of_decimal(density, size))


def ternary_packet(vector: Float[Tensor, "*k p"], density: float) -> Packet:
    """Return the signs of the k largest entries, and their mean magnitude."""
    support: Int64[Tensor, "*k m"] = topk.mask_to_indices(topk.top_k_mask(vector.abs(), num_entries(density, vector.shape[-1])))
    return Packet(vector.shape[-1], support, {"update": quantize_signs(vector.gather(-1, support))}, {})


def residual_after_reply(client: Client, replies: Packet) -> dict[str, Float[Tensor, "k p"]]:
    """A <- v - sent."""
    dtype = client.theta.dtype
    return {"residual": client.theta - client.model + client.residual - replies.field_dense("update", dtype)}


def add_updates(packet: Packet, model: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """Return the model after the updates of a packet, a list or a sum, in their order."""
    values, support = packet.fields["update"].decode(model.dtype), packet.support
    if support is None:
        return model + values
    for indices, addend in zip(*((support, values) if support.ndim == 2 else (support[None], values[None])), strict=True):
        model = model.index_add(0, indices, addend)
    return model


def receive_updates(packet: Packet, model: Float[Tensor, " p"]) -> Packet:
    """Return the model after the updates of a packet as a broadcast."""
    return Packet(packet.size, None, {"theta": QuantizedField(add_updates(packet, model), None, Coding.FLOAT32)}, {})
