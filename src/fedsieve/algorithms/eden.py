"""EDEN (Vargaftik et al. 2022, arXiv 2108.08842): local SGD whose updates are sent with one or two bits per weight.

1. The server sends its weights. By default all of them, and the model is cut to m weights at the end; with `density_schedule` cubic the
   density of the broadcast falls to the target, as in the thresholding algorithms.
2. A client rotates its update at random, so that its coordinates are nearly normal; rounds each to the nearest of the 2 or 4 values that
   are best for a normal variate; and scales them so that the decoded update is unbiased (`quantize_normal`).
3. The server rotates each update back and adds their mean. It keeps the rounding error of its broadcast, and what the broadcast leaves out.

Each client has another rotation in each round, so that errors of different clients cancel. Its seed is four bytes of the reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core import topk
from fedsieve.core.optimizers import Moments, initial_moments
from fedsieve.core.packets import Packet, SparseVector, dense_packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.quantization import quantize_normal
from fedsieve.core.random import Draw
from fedsieve.core.rotation import rotate, rotate_back
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Server(NamedTuple):
    """All weights, and the state of the server's optimizer."""

    weights: Tensor
    moments: Moments
    layout: Layout


class Client(NamedTuple):
    """The weights of a stack of clients, and the broadcast from which all of them started."""

    weights: Tensor
    packet: Packet


@dataclass(frozen=True, kw_only=True)
class Eden(BaseAlgorithm):
    """Dense updates of one or two bits per weight, unbiased by a random rotation."""

    weight_fields: ClassVar[tuple[str, ...]] = ("weights",)
    unsupported_options: ClassVar[frozenset[str]] = frozenset({"warmup"})

    bits: Literal[32, 16, 8, 4] = 8
    """bits per value of broadcasts"""
    update_bits: Literal[1, 2] = 1
    """bits per value of replies"""
    density_schedule: DensitySchedule = DensitySchedule.CONSTANT
    """density of broadcasts: all weights, or a cubic decrease to the target"""
    initial_density: float | None = 1.0
    """density of broadcasts at the start of a cubic decrease"""
    residual_decay: float = 1.0
    """fraction of what the rounding of a broadcast changes, and of the weights left out of it, that the server keeps"""

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights."""
        return Server(weights, initial_moments(weights), layout)

    def message_density(self, clock: Clock) -> float:
        """Return the density of this round's broadcast: 1 without a schedule."""
        return 1.0 if self.density_schedule is DensitySchedule.CONSTANT else super().message_density(clock)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send all weights, or the largest ones of the round's budget."""
        if self.density_schedule is DensitySchedule.CONSTANT:
            return dense_packet({"weights": server.weights}, self.bits, draw)
        mask = topk.top_mask(server.weights.abs(), self.message_budget(server.layout, clock), server.layout.groups)
        return sparse_packet(topk.mask_to_indices(mask), {"weights": server.weights}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        return Client(packet.field_dense("weights", dtype), packet)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        gradient, step_size = self.gradient_and_step_size(objective, client.weights, batch, clock)
        return client._replace(weights=client.weights - step_size * gradient)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the rotated update with one or two bits per weight, and the seed of the rotation."""
        update = client.weights - client.packet.field_dense("weights", client.weights.dtype)
        seeds = draw("rotation", 1)[:, 0].to(torch.float32)
        field = quantize_normal(rotate(update, seeds), self.update_bits)
        return Packet(client.packet.size, None, {"update": field}, {"rotation": seeds})

    def decode_sparse(self, packet: Packet, dtype: torch.dtype) -> dict[str, SparseVector]:
        """Return the weights of a broadcast, or the updates of replies in the coordinates of the model."""
        if "rotation" not in packet.scalars:
            return super().decode_sparse(packet, dtype)
        rotated, seeds = packet.fields["update"].decode(dtype), packet.scalars["rotation"]
        update = rotate_back(rotated.reshape(-1, packet.size), seeds.reshape(-1))
        return {"update": SparseVector(update.reshape(rotated.shape))}

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta <- sent + server step along the mean update + residual_decay * (theta - sent)."""
        sent = packet.field_dense("weights", server.weights.dtype)
        update = self.aggregate_replies(packet, replies, server.weights, clock, draw)["update"]
        weights, moments = self.server_update(server.moments, sent, sent + update)
        return server._replace(weights=weights + self.residual_decay * (server.weights - sent), moments=moments)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return all weights."""
        return server.weights

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The rotated update and the seed of its rotation."""
        return frozenset({"update", "rotation"})

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change; all replies are dense."""
        return EngineSupport(vector_fields=("weights",), replies_have_equal_length=lambda _: True)
