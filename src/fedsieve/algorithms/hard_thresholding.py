"""Hard thresholding H_m, which keeps the m largest weights: Fed-HT, FedIter-HT and FedRound-HT.

Fed-HT and FedIter-HT are of Tong et al. 2022, arXiv 2101.00052; FedRound-HT thresholds once a round on both sides, our variant.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.fed_avg import Server, average_weights
from fedsieve.core import budgets, topk
from fedsieve.core.optimizers import initial_moments
from fedsieve.core.packets import Packet, SparseVector, dense_packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.random import Draw
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Client(NamedTuple):
    """The weights of a stack of clients, and the support of the broadcast."""

    theta: Tensor
    mask: Tensor
    """1 at the entries of the broadcast, 0 elsewhere"""
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Thresholding(BaseAlgorithm, ABC):
    """The server sends thresholded weights, by default H_m(theta), and averages the replies."""

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights, without thresholding."""
        return Server(weights, initial_moments(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send H_m(theta)."""
        return self.encode_top(server.theta, server.layout, clock, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        return Client(packet.field_dense("theta", dtype), packet.support_mask(dtype), layout)

    def encode_top(self, theta: Float[Tensor, "*k p"], layout: Layout, clock: Clock, draw: Draw) -> Packet:
        """Return a message with H_m(theta), the largest weights of the round's budget."""
        mask = topk.top_mask(theta.abs(), self.message_budget(layout, clock), layout.groups)
        return sparse_packet(topk.mask_to_indices(mask), {"theta": theta}, self.bits, draw)

    def local_sgd(self, objective: Objective, client: Client, batch: Batch, clock: Clock) -> Float[Tensor, "k p"]:
        """Return theta - eta g."""
        gradient, step_size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return client.theta - step_size * gradient

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Step from the broadcast towards the mean of the replies."""
        return average_weights(self, server, packet, replies, clock, draw)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return all weights."""
        return server.theta

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The weights."""
        return frozenset({"theta"})

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change."""
        return EngineSupport(vector_fields=("theta", "mask"), replies_have_equal_length=self.replies_have_equal_length)


@dataclass(frozen=True, kw_only=True)
class FedHT(Thresholding):
    """Thresholding at the server only: sparse downlink, dense uplink (decision D4)."""

    learning_rate: float = 1.5
    density_schedule: DensitySchedule = DensitySchedule.CUBIC
    anneal_end: float = 0.8
    batch_size: int | Literal["all"] = 64

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        return client._replace(theta=self.local_sgd(objective, client, batch, clock))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send all weights."""
        return dense_packet({"theta": client.theta}, self.bits, draw)


@dataclass(frozen=True, kw_only=True)
class FedIterHT(Thresholding):
    """Thresholding after every local step and after averaging (requirement 37)."""

    learning_rate: float = 1.5
    density_schedule: DensitySchedule = DensitySchedule.CUBIC
    anneal_end: float = 0.8
    batch_size: int | Literal["all"] = 64

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- H_m(theta - eta g). With sparse examples only some features are present; all other weights are zero."""
        theta, layout = self.local_sgd(objective, client, batch, clock), objective.layout
        budget = self.message_budget(client.layout, clock)
        if layout.size != client.layout.size:
            budget = budgets.restrict_budget(budget, layout.num_gated, layout.num_ungated)
        kept = topk.top_mask(theta.abs(), budget, layout.groups)
        return client._replace(theta=torch.where(kept, theta, torch.zeros_like(theta)))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the m weights that are left."""
        return self.encode_top(client.theta, client.layout, clock, draw)

    def decode_sparse(self, packet: Packet, dtype: torch.dtype) -> dict[str, SparseVector]:
        """Return the fields with default 0: a weight that a client dropped is zero, not unchanged."""
        vectors = super().decode_sparse(packet, dtype)
        return {name: vector._replace(default=torch.zeros_like(vector.values[..., 0])) for name, vector in vectors.items()}

    @property
    def engine_support(self) -> EngineSupport:
        """H_m compares all nonzero weights."""
        return replace(super().engine_support, projected_field="theta")


@dataclass(frozen=True, kw_only=True)
class FedRoundHT(Thresholding):
    """Thresholding once per round on both sides, with the server's residual kept (decision D4)."""

    learning_rate: float = 1.5
    density_schedule: DensitySchedule = DensitySchedule.CUBIC
    anneal_end: float = 0.8
    residual_decay: float = 0.9

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        return client._replace(theta=self.local_sgd(objective, client, batch, clock))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send H_m(theta)."""
        return self.encode_top(client.theta, client.layout, clock, draw)
