"""Dense federated SGD: gradients aggregated every mini-batch, Adam at the server, one final top-m."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.averaging import Averaging, Client, Server
from fedsieve.algorithms.base import DENSITY_SCHEDULE_OPTIONS, BaseAlgorithm
from fedsieve.core import optimizers
from fedsieve.core.aggregation import quantized_mean
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Objective, Reply


@dataclass(frozen=True, kw_only=True)
class GradientExchange(BaseAlgorithm):
    """n(B) exchanges a round with one cohort, each a single gradient a client (L142-168)."""

    default_rounds: ClassVar[int] = 50
    default_participation: ClassVar[float] = 0.1
    unsupported_options: ClassVar[frozenset[str]] = frozenset(
        {"learning_rate", "residual_decay"}
    )  # a server steps and has sent everything, a client differentiates
    default_max_norm_ratio: ClassVar[float] = inf
    """none: where rows are separable, most gradients are as good as zero and an honest one is not"""

    local_steps: int = 40
    step_rule: StepRule = StepRule.CONSTANT
    server_optimizer: Optimizer = Optimizer.ADAM
    server_learning_rate: float = 0.02
    final_learning_rate_fraction: float = 0.02

    @property
    def exchanges_per_round(self) -> int:
        """n(B), or one where a batch is all rows (L134-136)."""
        return 1 if self.batch_size == "all" else self.local_steps

    @property
    def steps_per_exchange(self) -> int:
        """A gradient, not a step."""
        return 1

    def weighted_mean(self, stack: Packet, shares: Float[Tensor, " k"]) -> dict[str, Float[Tensor, " _n"]]:
        """Gradients are dense."""
        return {name: quantized_mean(values, shares) for name, values in stack.fields.items()}


@dataclass(frozen=True, kw_only=True)
class FedSGD(GradientExchange, Averaging):
    """FedSGD without gates: what FLoPS would be if it never chose."""

    unsupported_options: ClassVar[frozenset[str]] = GradientExchange.unsupported_options | DENSITY_SCHEDULE_OPTIONS

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """The gradient, in the place of theta; a capped or Polyak step shortens it before it is sent."""
        gradient, size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return client._replace(theta=gradient * (size / (self.learning_rate * self.learning_rate_factor(clock))))

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """One gradient."""
        return frozenset({"gradient"})

    def apply_skipped_steps(self, client: Client, missed: Float[Tensor, "k p"], clock: Clock) -> Client:
        """Where no row has a feature, the gradient is zero."""
        return client._replace(theta=torch.where(missed > 0, torch.zeros_like(client.theta), client.theta))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """The gradient."""
        return dense_packet({"gradient": client.theta}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """One optimizer step on the mean gradient."""
        gradient = self.aggregate_replies(packet, replies, server.theta, clock, draw)["gradient"]
        theta, moments = optimizers.step(
            self.server_optimizer,
            server.moments,
            server.theta,
            gradient,
            self.server_learning_rate * self.learning_rate_factor(clock),
            momentum=self.server_momentum,
        )
        return server._replace(theta=theta, moments=moments)
