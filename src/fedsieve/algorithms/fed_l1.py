"""FedAvg with a soft threshold at the server, cut to m at the end: the L1 way to sparsity.

The server keeps the unshrunk sum and sends its soft threshold, as dual averaging does: a threshold applied again and again to what it
has already shrunk would build up a bias (R2 .57 against .89 where the truth has 8 % of 700 weights).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.averaging import Averaging, Server
from fedsieve.algorithms.base import project_to_budget, require_fraction
from fedsieve.core import budgets
from fedsieve.core.budgets import Budget
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Clock, Layout


@dataclass(frozen=True, kw_only=True)
class FedL1(Averaging):
    """Each broadcast is soft-thresholded: shrunk by a fraction of the largest weight outside the top m, zero below it."""

    residual_decay: float = 1.0
    shrinkage: float = 0.5
    """threshold, in units of the largest weight that is not among the top m"""

    def __post_init__(self) -> None:
        """A negative threshold would grow weights, one above 1 would leave fewer than m."""
        super().__post_init__()
        require_fraction(shrinkage=self.shrinkage)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """sign(theta) max(|theta| - tau, 0), only what is left of it."""
        shrunk = self.soft_threshold(server.theta, self.message_budget(server.layout, clock), server.layout)
        if not shrunk.any():
            return self.encode_dense(server.theta, draw)
        return sparse_packet(shrunk.nonzero()[:, 0], {"theta": shrunk}, self.bits, draw)

    def parameters(self, server: Server) -> Float[Tensor, " p"]:
        """The m largest of the shrunk weights."""
        parts = self.final_budget(server.layout)
        return project_to_budget(parts, self.soft_threshold(server.theta, parts, server.layout), server.layout)

    def soft_threshold(self, theta: Float[Tensor, " p"], parts: Budget, layout: Layout) -> Float[Tensor, " p"]:
        """The proximal step of tau |theta|_1, tau scale-free; what no gate stands before is not shrunk."""
        gated, kept = theta[: layout.num_gated], budgets.budget_total(parts) - layout.num_ungated
        if kept == layout.num_gated:
            return theta
        threshold = self.shrinkage * torch.topk(gated.abs(), kept + 1).values[-1]
        return torch.cat((gated.sign() * (gated.abs() - threshold).clamp_min(0), theta[layout.num_gated :]))
