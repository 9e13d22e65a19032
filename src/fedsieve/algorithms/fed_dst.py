"""FedDST (Bibikar et al. 2022, arXiv 2112.09824): a sparse model from the start, whose mask is readjusted every few rounds.

1. The mask starts at random with a budget for each layer (Erdos-Renyi-kernel for networks: Evci et al. 2020, arXiv 1911.11134); clients
   train only the weights under it.
2. Every `adjust_interval` rounds each client prunes a fraction r_t of its kept weights in each layer by magnitude, and regrows as many
   by the magnitude of the gradient; r_t decays along half a cosine to zero.
3. The server averages each weight over the clients that have it, and prunes each layer to its budget again.

A reply has positions only if its mask differs from the broadcast.

A regrown weight starts where the steps of this round along its gradient lead, but no larger than the kept weights of its layer usually are.
At zero, where the reference implementation leaves it, the server's pruning by magnitude would remove it first. The gradient is that of all
mini-batches of the round; the last one has more noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.common_options import DENSITY_SCHEDULE_OPTIONS
from fedsieve.algorithms.option_rules import require_at_least, require_fraction
from fedsieve.core import budgets, topk
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.optimizers import Moments, initial_moments
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply

MIN_SCORE = 1e-15
"""Score of a weight that may be selected but is zero, above those that may not; its square is a normal float."""


class Server(NamedTuple):
    """The weights, zero off the mask; the state of the server's optimizer; the mask."""

    theta: Tensor
    moments: Moments
    mask: Tensor
    layout: Layout


