"""Gradual magnitude pruning (Zhu & Gupta 2017): density falls on a cubic schedule, local training stays under the mask."""

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.averaging import Averaging, Client
from fedsieve.algorithms.fed_ht import Thresholding
from fedsieve.core.budgets import budget_total
from fedsieve.core.packets import Packet
from fedsieve.core.random import Draw
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Clock, Layout


@dataclass(frozen=True, kw_only=True)
class Masked(Averaging):
    """Clients train only the weights they received; the uplink repeats the broadcast's support."""

    def project(self, theta: Float[Tensor, "k p"], client: Client, layout: Layout, clock: Clock) -> Float[Tensor, "k p"]:
        """Zero outside the broadcast's support."""
        return theta * client.mask

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """The broadcast's."""
        return packet.support

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """The weights under the mask."""
        parts = self.message_budget(client.layout, clock)
        if budget_total(parts) == client.layout.size:
            return self.encode_dense(client.theta, draw)
        return self.encode_sparse(client.theta, client.mask > 0, draw)


@dataclass(frozen=True, kw_only=True)
class Gradual(Masked, Thresholding):
    """Dense at first, cut along a cubic, fine-tuned under the mask."""

    learning_rate: float = 1.5
    density_schedule: DensitySchedule = DensitySchedule.CUBIC
    initial_density: float | None = 1.0
    anneal_start: float = 0.2
    anneal_end: float = 0.6
