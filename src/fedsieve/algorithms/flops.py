"""FLoPS, Algorithm 1 (L142-168): gradients in theta~ and phi aggregated every mini-batch, the constraint's added at the server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.fed_sgd import GradientExchange
from fedsieve.algorithms.gated import Gated, Server, zero_ungated
from fedsieve.core import optimizers
from fedsieve.core.optimizers import StepRule
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Objective, Reply


class Client(NamedTuple):
    """theta~ and phi as received; after the step, the gradients in them."""

    weights: Tensor
    log_alpha: Tensor


@dataclass(frozen=True, kw_only=True)
class Flops(GradientExchange, Gated):
    """Federated learning with an L0 constraint through probabilistic gates."""

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """theta~ and phi, dense."""
        return dense_packet({"weights": server.weights, "log_alpha": zero_ungated(server.log_alpha, server.layout)}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Begin at the broadcast."""
        return Client(packet.field_dense("weights", dtype), self.normalize_log_alpha(packet.field_dense("log_alpha", dtype), layout))

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """ClientCompute: gradients of the batch loss in theta~ and phi."""
        slopes = self.gate_gradients(objective, client.weights, client.log_alpha, batch, clock, draw)
        if self.step_rule is StepRule.CONSTANT:
            return Client(slopes.weights, slopes.log_alpha)
        share = slopes.step_size / (self.learning_rate * self.learning_rate_factor(clock))
        return Client(slopes.weights * share, slopes.log_alpha * share)

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """Two gradients."""
        return frozenset({"gradient", "gate_gradient"})

    def apply_skipped_steps(self, client: Client, missed: Float[Tensor, "k p"], clock: Clock) -> Client:
        """Where no row has a feature, both gradients are zero; the constraint's is the server's to add."""
        return Client(*(torch.where(missed > 0, torch.zeros_like(part), part) for part in client))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Both gradients, dense."""
        return dense_packet({"gradient": client.weights, "gate_gradient": client.log_alpha}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Mean gradients, the constraint's closed form, one step of theta~, phi and lambda together (L152-154)."""
        merged = self.aggregate_replies(packet, replies, server.weights, clock, draw)
        gradient, weight = merged["gradient"], server.multiplier if self.uses_multiplier else torch.zeros_like(server.multiplier)
        gate_gradient = merged["gate_gradient"] + self.penalty_gradient(
            server.log_alpha, weight, server.layout.num_gated, server.layout.groups
        )
        decay = self.learning_rate_factor(clock)
        weights, moments = optimizers.step(
            self.server_optimizer,
            server.moments,
            server.weights,
            gradient,
            self.server_learning_rate * decay,
            momentum=self.server_momentum,
        )
        log_alpha, gate_moments = optimizers.step(
            self.server_optimizer,
            server.gate_moments,
            server.log_alpha,
            gate_gradient,
            self.gate_rate * decay,
            momentum=self.server_momentum,
        )
        multiplier = self.ascend(server.multiplier, server.log_alpha, server.layout, clock)
        log_alpha, multiplier = self.mirror_dual_step(self.normalize_log_alpha(log_alpha, server.layout), multiplier, server.layout, clock)
        return server._replace(weights=weights, log_alpha=log_alpha, multiplier=multiplier, moments=moments, gate_moments=gate_moments)

    def end_round(self, server: Server, clock: Clock) -> Server:
        """After prune start, scale log_alpha up at the top m of theta and down elsewhere (L155-157)."""
        log_alpha = server.log_alpha
        if clock.round + 1 > max(self.scaling_start * clock.num_rounds, self.warmup):
            log_alpha = self.scale_log_alpha(log_alpha, self.top_mask(server.weights, log_alpha, server.layout, clock))
        return server._replace(log_alpha=self.solve_dual(log_alpha, server.layout, clock))
