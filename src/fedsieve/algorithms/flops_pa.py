"""FLoPS-PA, Algorithm 2 (L171-204): parameters and gates averaged once a round, the top m of both in each message."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.base import require_fraction, server_update
from fedsieve.algorithms.gated import Gated
from fedsieve.core import constraint, gates, topk
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT
from fedsieve.core.optimizers import Moments, Optimizer
from fedsieve.core.packets import Packet, SparseVector, sparse_packet
from fedsieve.core.quantization import quantize, quantize_gates
from fedsieve.core.random import Draw
from fedsieve.core.touched import FeatureTables
from fedsieve.core.types import Batch, Clock, Layout, Objective, Reply

MAX_FIRST_ORDER_DRIFT = 0.01
"""A drift of log_alpha over a round, above which it is applied step by step."""


class GateNoise(StrEnum):
    """Whether a gate is drawn or taken at its median (decision E9)."""

    SAMPLED = "sampled"
    DETERMINISTIC = "deterministic"


class GateInverse(StrEnum):
    """How log_alpha is read off a gate that was received."""

    PAPER = "paper"
    """beta' log(z / (1 - z)) (L171)"""
    EXACT = "exact"
    """the inverse of the median gate"""


class GateEncoding(StrEnum):
    """What stands for a gate on the wire (decision E3)."""

    GATES = "gates"
    LOG_ALPHA = "log-alpha"


class Server(NamedTuple):
    """theta and phi as averaged, theta~ = theta / z, and lambda, which the server owns (decision B3)."""

    theta: Tensor
    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    moments: Moments
    layout: Layout


