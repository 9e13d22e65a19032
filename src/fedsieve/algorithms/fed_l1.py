"""FedAvg with soft thresholding at the server: sparsity by an L1 penalty.

The server keeps the unshrunk weights and sends their soft threshold, as in federated dual averaging (Yuan et al. 2021, arXiv
2011.08474). Thresholding weights that are already shrunk would accumulate a bias (R2 .57 instead of .89 if the true model has 8 % of
700 weights).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.fed_avg import Server
from fedsieve.algorithms.hard_thresholding import Client, Thresholding
from fedsieve.algorithms.option_rules import require_fraction
from fedsieve.core import budgets
from fedsieve.core.budgets import Budget
from fedsieve.core.packets import Packet, dense_packet, sparse_packet
from fedsieve.core.protocols import Objective
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout


@dataclass(frozen=True, kw_only=True)
class FedL1(Thresholding):
    """The threshold is a fraction of the largest weight outside the top m."""

    residual_decay: float = 1.0
    shrinkage: float = 0.5
    """threshold, as a fraction of the largest weight that is not among the top m"""

    def __post_init__(self) -> None:
        """Validate the options: a threshold above 1 would leave fewer than m weights."""
        super().__post_init__()
        require_fraction(shrinkage=self.shrinkage)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the nonzero entries of sign(theta) max(|theta| - tau, 0)."""
        shrunk = self.soft_threshold(server.theta, self.message_budget(server.layout, clock), server.layout)
        if not shrunk.any():
            return dense_packet({"theta": server.theta}, self.bits, draw)
        return sparse_packet(shrunk.nonzero()[:, 0], {"theta": shrunk}, self.bits, draw)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        return client._replace(theta=self.local_sgd(objective, client, batch, clock))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send all weights."""
        return dense_packet({"theta": client.theta}, self.bits, draw)

    def parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return the m largest of the shrunk weights."""
        return self.project(self.soft_threshold(server.theta, self.final_budget(server.layout), server.layout), server.layout)

    def soft_threshold(self, theta: Float[Tensor, " p"], budget: Budget, layout: Layout) -> Float[Tensor, " p"]:
        """Return the proximal step of tau |theta|_1; ungated coordinates are not shrunk."""
        gated, kept = theta[: layout.num_gated], budgets.budget_total(budget) - layout.num_ungated
        if kept == layout.num_gated:
            return theta
        threshold = self.shrinkage * torch.topk(gated.abs(), kept + 1).values[-1]
        return torch.cat((gated.sign() * (gated.abs() - threshold).clamp_min(0), theta[layout.num_gated :]))
