"""FLoPS-PA, Algorithm 2 (L171-204): parameters and gates averaged once a round, the top m of both in each message."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.base import fraction, server_step
from fedsieve.algorithms.gated import Gated
from fedsieve.core import constraint, gates, selection
from fedsieve.core.constraint import Dual
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT
from fedsieve.core.optimizers import Moments, Optimizer
from fedsieve.core.packets import Packet, Part, round_gates, round_values, sparse_packet
from fedsieve.core.random import Draw
from fedsieve.core.touched import Tables
from fedsieve.core.types import Batch, Clock, Layout, Objective, Reply

LARGE_DRIFT = 0.01
"""A drift of log_alpha over a round, above which it is applied step by step."""


class GateNoise(StrEnum):
    """Whether a gate is drawn or taken at its median (decision E9)."""

    SAMPLED = "sampled"
    DETERMINISTIC = "deterministic"


class Inverse(StrEnum):
    """How log_alpha is read off a gate that was received."""

    PAPER = "paper"
    """beta' log(z / (1 - z)) (L171)"""
    EXACT = "exact"
    """the inverse of the median gate"""


class Message(StrEnum):
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

    rate: float = 1.5
    memory: float = 0.95
    initial_logit_density: float = 0.9
    scaling_rate: float = 0.02
    prune_start: float = 0.0
    step_gates: GateNoise = GateNoise.DETERMINISTIC
    """gates in local steps: sampled, or at their median"""
    message_gates: GateNoise = GateNoise.SAMPLED
    """gates in messages: sampled, or at their median"""
    inverse: Inverse = Inverse.PAPER
    """how log_alpha is read off a received gate"""
    message: Message = Message.LOG_ALPHA
    """what is sent for a gate: z, or log_alpha itself"""
    rest_floor: float = 1e-3
    """least gate of the weights that are not sent: at exactly 0 the support could never change"""

    def __post_init__(self) -> None:
        """A rest gate is a gate; and a message says too little of the gates for an ascent on them."""
        super().__post_init__()
        fraction(rest_floor=self.rest_floor)
        if self.dual is Dual.NATURAL:
            raise ValueError("algorithm.dual natural needs every gate, and messages of flops-pa name a few; use exact, or method flops")

    def client_gates(self, log_alpha: Float[Tensor, "k p"], layout: Layout, draw: Draw, purpose: str) -> gates.Gates:
        """The gates of a local step."""
        return self.gates(log_alpha, layout, draw, purpose, self.step_gates)

    def gates(self, log_alpha: Float[Tensor, "*k p"], layout: Layout, draw: Draw, purpose: str, kind: GateNoise) -> gates.Gates:
        """Gates, drawn or at their median."""
        if kind is GateNoise.DETERMINISTIC:
            return gates.deterministic(self.shape, log_alpha)
        return self.sampled(log_alpha, layout, draw, purpose)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """theta~ as given, log_alpha around logit rho_init, theta = theta~ z (L175)."""
        start = super().init(layout, weights, draw)
        theta = weights if self.message is Message.LOG_ALPHA else weights * gates.deterministic(self.shape, start.log_alpha).value
        return Server(theta, weights, start.log_alpha, start.multiplier, start.moments, layout)

    # The message, the same both ways (L171)

    def send(self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, clock: Clock, draw: Draw) -> Packet:
        """Scale log_alpha, draw z, send the top m of theta = theta~ z and their gates, and for the rest the mean gate.

        The pair on the wire is (theta~, z), from which the receiver forms theta: the same content as (theta, z), but rounding
        theta~ does no harm where z is near 0.
        """
        support = selection.top_places(self.score(weights, log_alpha), self.message_budget(layout, clock), layout.groups, layout.order)
        inside, outside = log_alpha.gather(-1, support), log_alpha
        if clock.round >= max(self.prune_start * clock.rounds, self.warmup):
            inside, outside = self.scaled(inside, True), self.scaled(outside, False)
        packet = sparse_packet(support, {"weights": weights}, self.bits, draw)
        if self.message is Message.LOG_ALPHA:
            if layout.free:  # their limit would set the scale of all levels, and receivers know it
                inside = inside.masked_fill(support >= layout.gated, 0.0)
            packet.fields["log_alpha"] = round_values(inside, self.bits, draw, "log_alpha", zero_free=False)
            packet.scalars["rest_gate"] = mean_outside(outside, support, layout.size).to(torch.float32)
        else:
            gate = self.gates(outside.scatter(-1, support, inside), layout, draw, "message gates", self.message_gates).value
            gate = torch.cat((gate[..., : layout.gated], torch.ones_like(gate[..., layout.gated :])), dim=-1)
            packet.fields["gates"] = round_gates(gate.gather(-1, support), self.bits, draw, "gates")
            packet.scalars["rest_gate"] = mean_outside(gate, support, layout.size).clamp_min(self.rest_floor).to(torch.float32)
        return packet

    @property
    def gate_field(self) -> str:
        """What stands for a gate in a message."""
        return "gates" if self.message is Message.GATES else "log_alpha"

    def receive(self, packet: Packet, dtype: torch.dtype) -> tuple[Float[Tensor, "*k p"], Float[Tensor, "*k p"]]:
        """theta~ (zero where the packet is silent) and z, or log_alpha where that is what was sent."""
        return packet.dense("weights", dtype), packet.dense(self.gate_field, dtype, packet.scalar("rest_gate", dtype))

    def said(self, packet: Packet, dtype: torch.dtype) -> dict[str, Part]:
        """theta and its gates; of gates a packet is never silent, the rest gate speaks for those it does not name."""
        theta, gate = (packet.fields[name].decode(dtype) for name in ("weights", self.gate_field))
        if self.message is Message.GATES:
            theta = theta * gate.clamp_min(GATE_MARGIN)
        return {"theta": Part(theta, packet.support), "gate": Part(gate, packet.support, packet.scalar("rest_gate", dtype))}

    def log_alpha_of(self, gate: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """phi from what was received: z inverted, noise ignored (L171), or log_alpha itself."""
        if self.message is Message.LOG_ALPHA:
            return gate
        invert = gates.paper_inverse if self.inverse is Inverse.PAPER else gates.exact_inverse
        return invert(self.shape, gate).clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)

    @staticmethod
    def opening(gate: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
        """Received gates off 0, and wide open where there are none."""
        return torch.cat((gate[..., : layout.gated].clamp_min(GATE_MARGIN), torch.ones_like(gate[..., layout.gated :])), dim=-1)

    # The round

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """The top m of the server's theta and z, and lambda while it is ascended."""
        packet = self.send(server.weights, server.log_alpha, server.layout, clock, draw)
        if self.weighs:
            packet.scalars["multiplier"] = server.multiplier.to(torch.float32)
        return packet

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """theta~ and phi from the broadcast (L197)."""
        weights, gate = self.receive(packet, dtype)
        multiplier = packet.scalar("multiplier", dtype) if self.weighs else torch.zeros_like(weights[..., 0])
        return Client(weights, self.settled(self.log_alpha_of(gate), layout), multiplier, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """One local SGD step on (theta~, phi) (L198)."""
        weights, log_alpha, multiplier, layout = client
        size, groups, rate = layout.gated, objective.layout.groups, self.gate_rate * self.decay(clock)
        if self.plain and groups is None:
            gate = self.client_gates(log_alpha, objective.layout, draw, "gates 0")
            loss, gradient = objective.gradient(weights * gate.value, batch)
            step = self.step_size(loss, gradient, batch, clock, gate.value)
            both = constraint.joint_step(self.shape, weights, log_alpha, gradient, gate, step, multiplier, self.constraint, size, rate)
            return Client(*both, multiplier, layout)
        slopes = self.pull(objective, weights, log_alpha, batch, clock, draw)
        moved = torch.addcmul(weights, slopes.size, slopes.weights, value=-1)
        return Client(moved, self.turned(log_alpha, slopes.log_alpha, multiplier, size, groups, rate), multiplier, layout)

    @property
    def plain(self) -> bool:
        """Whether a step follows the gradient of one draw of gates as it is."""
        return self.samples == 1 and self.clip == inf and not self.entropy

    def step_in_place(self, objective: Objective, client: Client, at: Int64[Tensor, " n"], batch: Batch, clock: Clock) -> bool:
        """The same step with gates at their median, each weight with its own; nothing is copied out and back where it is compiled."""
        plain = self.plain and self.step_gates is GateNoise.DETERMINISTIC
        if not plain or objective.layout.free or objective.layout.groups is not None:
            return False
        tables = Tables(*(part.view(-1, objective.outputs) for part in (client.weights, client.log_alpha)))
        theta, value, lever = tables.opened(self.shape, at)
        loss, gradient = objective.gradient(theta, batch)
        by_weight, size = value.mul_(gradient), client.layout.gated
        step, rate = self.step_size(loss, by_weight, batch, clock), self.gate_rate * self.decay(clock)
        tables.step(self.shape, at, by_weight, (gradient, lever), step, client.multiplier, self.constraint, size, rate)
        return True

    @property
    def rest_alike(self) -> bool:
        """Of weights that are not sent a message says one number; only gates drawn for it differ."""
        return self.message is Message.LOG_ALPHA

    @property
    def reply_fields(self) -> frozenset[str]:
        """Weights, what stands for their gates, and the rest gate."""
        return frozenset({"weights", self.gate_field, "rest_gate"})

    def client_rest(self, client: Client, missed: Float[Tensor, "k p"], clock: Clock) -> Client:
        """The constraint's drift of gates that sparse rows did not touch, at once: exact to first order, step by step where large.

        A drift of lambda/p a step could round to nothing in float32; summed over a round it does not.
        """
        rate = self.gate_rate * self.decay(clock)
        pull = float(client.multiplier.abs().max()) + self.entropy
        steps = 1 if rate * self.steps * pull < LARGE_DRIFT else self.steps
        log_alpha = client.log_alpha
        if steps == 1 and not self.entropy and client.layout.groups is None:
            form, size = self.constraint, client.layout.gated
            return client._replace(log_alpha=constraint.drift(self.shape, log_alpha, missed, client.multiplier, form, size, rate))
        for step in range(steps):
            times = missed if steps == 1 else (missed > step).to(log_alpha)
            drift = self.regularize(log_alpha, client.multiplier, client.layout.gated, client.layout.groups).mul_(times)
            log_alpha = log_alpha.sub(drift, alpha=rate)
        return client._replace(log_alpha=log_alpha.clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Gates drawn once more, then the message (L199-200)."""
        return self.send(client.weights, client.log_alpha, client.layout, clock, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta and z averaged, theta~ = theta / z, phi from z (L183-186); what the broadcast left out is remembered (E5)."""
        by_gate = self.message is Message.GATES
        merged = self.merged(packet, replies, server.theta, clock, draw)
        gate = self.opening(merged["gate"], server.layout) if by_gate else merged["gate"]
        theta, moments = self.moved_on(server, packet, merged["theta"])
        log_alpha = self.tighten(self.settled(self.log_alpha_of(gate), server.layout), server.layout, clock)
        multiplier = self.ascend(server.multiplier, log_alpha, server.layout, clock)
        weights = theta / gate if by_gate else theta
        return server._replace(theta=theta, weights=weights, log_alpha=log_alpha, multiplier=multiplier, moments=moments)

    def moved_on(self, server: Server, packet: Packet, mean: Float[Tensor, " p"]) -> tuple[Float[Tensor, " p"], Moments]:
        """What was sent, moved towards the cohort's mean, and what was not, times `memory`."""
        at = packet.support
        if self.server is not Optimizer.SGD or at is None:
            sent = packet.only(server.theta)
            theta, moments = server_step(self, server.moments, sent, mean)
            return torch.add(theta, server.theta - sent, alpha=self.memory), moments
        sent = server.theta[at]  # elsewhere the step goes from 0, to the mean times the rate
        moved = sent - self.server_rate * (sent - mean[at])
        theta = mean if self.server_rate == 1 else self.server_rate * mean
        return torch.add(theta, server.theta, alpha=self.memory).scatter_(0, at, moved), server.moments

    def close(self, server: Server, clock: Clock) -> Server:
        """Scaling happens in each message, on both sides, from the first round (L171)."""
        return server


def mean_outside(values: Float[Tensor, "*k n"], support: Int64[Tensor, "*k m"], size: int) -> Float[Tensor, "*k"]:
    """The mean of what was not chosen of `size` values; 0 where everything was. The last of fewer values stands for those missing."""
    outside = size - support.shape[-1]
    total = values.sum(-1) + (size - values.shape[-1]) * values[..., -1]
    return (total - values.gather(-1, support).sum(-1)) / outside if outside else torch.zeros_like(values[..., 0])
