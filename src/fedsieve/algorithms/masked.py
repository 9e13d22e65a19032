"""Training under a mask: gradual magnitude pruning (Zhu and Gupta 2017, arXiv 1710.01878) and a random mask as a control."""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.common_options import DENSITY_SCHEDULE_OPTIONS
from fedsieve.algorithms.fed_avg import Server
from fedsieve.algorithms.hard_thresholding import Client, Thresholding
from fedsieve.core import budgets, topk
from fedsieve.core.packets import Packet, dense_packet, sparse_packet
from fedsieve.core.protocols import Objective
from fedsieve.core.random import Draw
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout


@dataclass(frozen=True, kw_only=True)
class Masked(Thresholding, ABC):
    """Clients train only the weights of the broadcast; replies have the support of the broadcast."""

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- (theta - eta g) * mask."""
        return client._replace(theta=self.local_sgd(objective, client, batch, clock) * client.mask)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the weights under the mask."""
        if budgets.budget_total(self.message_budget(client.layout, clock)) == client.layout.size:
            return dense_packet({"theta": client.theta}, self.bits, draw)
        return sparse_packet(topk.mask_to_indices(client.mask > 0), {"theta": client.theta}, self.bits, draw)

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """Return the support of the broadcast."""
        return packet.support


@dataclass(frozen=True, kw_only=True)
class Gradual(Masked):
    """Dense at first; the density falls on a cubic schedule, then the support is fine-tuned."""

    learning_rate: float = 1.5
    density_schedule: DensitySchedule = DensitySchedule.CUBIC
    initial_density: float | None = 1.0
    anneal_start: float = 0.2
    anneal_end: float = 0.6


@dataclass(frozen=True, kw_only=True)
class RandomMask(Masked):
    """m random weights, fixed at the start."""

    unsupported_options: ClassVar[frozenset[str]] = DENSITY_SCHEDULE_OPTIONS  # a denser message would contain weights outside the mask

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights, zero outside a random mask."""
        priority = budgets.broadcast_within_groups(draw("mask", layout.size), layout.groups)
        mask = topk.top_mask(priority, self.final_budget(layout), layout.groups)
        return super().init(layout, torch.where(mask, weights, torch.zeros_like(weights)), draw)
