"""Dense federated SGD: gradients aggregated every mini-batch, Adam at the server, one final top-m."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.averaging import Averaging, Client, Server
from fedsieve.algorithms.base import SCHEDULING, Method
from fedsieve.core import optimizers
from fedsieve.core.aggregation import dense_mean
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Objective, Reply


@dataclass(frozen=True, kw_only=True)
class GradientExchange(Method):
    """n(B) exchanges a round with one cohort, each a single gradient a client (L142-168)."""

    usual_rounds: ClassVar[int] = 50
    usual_participation: ClassVar[float] = 0.1
    unused: ClassVar[frozenset[str]] = frozenset({"rate", "memory"})  # a server steps and has sent everything, a client differentiates
    usual_norm_limit: ClassVar[float] = inf
    """none: where rows are separable, most gradients are as good as zero and an honest one is not"""

    steps: int = 40
    step_rule: StepRule = StepRule.CONSTANT
    server: Optimizer = Optimizer.ADAM
    server_rate: float = 0.02
    final_rate: float = 0.02

    @property
    def exchanges(self) -> int:
        """n(B), or one where a batch is all rows (L134-136)."""
        return 1 if self.batch == "all" else self.steps

    @property
    def local_steps(self) -> int:
        """A gradient, not a step."""
        return 1

    def averaged(self, stack: Packet, shares: Float[Tensor, " k"]) -> dict[str, Float[Tensor, " _n"]]:
        """Gradients are dense."""
        return {name: dense_mean(values, shares) for name, values in stack.fields.items()}


@dataclass(frozen=True, kw_only=True)
class FedSGD(GradientExchange, Averaging):
    """FedSGD without gates: what FLoPS would be if it never chose."""

    unused: ClassVar[frozenset[str]] = GradientExchange.unused | SCHEDULING

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """The gradient, in the place of theta; a capped or Polyak step shortens it before it is sent."""
        gradient, size = self.descend(objective, client.theta, batch, clock)
        return client._replace(theta=gradient * (size / (self.rate * self.decay(clock))))

    @property
    def reply_fields(self) -> frozenset[str]:
        """One gradient."""
        return frozenset({"gradient"})

    def client_rest(self, client: Client, missed: Float[Tensor, "k p"], clock: Clock) -> Client:
        """Where no row has a feature, the gradient is zero."""
        return client._replace(theta=torch.where(missed > 0, torch.zeros_like(client.theta), client.theta))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """The gradient."""
        return dense_packet({"gradient": client.theta}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """One optimizer step on the mean gradient."""
        gradient = self.merged(packet, replies, server.theta, clock, draw)["gradient"]
        theta, moments = optimizers.step(
            self.server, server.moments, server.theta, gradient, self.server_rate * self.decay(clock), momentum=self.server_momentum
        )
        return server._replace(theta=theta, moments=moments)
