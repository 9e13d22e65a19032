"""SSFL (Ohib et al. 2024, arXiv 2405.09037): one round scores all weights, then FedAvg trains the m most salient ones.

1. In the first round the server sends the initial weights w to all clients. Each sends p saliencies |w g|, with the mean gradient g of
   its mini-batches at w; no weight is trained.
2. The server averages the saliencies, and keeps the m largest as the mask of the whole run.
3. From then on the broadcast has the weights under the mask, clients train only these, and replies have their values without positions.

The initial weights of a linear model are noise around the zero model, where w g is zero, so that |w g| would select by that noise. The
default for linear models is |g|, the change of the loss per change of a weight; networks have the |w g| of the paper (`saliency`).

The p numbers of all clients can be more bytes than all later rounds; `scoring_clients` cohort asks only the first cohort. The saliencies of
clients are weighted as their weights are in later rounds; the paper weights them equally.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.algorithms import fed_avg
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.common_options import DENSITY_SCHEDULE_OPTIONS
from fedsieve.core import topk
from fedsieve.core.optimizers import Moments, initial_moments
from fedsieve.core.packets import Packet, dense_packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective, Workload
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Saliency(StrEnum):
    """The score of a weight w with gradient g."""

    GRADIENT = "gradient"
    """|g|, which does not depend on the noise of the initial weights"""
    WEIGHT_TIMES_GRADIENT = "weight-times-gradient"
    """|w g|, the saliency of SNIP (Lee et al. 2019, arXiv 1810.02340) and of the paper"""


class Server(NamedTuple):
    """The state of FedAvg, and the saliencies, zero before the first round."""

    theta: Tensor
    moments: Moments
    saliency: Tensor
    layout: Layout


class Client(NamedTuple):
    """The weights of a stack of clients, the mask of the broadcast, and the sum of gradients in the first round."""

    theta: Tensor
    mask: Tensor
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class SSFL(BaseAlgorithm):
    """The mask is chosen once, from saliencies at the initial weights."""

    unsupported_options: ClassVar[frozenset[str]] = DENSITY_SCHEDULE_OPTIONS

    residual_decay: float = 1.0
    """fraction of the quantization error of a broadcast that the server keeps for the next round"""
    saliency: Saliency = Saliency.GRADIENT
    """score by which the weights are selected (networks: weight-times-gradient)"""
    scoring_clients: Literal["all", "cohort"] = "all"
    """clients that send saliencies in the first round (private runs: always a cohort, whose sampling the guarantee counts on)"""

    @property
    def workload(self) -> Workload:
        """All clients take part in the first round, or only a cohort."""
        return super().workload._replace(full_rounds=int(self.scoring_clients == "all" and self.privacy is None))

    def is_scoring(self, clock: Clock) -> bool:
        """Return whether this is the round of the saliencies."""
        return clock.round == 0

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights, without a mask."""
        return Server(weights, initial_moments(weights), torch.zeros_like(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send all weights in the first round, then those under the mask."""
        if self.is_scoring(clock):
            return dense_packet({"theta": server.theta}, self.bits, draw)
        return sparse_packet(topk.mask_to_indices(self.select_mask(server)), {"theta": server.theta}, self.bits, draw)

    def select_mask(self, server: Server) -> Bool[Tensor, " p"]:
        """Return the mask of the m most salient weights."""
        return topk.top_mask(server.saliency, self.final_budget(server.layout), server.layout.groups)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        theta = packet.field_dense("theta", dtype)
        return Client(theta, packet.support_mask(dtype), torch.zeros_like(theta))

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """Add up the gradients in the first round; then theta <- theta - eta g under the mask."""
        if self.is_scoring(clock):
            return client._replace(gradient=client.gradient + objective.gradient(client.theta, batch)[1])
        gradient, step_size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return client._replace(theta=client.theta - step_size * gradient * client.mask)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send all saliencies in the first round, then the weights under the mask."""
        if not self.is_scoring(clock):
            return sparse_packet(topk.mask_to_indices(client.mask > 0), {"theta": client.theta}, self.bits, draw)
        saliency = client.gradient.abs() / self.local_steps
        if self.saliency is Saliency.WEIGHT_TIMES_GRADIENT:
            saliency = saliency * client.theta.abs()
        return dense_packet({"saliency": saliency}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Add the mean saliencies in the first round, then average the weights."""
        if self.is_scoring(clock):
            saliency = self.aggregate_replies(packet, replies, server.saliency, clock, draw)["saliency"]
            return server._replace(saliency=server.saliency + saliency)
        averaged = fed_avg.Server(server.theta, server.moments, server.layout)
        averaged = fed_avg.average_weights(self, averaged, packet, replies, clock, draw)
        return server._replace(theta=averaged.theta, moments=averaged.moments)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return the weights under the mask."""
        return torch.where(self.select_mask(server), server.theta, torch.zeros_like(server.theta))

    def expected_reply_fields(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """Return the saliencies in the first round, then the weights."""
        return frozenset({"saliency" if self.is_scoring(clock) else "theta"})

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The saliencies and the weights."""
        return frozenset({"saliency", "theta"})

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """Return the mask, which every client has from the broadcast."""
        return packet.support

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change."""
        return EngineSupport(vector_fields=("theta", "mask", "gradient"), replies_have_equal_length=self.replies_have_equal_length)
