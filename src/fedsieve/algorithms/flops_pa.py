"""FLoPS-PA, Algorithm 2 (L171-204): parameters and gates are averaged once per round; messages hold the top m of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.gated import PAPER_OPTIONS, GatedAlgorithm, GateNoise
from fedsieve.algorithms.gated_support import gated_support
from fedsieve.algorithms.option_rules import require_fraction
from fedsieve.algorithms.recipes import ByLoss, Recipe, Recipes, with_recipes
from fedsieve.core import constraint, gates, optimizers, topk
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT
from fedsieve.core.optimizers import Moments, Optimizer, initial_moments
from fedsieve.core.packets import Packet, SparseVector, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.quantization import quantize, quantize_gates
from fedsieve.core.random import Draw
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout, Reply


class GateInverse(StrEnum):
    """How log_alpha is recovered from a received gate."""

    PAPER = "paper"
    """beta' log(z / (1 - z)) (L171)"""
    EXACT = "exact"
    """the inverse of the median gate"""


class GateEncoding(StrEnum):
    """What a message contains for a gate (decision E3)."""

    GATES = "gates"
    LOG_ALPHA = "log-alpha"


class DualLocation(StrEnum):
    """Who ascends the multiplier: the two routes of L128."""

    SERVER = "server"
    """the server, on the aggregated gates (decision B3)"""
    CLIENT = "client"
    """each client, on its own gates, in every local step; it keeps its multiplier between its rounds (decision B6)"""


class Server(NamedTuple):
    """Averaged theta and phi, theta~ = theta / z, and lambda (decisions B3, B6)."""

    theta: Tensor
    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    moments: Moments
    layout: Layout