class Client(NamedTuple):
    """The weights of a stack of clients, the mask of the broadcast, and the sum of the steps along the whole gradient."""

    theta: Tensor
    mask: Tensor
    steps: Tensor
    """sum of eta g in a round that adjusts the mask, else zero"""
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class FedDST(BaseAlgorithm):
    """Clients prune by magnitude and regrow by gradient; the server keeps the budget of each layer."""

    unsupported_options: ClassVar[frozenset[str]] = DENSITY_SCHEDULE_OPTIONS

    learning_rate: float = 2.0
    residual_decay: float = 1.0
    """fraction of the quantization error of a broadcast that the server keeps for the next round"""
    adjust_fraction: float = 0.2
    """fraction of each layer's kept weights that a client prunes and regrows at first; it decays along half a cosine to zero"""
    adjust_interval: int = 2
    """number of rounds from one change of the mask to the next"""
    adjust_end: float = 0.8
    """fraction of the rounds after which the mask is fixed"""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        require_fraction(adjust_fraction=self.adjust_fraction, adjust_end=self.adjust_end)
        require_at_least(1, adjust_interval=self.adjust_interval)

    @property
    def milestones(self) -> dict[str, float]:
        """The end of the changes of the mask."""
        return {"mask is fixed": self.adjust_end}

    def current_adjust_fraction(self, clock: Clock) -> float:
        """Return r_t, or 0 in a round that does not adjust the mask."""
        end = self.adjust_end * clock.num_rounds
        if clock.round >= end or (clock.round + 1) % self.adjust_interval:
            return 0.0
        return self.adjust_fraction * (1 + cos(pi * clock.round / end)) / 2

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights under a random mask."""
        priority = budgets.broadcast_within_groups(draw("mask", layout.size), layout.groups)
        mask = topk.top_mask(priority, self.final_budget(layout), layout.groups)
        theta = torch.where(mask, weights, torch.zeros_like(weights))
        return Server(theta, initial_moments(theta), mask.to(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the weights under the mask."""
        return sparse_packet(topk.mask_to_indices(server.mask > 0), {"theta": server.theta}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        theta = packet.field_dense("theta", dtype)
        return Client(theta, packet.support_mask(dtype), torch.zeros_like(theta), layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g under the mask."""
        gradient, step_size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        step = step_size * gradient
        steps = client.steps + step if self.current_adjust_fraction(clock) else client.steps
        return client._replace(theta=client.theta - step * client.mask, steps=steps)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the weights under the mask, which is first adjusted in some rounds."""
        theta, mask = client.theta, client.mask > 0
        if fraction := self.current_adjust_fraction(clock):
            mask = self.adjust_mask(theta, client.steps, mask, client.layout, fraction)
            theta = torch.where(client.mask > 0, theta, self.regrown_weights(client))
        return sparse_packet(topk.mask_to_indices(mask), {"theta": theta}, self.bits, draw)

    def regrown_weights(self, client: Client) -> Float[Tensor, "k p"]:
        """Return where weights outside the mask start: where the steps lead, at most the root mean square of their layer's kept weights.

        The gradients of these steps do not see the weight move, so the sum may lead up to `local_steps` times too far.
        """
        starts = []
        for part, kept in self.final_budget(client.layout):
            limit = ((client.theta * client.mask)[..., part].square().sum(-1, keepdim=True) / max(kept, 1)).sqrt()
            starts.append((-client.steps[..., part]).minimum(limit).maximum(-limit))
        return torch.cat(starts, dim=-1)

    def adjust_mask(
        self, theta: Float[Tensor, "k p"], steps: Float[Tensor, "k p"], mask: Bool[Tensor, "k p"], layout: Layout, fraction: float
    ) -> Bool[Tensor, "k p"]:
        """Return the mask without the smallest weights of each layer, and with as many others, those with the largest gradients."""
        budget = self.final_budget(layout)
        num_changed = [min(int(fraction * kept), part.stop - part.start - kept) for part, kept in budget]
        left = tuple((part, kept - changed) for (part, kept), changed in zip(budget, num_changed, strict=True))
        kept_mask = topk.top_mask(selectable(theta, mask), left, layout.groups)
        room = tuple((part, kept - int(kept_mask[0, part].sum())) for part, kept in budget)
        return kept_mask | topk.top_mask(selectable(steps, ~mask), room, layout.groups)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Step towards the mean over the clients that have a weight; drop weights that none has; prune each layer to its budget."""
        sent = packet.field_dense("theta", server.theta.dtype)
        mean = self.aggregate_replies(packet, replies, server.theta, clock, draw, limit=False)["theta"]
        share = self.holder_share(replies, sent)
        if self.privacy is None and self.aggregator is Aggregator.WEIGHTED and self.client_weighting is not ClientWeighting.RIEMANNIAN:
            mean = torch.where(share > 0, mean / share, mean)
        theta, moments = self.server_update(server.moments, sent, mean)
        held = share > 0
        theta = torch.where(held, theta + self.residual_decay * (server.theta - sent), torch.zeros_like(theta))
        mask = topk.top_mask(selectable(theta, held), self.final_budget(server.layout), server.layout.groups)
        return Server(torch.where(mask, theta, torch.zeros_like(theta)), moments, mask.to(theta), server.layout)

    def holder_share(self, replies: Sequence[Reply], like: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return the sum of the client weights of those replies that have each model weight."""
        share = torch.zeros_like(like)
        for reply, weight in zip(replies, self.reply_weights(replies, like), strict=True):
            share += weight * reply.packet.support_mask(like.dtype)
        return share

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return the weights under the mask."""
        return server.theta

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The weights."""
        return frozenset({"theta"})

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """Return the mask of the broadcast, or None if clients adjust it in this round."""
        return None if self.current_adjust_fraction(clock) else packet.support

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change."""
        return EngineSupport(vector_fields=("theta", "mask", "steps"), replies_have_equal_length=self.replies_have_equal_length)


def selectable(scores: Float[Tensor, "*k p"], mask: Bool[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
    """Return the magnitudes of the scores, positive under the mask and zero elsewhere, so that only these are selected."""
    return torch.where(mask, scores.abs().clamp_min(MIN_SCORE), torch.zeros_like(scores))
