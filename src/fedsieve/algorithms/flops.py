"""FLoPS, Algorithm 1 (L142-168): gradients in theta~ and phi are aggregated after every mini-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.fed_sgd import UNUSED_BY_GRADIENT_EXCHANGE, gradient_support, gradient_workload
from fedsieve.algorithms.gated import PAPER_OPTIONS, GatedAlgorithm
from fedsieve.algorithms.log_alpha import zero_ungated
from fedsieve.algorithms.option_rules import require_at_least
from fedsieve.algorithms.recipes import ByLoss, Recipe, Recipes, with_recipes
from fedsieve.core import optimizers
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.optimizers import Moments, Optimizer, StepRule, initial_moments
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.protocols import EngineSupport, Objective, Workload
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Server(NamedTuple):
    """theta~, phi = log_alpha, the multiplier lambda, and the states of the two optimizers."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    moments: Moments
    gate_moments: Moments
    layout: Layout


class Client(NamedTuple):
    """theta~ and phi of the broadcast; after the step, the gradients in them."""

    weights: Tensor
    log_alpha: Tensor


PAPER_RECIPE = PAPER_OPTIONS | {
    "server_learning_rate": ByLoss(squared=1e-3, bounded=0.1),
    "gate_rate": 0.1,
    "initial_gate_probability": 0.95,
    "log_alpha_scaling_rate": 0.5,
    "scaling_start": ByLoss(squared=0.0, bounded=0.5),
}
"""The learning rates are the ends of the range of L140: above 1e-3 LR diverges, and LG and MC need .1 to converge in 50 rounds.

The paper states neither rho_init nor r nor prune start; rates, rho_init and prune start are the best of a small search (decision C8).
"""


@with_recipes
@dataclass(frozen=True, kw_only=True)
class Flops(GatedAlgorithm):
    """Federated learning with an L0 constraint via probabilistic gates."""

    default_rounds: ClassVar[int] = 50
    default_participation: ClassVar[float] = 0.1
    unsupported_options: ClassVar[frozenset[str]] = UNUSED_BY_GRADIENT_EXCHANGE
    recipes: ClassVar[Recipes] = {Recipe.PAPER: PAPER_RECIPE}
    paper_dual_rate: ClassVar[float] = 1.0

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
        """One gradient per exchange (L149)."""
        return gradient_workload(self, self.exchanges)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """theta~ as given, log_alpha around logit rho_init, lambda = 0 (L140, L146)."""
        log_alpha, moments = self.initial_gates(layout, draw), initial_moments(weights)
        return Server(weights, log_alpha, torch.zeros_like(weights[0]), moments, moments, layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send theta~ and phi, dense (L150)."""
        return dense_packet({"weights": server.weights, "log_alpha": zero_ungated(server.log_alpha, server.layout)}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        log_alpha = self.normalize_log_alpha(packet.field_dense("log_alpha", dtype), layout)
        return Client(packet.field_dense("weights", dtype), log_alpha)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """ClientCompute: replace theta~ and phi by the gradients of the batch loss in them (L160-162)."""
        gradients = self.gate_gradients(objective, client.weights, client.log_alpha, batch, clock, draw)
        if self.step_rule is StepRule.CONSTANT:
            return Client(gradients.weights, gradients.log_alpha)
        scale = gradients.step_size / (self.learning_rate * self.learning_rate_factor(clock))
        return Client(gradients.weights * scale, gradients.log_alpha * scale)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send both gradients, dense (L163)."""
        return dense_packet({"gradient": client.weights, "gate_gradient": client.log_alpha}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Average the gradients, add that of the constraint, step theta~, phi and lambda (L152-154)."""
        mean = self.aggregate_replies(packet, replies, server.weights, clock, draw, limit=False)
        multiplier = server.multiplier if self.dual_update is DualUpdate.ASCENT else torch.zeros_like(server.multiplier)
        penalty = self.penalty_gradient(server.log_alpha, multiplier, server.layout.num_gated, server.layout.groups)
        decay, momentum = self.learning_rate_factor(clock), self.server_momentum
        weights, moments = optimizers.step(
            self.server_optimizer, server.moments, server.weights, mean["gradient"], self.server_learning_rate * decay, momentum=momentum
        )
        log_alpha, gate_moments = optimizers.step(
            self.server_optimizer,
            server.gate_moments,
            server.log_alpha,
            mean["gate_gradient"] + penalty,
            self.gate_rate * decay,
            momentum=momentum,
        )
        log_alpha = self.normalize_log_alpha(log_alpha, server.layout)
        multiplier = self.ascend(server.multiplier, server.log_alpha, server.layout, clock)
        log_alpha, multiplier = self.mirror_dual_step(log_alpha, multiplier, server.layout, clock)
        return server._replace(weights=weights, log_alpha=log_alpha, multiplier=multiplier, moments=moments, gate_moments=gate_moments)

    def end_round(self, server: Server, clock: Clock) -> Server:
        """After `scaling_start`, scale log_alpha up at the top m of theta and down elsewhere (L155-157)."""
        log_alpha = server.log_alpha
        if scalings_left := self.scalings_left(clock):
            log_alpha = self.scale_log_alpha(log_alpha, self.top_mask(server.weights, log_alpha, server.layout, clock), scalings_left)
        return server._replace(log_alpha=self.solve_dual(log_alpha, server.layout, clock))

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The two gradients."""
        return frozenset({"gradient", "gate_gradient"})

    @property
    def engine_support(self) -> EngineSupport:
        """Both gradients of a feature that no example has are zero; the server adds that of the constraint."""
        return gradient_support(self, ("weights", "log_alpha"))