class Client(NamedTuple):
    """theta~, phi and the multiplier of a stack of clients."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    layout: Layout


PAPER_RECIPE = PAPER_OPTIONS | {
    "learning_rate": ByLoss(squared=5e-4, bounded=0.1),
    "gate_rate": 0.1,
    "server_learning_rate": 1.0,
    "residual_decay": 0.0,
    "initial_gate_probability": 0.95,
    "log_alpha_scaling_rate": 0.1,
    "scaling_start": 0.0,
    "local_gate_noise": GateNoise.SAMPLED,
    "message_gate_noise": GateNoise.SAMPLED,
    "gate_inverse": GateInverse.PAPER,
    "gate_encoding": GateEncoding.GATES,
    "min_default_gate": 0.0,
    "dual_location": DualLocation.SERVER,
}
"""Learning rates in the range of L303; scaling from epoch zero (L171). The paper states neither rho_init nor r (decision C8)."""


@with_recipes
@dataclass(frozen=True, kw_only=True)
class FlopsPA(GatedAlgorithm):
    """FLoPS with parameter averaging and sparse messages in both directions.

    By default messages contain log_alpha with 4 bits and become sparser until 80 % of the rounds. Log_alpha is scaled in the second half:
    every gate ends open or closed (decision E9). Recipe paper is Algorithm 2 as printed; only received gates stay 1e-6 away from 0 and 1,
    where the paper's inverse is infinite (decision E1).
    """

    weight_fields: ClassVar[tuple[str, ...]] = ("theta", "weights")
    recipes: ClassVar[Recipes] = {Recipe.PAPER: PAPER_RECIPE}
    paper_dual_rate: ClassVar[float] = 0.1
    initial_density_factor: ClassVar[float] = 9.0
    max_initial_density: ClassVar[float] = 0.45

    learning_rate: float = 1.5
    residual_decay: float = 0.95
    density_schedule: DensitySchedule = DensitySchedule.CUBIC
    initial_density: float | None = None
    """density of messages at the start of an annealed schedule (default: nine times the target, at most .45)"""
    anneal_end: float = 0.8
    initial_gate_probability: float = 0.9
    local_gate_noise: GateNoise = GateNoise.SAMPLED
    """gates in local steps: sampled, or their medians"""
    message_gate_noise: GateNoise = GateNoise.SAMPLED
    """gates in messages: sampled, or their medians"""
    gate_inverse: GateInverse = GateInverse.PAPER
    """how log_alpha is recovered from a received gate"""
    gate_encoding: GateEncoding = GateEncoding.LOG_ALPHA
    """what a message contains for a gate: z, or log_alpha"""
    dual_location: DualLocation = DualLocation.SERVER
    """who ascends the multiplier: the server on the aggregated gates, or each client its own one on its own gates"""
    min_default_gate: float = 1e-3
    """minimum gate of weights that are not in a message; with exactly 0 the support could never change"""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        require_fraction(min_default_gate=self.min_default_gate)
        if self.dual_location is DualLocation.CLIENT and self.dual_update is not DualUpdate.ASCENT:
            raise ValueError(
                f"algorithm.dual-location client ascends a multiplier at every client, and algorithm.dual-update {self.dual_update} has "
                f"none; use --algorithm.dual-update ascent"
            )
        if self.gate_encoding is GateEncoding.LOG_ALPHA and self.log_alpha_limit > LOG_ALPHA_LIMIT:
            raise ValueError(
                f"algorithm.log-alpha-limit must be at most {LOG_ALPHA_LIMIT:g} if messages contain log_alpha, because replies with larger "
                f"values are rejected; got {self.log_alpha_limit:g}; use --algorithm.gate-encoding gates"
            )
        if self.dual_update is DualUpdate.MIRROR:
            raise ValueError(
                "algorithm.dual-update mirror needs every gate, and messages of flops-pa contain only some; "
                "use bisection, or algorithm flops"
            )

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """theta~ as given, log_alpha around logit rho_init, theta = theta~ z (L175)."""
        log_alpha = self.initial_gates(layout, draw)
        theta = weights if self.gate_encoding is GateEncoding.LOG_ALPHA else weights * gates.median_gates(self.shape, log_alpha).value
        return Server(theta, weights, log_alpha, torch.zeros_like(weights[0]), initial_moments(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the top m of theta and z, and lambda if it is updated by ascent (L180)."""
        packet = self.encode_message(server.weights, server.log_alpha, server.layout, clock, draw)
        if self.dual_update is DualUpdate.ASCENT:
            packet.scalars["multiplier"] = server.multiplier.to(torch.float32)
        return packet

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Recover theta~ and phi from the broadcast (L197)."""
        weights = packet.field_dense("weights", dtype)
        gate = packet.field_dense(self.gate_field, dtype, packet.scalars["default_gate"].to(dtype))
        multiplier = packet.scalars["multiplier"].to(dtype) if self.dual_update is DualUpdate.ASCENT else torch.zeros_like(weights[..., 0])
        return Client(weights, self.normalize_log_alpha(self.log_alpha_from(gate), layout), multiplier, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """Take one local SGD step on (theta~, phi) (L198)."""
        weights, log_alpha, multiplier, layout = client
        if self.dual_location is DualLocation.CLIENT:
            client = client._replace(multiplier=self.ascend_locally(client, clock))
        size, groups, rate = layout.num_gated, objective.layout.groups, self.gate_rate * self.learning_rate_factor(clock)
        limit = self.log_alpha_limit
        if self.gate_samples == 1 and not self.entropy and groups is None:
            gate = self.sample_gates(log_alpha, objective.layout, draw, "gates 0", self.local_gate_noise)
            loss, gradient = objective.gradient(weights * gate.value, batch)
            step_size = self.step_size(objective, loss, gradient, batch, clock, gate.value)
            gradient = optimizers.clip_norm(gradient, self.max_gradient_norm)
            weights, log_alpha = constraint.gated_sgd_step(
                self.shape, weights, log_alpha, gradient, gate, step_size, multiplier, self.constraint_scale, size, rate, limit
            )
            return client._replace(weights=weights, log_alpha=log_alpha)
        gradients = self.gate_gradients(objective, weights, log_alpha, batch, clock, draw, self.local_gate_noise)
        penalty = self.penalty_gradient(log_alpha, multiplier, size, groups)
        log_alpha = constraint.step_log_alpha(
            self.shape, log_alpha, gradients.log_alpha + penalty, torch.zeros_like(multiplier), self.constraint_scale, size, rate, limit
        )
        weights = torch.addcmul(weights, gradients.step_size, gradients.weights, value=-1)
        return client._replace(weights=weights, log_alpha=log_alpha)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the top m of theta and z (L199-200), and the client's multiplier if it has its own."""
        packet = self.encode_message(client.weights, client.log_alpha, client.layout, clock, draw, 2 * self.scalings_left(clock))
        if self.dual_location is DualLocation.CLIENT:
            packet.scalars["multiplier"] = client.multiplier.to(torch.float32)
        return packet

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Average theta and z, theta~ = theta / z, phi from z, dual step, scaling (L183-189); the residual is kept (decision E5)."""
        sends_gates = self.gate_encoding is GateEncoding.GATES
        mean = self.aggregate_replies(packet, replies, server.theta, clock, draw)
        gate = clip_received_gates(mean["gate"], server.layout) if sends_gates else mean["gate"]
        theta, moments = self.server_step(server, packet, mean["theta"])
        weights = theta / gate if sends_gates else theta
        log_alpha = self.normalize_log_alpha(self.log_alpha_from(gate), server.layout)
        if self.dual_location is DualLocation.CLIENT:
            multiplier = mean["multiplier"][0]
        else:
            multiplier = self.ascend(server.multiplier, log_alpha, server.layout, clock)
        if rounds_left := self.scalings_left(clock):
            mask = self.top_mask(weights, log_alpha, server.layout, clock)
            log_alpha = self.scale_log_alpha(log_alpha, mask, 2 * rounds_left - 1)
        if self.dual_update is DualUpdate.BISECTION:
            log_alpha = self.solve_dual(log_alpha, server.layout, clock)
        return server._replace(theta=theta, weights=weights, log_alpha=log_alpha, multiplier=multiplier, moments=moments)

    def ascend_locally(self, client: Client, clock: Clock) -> Float[Tensor, " k"]:
        """Return each client's multiplier after one local step: dual ascent with restart on its own constraint (L128, decision B6).

        It goes on from the client's last round, in its first one from the mean of the others in the broadcast, and takes one step of the
        round's rate / n(B) on the gates before the primal step.
        """
        layout, density = client.layout, self.message_density(clock)
        rate = self.dual_rate_per_round(layout) / self.local_steps
        return constraint.ascend(self.shape, client.log_alpha[..., : layout.num_gated], client.multiplier, density, rate)

    def server_step(self, server: Server, packet: Packet, mean: Float[Tensor, " p"]) -> tuple[Float[Tensor, " p"], Moments]:
        """sent + server step towards the mean + residual_decay * (theta - sent), where sent is theta on the support."""
        if self.server_optimizer is Optimizer.SGD and packet.support is not None:
            rate, decay = self.server_learning_rate, self.residual_decay
            return optimizers.sgd_from_support(server.theta, mean, packet.support, rate, decay), server.moments
        sent = packet.restrict(server.theta)
        theta, moments = self.server_update(server.moments, sent, mean)
        return torch.add(theta, server.theta - sent, alpha=self.residual_decay), moments

    # Messages have the same form in both directions (L171)

    def encode_message(
        self,
        weights: Float[Tensor, "*k p"],
        log_alpha: Float[Tensor, "*k p"],
        layout: Layout,
        clock: Clock,
        draw: Draw,
        scalings_left: int = 0,
    ) -> Packet:
        """Scale log_alpha if scalings are left, sample z, return the top m of theta = theta~ z, their gates and the mean of the others.

        A message contains (theta~, z) instead of (theta, z): quantizing theta~ does no harm if z is close to 0.
        """
        budget = self.message_budget(layout, clock)
        support = topk.top_k_indices(self.importance(weights, log_alpha), budget, layout.groups, layout.global_index)
        inside, outside = log_alpha.gather(-1, support), log_alpha
        if scalings_left:
            inside, outside = self.scale_log_alpha(inside, True, scalings_left), self.scale_log_alpha(outside, False, scalings_left)
        packet = sparse_packet(support, {"weights": weights}, self.bits, draw)
        if self.gate_encoding is GateEncoding.LOG_ALPHA:
            if layout.num_ungated:  # the limit of ungated coordinates would determine the scale of all levels
                inside = inside.masked_fill(support >= layout.num_gated, 0.0)
            bits = 4 if self.bits <= 8 else self.bits  # log_alpha varies little before scaling, and is mostly at its limits after it
            packet.fields["log_alpha"] = quantize(inside, bits, draw, "log_alpha", zero_free=False)
            packet.scalars["default_gate"] = mean_off_support(outside, support, layout.size).to(torch.float32)
        else:
            gate = self.sample_gates(outside.scatter(-1, support, inside), layout, draw, "message gates", self.message_gate_noise).value
            gate = torch.cat((gate[..., : layout.num_gated], torch.ones_like(gate[..., layout.num_gated :])), dim=-1)
            packet.fields["gates"] = quantize_gates(gate.gather(-1, support), self.bits, draw, "gates")
            packet.scalars["default_gate"] = mean_off_support(gate, support, layout.size).clamp_min(self.min_default_gate).to(torch.float32)
        return packet

    def decode_sparse(self, packet: Packet, dtype: torch.dtype) -> dict[str, SparseVector]:
        """Return theta and its gates; the default gate is that of all weights outside the support."""
        theta, gate = (packet.fields[name].decode(dtype) for name in ("weights", self.gate_field))
        if self.gate_encoding is GateEncoding.GATES:
            theta = theta * gate.clamp_min(GATE_MARGIN)
        default = packet.scalars["default_gate"].to(dtype)
        vectors = {"theta": SparseVector(theta, packet.support), "gate": SparseVector(gate, packet.support, default)}
        if self.dual_location is DualLocation.CLIENT:
            vectors["multiplier"] = SparseVector(packet.scalars["multiplier"].to(dtype)[..., None])
        return vectors

    def log_alpha_from(self, gate: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """Return phi of a received gate: the inverse without noise (L171), or log_alpha itself."""
        if self.gate_encoding is GateEncoding.LOG_ALPHA:
            return gate
        invert = gates.paper_inverse if self.gate_inverse is GateInverse.PAPER else gates.exact_inverse
        return invert(self.shape, gate).clamp(-self.log_alpha_limit, self.log_alpha_limit)

    @property
    def gate_field(self) -> str:
        """The field of a message that represents the gates."""
        return "gates" if self.gate_encoding is GateEncoding.GATES else "log_alpha"

    @property
    def needed_settings(self) -> dict[str, str]:
        """Options without effect beside the others: messages with log_alpha contain no gates."""
        if self.gate_encoding is GateEncoding.GATES:
            return super().needed_settings
        return super().needed_settings | dict.fromkeys(("gate_inverse", "message_gate_noise", "min_default_gate"), "gate-encoding gates")

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The weights, their gates and the default gate, and the multiplier of a client that has its own."""
        fields = frozenset({"weights", self.gate_field, "default_gate"})
        return fields | {"multiplier"} if self.dual_location is DualLocation.CLIENT else fields

    @property
    def formula_note(self) -> str | None:
        """The paper's inverse is infinite at gates of 0 and 1, which are frequent (decision E1)."""
        if self.gate_encoding is GateEncoding.LOG_ALPHA or self.gate_inverse is GateInverse.EXACT:
            return None
        return f"log_alpha = beta' log(z / (1 - z)) (L171) is infinite at z = 0 and 1; received gates stay {GATE_MARGIN:g} away from both"

    @property
    def engine_support(self) -> EngineSupport:
        """Gates without a gradient drift with the constraint; weights outside a message have one common gate."""
        return gated_support(
            self,
            deterministic=self.local_gate_noise is GateNoise.DETERMINISTIC,
            unseen_weights_are_equal=self.gate_encoding is GateEncoding.LOG_ALPHA,
            has_client_multiplier=self.dual_location is DualLocation.CLIENT,
        )


def clip_received_gates(gate: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
    """Return gates of at least GATE_MARGIN, and 1 at ungated coordinates."""
    return torch.cat((gate[..., : layout.num_gated].clamp_min(GATE_MARGIN), torch.ones_like(gate[..., layout.num_gated :])), dim=-1)


def mean_off_support(values: Float[Tensor, "*k n"], support: Int64[Tensor, "*k m"], size: int) -> Float[Tensor, "*k"]:
    """Return the mean of `size` values outside the support, or 0 if there are none. The last value represents all missing values."""
    num_outside = size - support.shape[-1]
    total = values.sum(-1) + (size - values.shape[-1]) * values[..., -1]
    return (total - values.gather(-1, support).sum(-1)) / num_outside if num_outside else torch.zeros_like(values[..., 0])
