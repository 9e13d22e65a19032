"""FedSGD (McMahan et al. 2017, arXiv 1602.05629): dense gradients aggregated after every mini-batch, one final top-m.

The server's Adam is that of Reddi et al. 2021, arXiv 2003.00295.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.common_options import DENSITY_SCHEDULE_OPTIONS
from fedsieve.algorithms.fed_avg import Server
from fedsieve.algorithms.option_rules import require_at_least
from fedsieve.core import optimizers
from fedsieve.core.optimizers import Optimizer, StepRule, initial_moments
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.protocols import EngineSupport, Objective, Workload
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply

UNUSED_BY_GRADIENT_EXCHANGE = frozenset({"learning_rate", "residual_decay", "local_steps"})
"""Options without effect if clients send gradients: the server takes the steps, and it sends all weights."""


class Client(NamedTuple):
    """The weights of a stack of clients; after the step, the gradient at these weights."""

    theta: Tensor


@dataclass(frozen=True, kw_only=True)
class FedSGD(BaseAlgorithm):
    """FLoPS without gates."""

    default_rounds: ClassVar[int] = 50
    default_participation: ClassVar[float] = 0.1
    unsupported_options: ClassVar[frozenset[str]] = UNUSED_BY_GRADIENT_EXCHANGE | DENSITY_SCHEDULE_OPTIONS

    default_max_norm_ratio: float = field(default=inf, metadata={"section": "federation"})
    """no limit: on separable data most gradients are close to zero, and an honest one is not"""
    exchanges: int = 40
    """n(B): gradient exchanges per round"""
    step_rule: StepRule = StepRule.CONSTANT
    server_optimizer: Optimizer = Optimizer.ADAM
    server_learning_rate: float = 0.02

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        require_at_least(1, exchanges=self.exchanges)

    @property
    def workload(self) -> Workload:
        """One gradient per exchange."""
        return gradient_workload(self, self.exchanges)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights."""
        return Server(weights, initial_moments(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send all weights."""
        return dense_packet({"theta": server.theta}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        return Client(packet.field_dense("theta", dtype))

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """Replace theta by the gradient; a capped or Polyak step scales it."""
        gradient, step_size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return Client(gradient * (step_size / (self.learning_rate * self.learning_rate_factor(clock))))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the gradient."""
        return dense_packet({"gradient": client.theta}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Take one optimizer step along the mean gradient."""
        gradient = self.aggregate_replies(packet, replies, server.theta, clock, draw, limit=False)["gradient"]
        rate = self.server_learning_rate * self.learning_rate_factor(clock)
        theta, moments = optimizers.step(self.server_optimizer, server.moments, server.theta, gradient, rate, momentum=self.server_momentum)
        return server._replace(theta=theta, moments=moments)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return all weights."""
        return server.theta

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The gradient."""
        return frozenset({"gradient"})

    @property
    def engine_support(self) -> EngineSupport:
        """The gradient of a feature that no example has is zero."""
        return gradient_support(self, ("theta",))


def gradient_workload(algorithm: BaseAlgorithm, exchanges: int) -> Workload:
    """Return one gradient per exchange, and one exchange if a batch is all examples (L134-136)."""
    batch_size = None if algorithm.batch_size == "all" else algorithm.batch_size
    return Workload(1 if batch_size is None else exchanges, 1, batch_size, algorithm.step_rule, algorithm.batch_sampling)


def gradient_support(algorithm: BaseAlgorithm, vector_fields: tuple[str, ...]) -> EngineSupport:
    """Return the engine support of algorithms whose client state becomes a gradient, which is zero for absent features."""

    def zero_skipped(client: Any, num_skipped: Float[Tensor, "k p"], _clock: Clock) -> Any:
        return type(client)(*(torch.where(num_skipped > 0, torch.zeros_like(part), part) for part in client))

    equal_length = algorithm.replies_have_equal_length
    return EngineSupport(vector_fields=vector_fields, replies_have_equal_length=equal_length, apply_skipped_steps=zero_skipped)