class Client(NamedTuple):
    """A stack of clients: theta~, phi and the multiplier they were given."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class FlopsPA(Gated):
    """FLoPS with parameter averaging and sparse messages both ways.

    The paper leaves the recipe open (decision E9). The default sends log_alpha itself, with gates at their median in local steps.
    Recipe A: message gates, sampled everywhere, paper's inverse, literal scaling .1, rho_init .5.
    Recipe B: message gates, deterministic everywhere, exact inverse, additive scaling .02, rest floor .3, rho_init .9, gate rate .05.
    """

    learning_rate: float = 1.5
    residual_decay: float = 0.95
    initial_gate_probability: float = 0.9
    log_alpha_scaling_rate: float = 0.02
    scaling_start: float = 0.0
    local_gate_noise: GateNoise = GateNoise.DETERMINISTIC
    """gates in local steps: sampled, or at their median"""
    message_gate_noise: GateNoise = GateNoise.SAMPLED
    """gates in messages: sampled, or at their median"""
    gate_inverse: GateInverse = GateInverse.PAPER
    """how log_alpha is read off a received gate"""
    gate_encoding: GateEncoding = GateEncoding.LOG_ALPHA
    """what is sent for a gate: z, or log_alpha itself"""
    min_default_gate: float = 1e-3
    """least gate of the weights that are not sent: at exactly 0 the support could never change"""

    def __post_init__(self) -> None:
        """A rest gate is a gate; and a message says too little of the gates for an ascent on them."""
        super().__post_init__()
        require_fraction(min_default_gate=self.min_default_gate)
        if self.dual_update is DualUpdate.MIRROR:
            raise ValueError(
                "algorithm.dual-update mirror needs every gate, and messages of flops-pa name a few; use bisection, or method flops"
            )

    def local_gates(self, log_alpha: Float[Tensor, "k p"], layout: Layout, draw: Draw, purpose: str) -> gates.Gates:
        """The gates of a local step."""
        return self.gates(log_alpha, layout, draw, purpose, self.local_gate_noise)

    def gates(self, log_alpha: Float[Tensor, "*k p"], layout: Layout, draw: Draw, purpose: str, kind: GateNoise) -> gates.Gates:
        """Gates, drawn or at their median."""
        if kind is GateNoise.DETERMINISTIC:
            return gates.median_gates(self.shape, log_alpha)
        return self.sample_gates(log_alpha, layout, draw, purpose)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """theta~ as given, log_alpha around logit rho_init, theta = theta~ z (L175)."""
        start = super().init(layout, weights, draw)
        theta = weights if self.gate_encoding is GateEncoding.LOG_ALPHA else weights * gates.median_gates(self.shape, start.log_alpha).value
        return Server(theta, weights, start.log_alpha, start.multiplier, start.moments, layout)

    # The message, the same both ways (L171)

    def encode_message(
        self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, clock: Clock, draw: Draw
    ) -> Packet:
        """Scale log_alpha, draw z, send the top m of theta = theta~ z and their gates, and for the rest the mean gate.

        The pair on the wire is (theta~, z), from which the receiver forms theta: the same content as (theta, z), but rounding
        theta~ does no harm where z is near 0.
        """
        support = topk.top_k_indices(
            self.importance(weights, log_alpha), self.message_budget(layout, clock), layout.groups, layout.global_index
        )
        inside, outside = log_alpha.gather(-1, support), log_alpha
        if clock.round >= max(self.scaling_start * clock.num_rounds, self.warmup):
            inside, outside = self.scale_log_alpha(inside, True), self.scale_log_alpha(outside, False)
        packet = sparse_packet(support, {"weights": weights}, self.bits, draw)
        if self.gate_encoding is GateEncoding.LOG_ALPHA:
            if layout.num_ungated:  # their limit would set the scale of all levels, and receivers know it
                inside = inside.masked_fill(support >= layout.num_gated, 0.0)
            packet.fields["log_alpha"] = quantize(inside, self.bits, draw, "log_alpha", zero_free=False)
            packet.scalars["default_gate"] = mean_off_support(outside, support, layout.size).to(torch.float32)
        else:
            gate = self.gates(outside.scatter(-1, support, inside), layout, draw, "message gates", self.message_gate_noise).value
            gate = torch.cat((gate[..., : layout.num_gated], torch.ones_like(gate[..., layout.num_gated :])), dim=-1)
            packet.fields["gates"] = quantize_gates(gate.gather(-1, support), self.bits, draw, "gates")
            packet.scalars["default_gate"] = mean_off_support(gate, support, layout.size).clamp_min(self.min_default_gate).to(torch.float32)
        return packet

    @property
    def gate_field(self) -> str:
        """What stands for a gate in a message."""
        return "gates" if self.gate_encoding is GateEncoding.GATES else "log_alpha"

    def decode_message(self, packet: Packet, dtype: torch.dtype) -> tuple[Float[Tensor, "*k p"], Float[Tensor, "*k p"]]:
        """theta~ (zero where the packet is silent) and z, or log_alpha where that is what was sent."""
        return packet.field_dense("weights", dtype), packet.field_dense(self.gate_field, dtype, packet.scalar("default_gate", dtype))

    def decode_sparse(self, packet: Packet, dtype: torch.dtype) -> dict[str, SparseVector]:
        """theta and its gates; of gates a packet is never silent, the rest gate speaks for those it does not name."""
        theta, gate = (packet.fields[name].decode(dtype) for name in ("weights", self.gate_field))
        if self.gate_encoding is GateEncoding.GATES:
            theta = theta * gate.clamp_min(GATE_MARGIN)
        return {
            "theta": SparseVector(theta, packet.support),
            "gate": SparseVector(gate, packet.support, packet.scalar("default_gate", dtype)),
        }

    def log_alpha_from(self, gate: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """phi from what was received: z inverted, noise ignored (L171), or log_alpha itself."""
        if self.gate_encoding is GateEncoding.LOG_ALPHA:
            return gate
        invert = gates.paper_inverse if self.gate_inverse is GateInverse.PAPER else gates.exact_inverse
        return invert(self.shape, gate).clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)

    @staticmethod
    def clip_received_gates(gate: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
        """Received gates off 0, and wide open where there are none."""
        return torch.cat((gate[..., : layout.num_gated].clamp_min(GATE_MARGIN), torch.ones_like(gate[..., layout.num_gated :])), dim=-1)

    # The round

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """The top m of the server's theta and z, and lambda while it is ascended."""
        packet = self.encode_message(server.weights, server.log_alpha, server.layout, clock, draw)
        if self.uses_multiplier:
            packet.scalars["multiplier"] = server.multiplier.to(torch.float32)
        return packet

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """theta~ and phi from the broadcast (L197)."""
        weights, gate = self.decode_message(packet, dtype)
        multiplier = packet.scalar("multiplier", dtype) if self.uses_multiplier else torch.zeros_like(weights[..., 0])
        return Client(weights, self.normalize_log_alpha(self.log_alpha_from(gate), layout), multiplier, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """One local SGD step on (theta~, phi) (L198)."""
        weights, log_alpha, multiplier, layout = client
        size, groups, rate = layout.num_gated, objective.layout.groups, self.gate_rate * self.learning_rate_factor(clock)
        if self.is_plain_step and groups is None:
            gate = self.local_gates(log_alpha, objective.layout, draw, "gates 0")
            loss, gradient = objective.gradient(weights * gate.value, batch)
            step = self.step_size(loss, gradient, batch, clock, gate.value)
            both = constraint.gated_sgd_step(
                self.shape, weights, log_alpha, gradient, gate, step, multiplier, self.constraint_scale, size, rate
            )
            return Client(*both, multiplier, layout)
        slopes = self.gate_gradients(objective, weights, log_alpha, batch, clock, draw)
        moved = torch.addcmul(weights, slopes.step_size, slopes.weights, value=-1)
        return Client(moved, self.step_log_alpha(log_alpha, slopes.log_alpha, multiplier, size, groups, rate), multiplier, layout)

    @property
    def is_plain_step(self) -> bool:
        """Whether a step follows the gradient of one draw of gates as it is."""
        return self.gate_samples == 1 and self.max_gradient_norm == inf and not self.entropy

    def fused_sparse_step(self, objective: Objective, client: Client, at: Int64[Tensor, " n"], batch: Batch, clock: Clock) -> bool:
        """The same step with gates at their median, each weight with its own; nothing is copied out and back where it is compiled."""
        plain = self.is_plain_step and self.local_gate_noise is GateNoise.DETERMINISTIC
        if not plain or objective.layout.num_ungated or objective.layout.groups is not None:
            return False
        tables = FeatureTables(*(part.view(-1, objective.num_outputs) for part in (client.weights, client.log_alpha)))
        theta, value, lever = tables.active_gates(self.shape, at)
        loss, gradient = objective.gradient(theta, batch)
        by_weight, size = value.mul_(gradient), client.layout.num_gated
        step, rate = self.step_size(loss, by_weight, batch, clock), self.gate_rate * self.learning_rate_factor(clock)
        tables.gated_step(self.shape, at, by_weight, (gradient, lever), step, client.multiplier, self.constraint_scale, size, rate)
        return True

    @property
    def unseen_weights_are_equal(self) -> bool:
        """Of weights that are not sent a message says one number; only gates drawn for it differ."""
        return self.gate_encoding is GateEncoding.LOG_ALPHA

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """Weights, what stands for their gates, and the rest gate."""
        return frozenset({"weights", self.gate_field, "default_gate"})

    def apply_skipped_steps(self, client: Client, missed: Float[Tensor, "k p"], clock: Clock) -> Client:
        """The constraint's drift of gates that sparse rows did not touch, at once: exact to first order, step by step where large.

        A drift of lambda/p a step could round to nothing in float32; summed over a round it does not.
        """
        rate = self.gate_rate * self.learning_rate_factor(clock)
        pull = float(client.multiplier.abs().max()) + self.entropy
        steps = 1 if rate * self.local_steps * pull < MAX_FIRST_ORDER_DRIFT else self.local_steps
        log_alpha = client.log_alpha
        if steps == 1 and not self.entropy and client.layout.groups is None:
            form, size = self.constraint_scale, client.layout.num_gated
            return client._replace(log_alpha=constraint.apply_penalty(self.shape, log_alpha, missed, client.multiplier, form, size, rate))
        for step in range(steps):
            times = missed if steps == 1 else (missed > step).to(log_alpha)
            drift = self.penalty_gradient(log_alpha, client.multiplier, client.layout.num_gated, client.layout.groups).mul_(times)
            log_alpha = log_alpha.sub(drift, alpha=rate)
        return client._replace(log_alpha=log_alpha.clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Gates drawn once more, then the message (L199-200)."""
        return self.encode_message(client.weights, client.log_alpha, client.layout, clock, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta and z averaged, theta~ = theta / z, phi from z (L183-186); what the broadcast left out is remembered (E5)."""
        by_gate = self.gate_encoding is GateEncoding.GATES
        merged = self.aggregate_replies(packet, replies, server.theta, clock, draw)
        gate = self.clip_received_gates(merged["gate"], server.layout) if by_gate else merged["gate"]
        theta, moments = self.server_update(server, packet, merged["theta"])
        log_alpha = self.solve_dual(self.normalize_log_alpha(self.log_alpha_from(gate), server.layout), server.layout, clock)
        multiplier = self.ascend(server.multiplier, log_alpha, server.layout, clock)
        weights = theta / gate if by_gate else theta
        return server._replace(theta=theta, weights=weights, log_alpha=log_alpha, multiplier=multiplier, moments=moments)

    def server_update(self, server: Server, packet: Packet, mean: Float[Tensor, " p"]) -> tuple[Float[Tensor, " p"], Moments]:
        """What was sent, moved towards the cohort's mean, and what was not, times `memory`."""
        at = packet.support
        if self.server_optimizer is not Optimizer.SGD or at is None:
            sent = packet.restrict(server.theta)
            theta, moments = server_update(self, server.moments, sent, mean)
            return torch.add(theta, server.theta - sent, alpha=self.residual_decay), moments
        sent = server.theta[at]  # elsewhere the step goes from 0, to the mean times the rate
        moved = sent - self.server_learning_rate * (sent - mean[at])
        theta = mean if self.server_learning_rate == 1 else self.server_learning_rate * mean
        return torch.add(theta, server.theta, alpha=self.residual_decay).scatter_(0, at, moved), server.moments

    def end_round(self, server: Server, clock: Clock) -> Server:
        """Scaling happens in each message, on both sides, from the first round (L171)."""
        return server


def mean_off_support(values: Float[Tensor, "*k n"], support: Int64[Tensor, "*k m"], size: int) -> Float[Tensor, "*k"]:
    """The mean of what was not chosen of `size` values; 0 where everything was. The last of fewer values stands for those missing."""
    outside = size - support.shape[-1]
    total = values.sum(-1) + (size - values.shape[-1]) * values[..., -1]
    return (total - values.gather(-1, support).sum(-1)) / outside if outside else torch.zeros_like(values[..., 0])
