"""Fed-EF: compressed updates with error feedback at the clients (Li & Li 2023, arXiv 2211.14292).

1. A client adds what its earlier replies left out to its update, v = theta_local - sent + e, and sends C(v).
2. It keeps e <- v - C(v) until its next round. C is the top k of v, or the signs of all entries with their mean magnitude.
3. The server adds rate * mean C(v) to its weights. It sends the m largest of them, or all.

Prior work: error feedback for one-bit gradients (Seide et al. 2014); its theory (Karimireddy et al. 2019, arXiv 1901.09847). An m-sparse
broadcast is not part of Fed-EF; `downlink` dense is the published algorithm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.fed_avg import Server
from fedsieve.algorithms.option_rules import require_fraction, require_positive
from fedsieve.core import budgets, topk
from fedsieve.core.optimizers import initial_moments
from fedsieve.core.packets import Packet, dense_packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, MemorySupport, Objective
from fedsieve.core.quantization import quantize_signs
from fedsieve.core.random import Draw
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Compressor(StrEnum):
    """How a client compresses its update."""

    TOP_K = "top-k"
    """its largest entries, with `bits` per value"""
    SIGN = "sign"
    """the signs of all entries, and their mean magnitude"""


class Downlink(StrEnum):
    """Which weights a broadcast has."""

    SPARSE = "sparse"
    """the m largest"""
    DENSE = "dense"
    """all"""


class Client(NamedTuple):
    """A stack of clients: weights, residuals, and the broadcast from which all of them started."""

    theta: Tensor
    residual: Tensor
    packet: Packet
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class FedEF(BaseAlgorithm):
    """Top-k or sign compression with a residual at every client."""

    learning_rate: float = 1.5
    density_schedule: DensitySchedule = DensitySchedule.CUBIC
    anneal_end: float = 0.8
    compressor: Compressor = Compressor.TOP_K
    """what a client sends of its update: its largest entries, or the signs of all of them"""
    uplink_density: float | None = None
    """fraction of the weights in a top-k reply (default: the density of messages in this round)"""
    downlink: Downlink = Downlink.SPARSE
    """what the server sends: the m largest weights, or all of them"""
    residual_decay: float = 0.97
    """fraction of the weights left out of a broadcast that the server keeps for the next round"""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        if self.uplink_density is not None:
            require_positive(uplink_density=self.uplink_density)
            require_fraction(uplink_density=self.uplink_density)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights."""
        return Server(weights, initial_moments(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the m largest weights, or all."""
        if self.downlink is Downlink.DENSE:
            return dense_packet({"theta": server.theta}, self.bits, draw)
        mask = topk.top_mask(server.theta.abs(), self.message_budget(server.layout, clock), server.layout.groups)
        return sparse_packet(topk.mask_to_indices(mask), {"theta": server.theta}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast, without a residual."""
        theta = packet.field_dense("theta", dtype)
        return Client(theta, torch.zeros_like(theta), packet, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        gradient, step_size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return client._replace(theta=client.theta - step_size * gradient)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send C(v) of v = theta - sent + e."""
        return self.compress(corrected_update(client), client.layout, clock, draw)

    def compress(self, update: Float[Tensor, "k p"], layout: Layout, clock: Clock, draw: Draw) -> Packet:
        """Return C(update): its largest entries, or the signs of all."""
        if self.compressor is Compressor.SIGN:
            return Packet(layout.size, None, {"update": quantize_signs(update)}, {})
        density = self.message_density(clock) if self.uplink_density is None else self.uplink_density
        budget = self.allocate(layout, budgets.num_kept(density, layout.num_gated))
        mask = topk.top_mask(update.abs(), budget, layout.groups)
        return sparse_packet(topk.mask_to_indices(mask), {"update": update}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta <- sent + server step along the mean + residual_decay * (theta - sent)."""
        sent = packet.field_dense("theta", server.theta.dtype)
        mean = self.aggregate_replies(packet, replies, server.theta, clock, draw)["update"]
        theta, moments = self.server_update(server.moments, sent, sent + mean)
        return server._replace(theta=theta + self.residual_decay * (server.theta - sent), moments=moments)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return all weights."""
        return server.theta

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The update."""
        return frozenset({"update"})

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change; every client keeps its residual."""
        memory = MemorySupport(vectors=("residual",), after_reply=residual_after_reply)
        return EngineSupport(vector_fields=("theta",), replies_have_equal_length=self.replies_have_equal_length, memory=memory)


def corrected_update(client: Client) -> Float[Tensor, "k p"]:
    """v = theta - sent + e."""
    return client.theta - client.packet.field_dense("theta", client.theta.dtype) + client.residual


def residual_after_reply(client: Client, replies: Packet) -> dict[str, Float[Tensor, "k p"]]:
    """e <- v - C(v), with C(v) as the server decodes it."""
    return {"residual": corrected_update(client) - replies.field_dense("update", client.theta.dtype)}
