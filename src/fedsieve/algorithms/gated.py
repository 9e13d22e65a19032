"""What the paper's two methods share: gates on weights, an L0 constraint with a multiplier, log_alpha scaling."""

from abc import ABC
from dataclasses import dataclass
from math import ceil, inf, log
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.algorithms.base import Method, above_zero, at_least, exactly, fraction
from fedsieve.core import constraint, gates, optimizers, selection
from fedsieve.core.constraint import Dual, Form
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT, GateAtTest, HardConcrete
from fedsieve.core.optimizers import Moments, no_moments
from fedsieve.core.random import Draw
from fedsieve.core.selection import Scaling, Schedule
from fedsieve.core.types import Batch, Clock, Layout, Objective

ASCENT_RATE, NATURAL_RATE = 5e-4, 1.0
"""Steps of the dual, unless they are typed."""
PRICES = 10
"""Natural steps an exchange: they cost no message, and as gates cool each of them moves density less."""
COLD = 1000.0
"""By how much the temperature of the gates has fallen at the end, where they are cooled (decision B5)."""


@runtime_checkable
class Holder(Protocol):
    """What a server with gates holds, whichever method it runs: theta~ is `weights`."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    layout: Layout


class Server(NamedTuple):
    """theta~, log_alpha, lambda, and what the optimizers remember."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    moments: Moments
    gate_moments: Moments
    layout: Layout


class Slopes(NamedTuple):
    """Gradients of the loss in theta~ and phi, and each client's step size."""

    weights: Tensor
    log_alpha: Tensor
    size: Tensor


def initial_log_alpha(initial_logit_density: float) -> float:
    """logit rho_init, around which log_alpha starts, inside its limits; refused where it is infinite."""
    above_zero(initial_logit_density=initial_logit_density)
    if not initial_logit_density < 1:
        raise ValueError(f"algorithm.initial-logit-density must be below 1, its logit is infinite there; got {initial_logit_density}")
    return max(-LOG_ALPHA_LIMIT, min(log(initial_logit_density / (1 - initial_logit_density)), LOG_ALPHA_LIMIT))


def opened(log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
    """log_alpha with the gates of free coordinates wide open."""
    if not layout.free:
        return log_alpha
    wide = torch.full_like(log_alpha[..., layout.gated :], LOG_ALPHA_LIMIT)
    return torch.cat((log_alpha[..., : layout.gated], wide), dim=-1)


def silenced(log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
    """log_alpha with 0 at free coordinates, for a message: their limit would set the scale of all levels, and receivers know it."""
    if not layout.free:
        return log_alpha
    return torch.cat((log_alpha[..., : layout.gated], torch.zeros_like(log_alpha[..., layout.gated :])), dim=-1)


def facts(shape: HardConcrete, server: Holder, density: float, kind: GateAtTest = GateAtTest.MEDIAN) -> dict[str, Tensor]:
    """What people ask of a server with gates: density as expected and at test time, the multiplier, the violation."""
    log_alpha = server.log_alpha[: server.layout.gated]
    probability = gates.active_probability(shape, log_alpha)
    return {
        "expected_density": probability.mean(),
        "test_density": (gates.at_test_time(shape, log_alpha, kind) > 0).to(probability).mean(),
        "multiplier": server.multiplier,
        "violation": probability.mean() - density,
    }


@dataclass(frozen=True, kw_only=True)
class Gated(Method, ABC):
    """theta = theta~ * z with hard-concrete gates z (L60, L118-122)."""

    temperature: float = 0.66
    """beta' of the hard concrete distribution"""
    low: float = -0.1
    """gamma, where the stretched distribution begins"""
    high: float = 1.1
    """zeta, where it ends"""
    samples: int = 1
    """R: gate samples per step"""
    test_gate: GateAtTest = GateAtTest.MEDIAN
    """gate of the finished model: the median, or without temperature too (plain)"""
    initial_logit_density: float = 0.95
    """rho_init: log_alpha starts around its logit (below .17 every test-time gate starts closed)"""
    gate_rate: float = 0.01
    """learning rate of log_alpha"""
    constraint: Form = Form.COUNT
    """constraint in counts, or over the number of weights as in the paper"""
    dual: Dual = Dual.ASCENT
    """multiplier by ascent with restart, by ascent on log_alpha itself (natural: FLoPS, falling schedule), solved exactly, or off"""
    dual_rate: float | None = None
    """step of the dual: over a round with ascent (none: 5e-4; the paper: about 1/size an exchange), below 2 with natural (none: 1)"""
    scaling: Scaling = Scaling.ADDITIVE
    """how log_alpha is pushed apart at the top weights and elsewhere"""
    scaling_rate: float = 0.5
    """r: strength of that push per round"""
    prune_start: float = 0.5
    """part of the rounds after which scaling begins"""
    entropy: float = 0.0
    """bonus on the entropy of the gates, which the paper's bound drops"""

    @property
    def turns(self) -> dict[str, float]:
        """Where scaling begins, beside the schedule's turns."""
        return super().turns | {"prune start": self.prune_start}

    def __post_init__(self) -> None:
        """Refuse shapes that are no distribution and targets the clamp on log_alpha cannot reach."""
        super().__post_init__()
        above_zero(temperature=self.temperature, gate_rate=self.gate_rate)
        initial_log_alpha(self.initial_logit_density)
        at_least(1, samples=self.samples)
        at_least(0, dual_rate=self.dual_step, scaling_rate=self.scaling_rate, entropy=self.entropy)
        fraction(prune_start=self.prune_start)
        if self.dual_rate is not None and self.dual in (Dual.EXACT, Dual.OFF):
            raise ValueError(f"algorithm.dual-rate is the step of an ascent, and dual {self.dual} has none; leave {self.dual_rate:g} out")
        if self.dual is Dual.NATURAL and self.dual_step >= 2:
            raise ValueError(
                f"algorithm.dual-rate of dual natural must be below 2, or steps overshoot more and more; got {self.dual_rate:g}"
            )
        if self.constraint is Form.PAPER and not self.weighs:
            raise ValueError(
                f"algorithm.constraint paper is how a multiplier weighs on gates, and with dual {self.dual} none does; leave it out"
            )
        if not self.low < 0 < 1 < self.high:
            raise ValueError(
                f"algorithm.low must be below 0 and algorithm.high above 1, or no gate is ever 0 or 1; got {self.low}, {self.high}"
            )
        least = constraint.least_density(self.shape)
        if self.density < least:
            raise ValueError(
                f"density {self.density:g} is out of reach: gates with these settings stay open with probability {least:.2g} or more; "
                f"ask for more, or lower algorithm.temperature"
            )

    @property
    def shape(self) -> HardConcrete:
        """The gates' distribution."""
        return HardConcrete(self.temperature, self.low, self.high)

    def settled(self, log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
        """log_alpha inside its limits, one value a group (rounding draws them apart), free gates wide open."""
        inside = log_alpha.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
        return opened(selection.one_per_group(inside, layout.groups), layout)

    def starts_closed(self) -> bool:
        """Whether every test-time gate begins at exactly 0 (decision A6)."""
        start = torch.tensor([initial_log_alpha(self.initial_logit_density)])
        return bool(gates.at_test_time(self.shape, start, self.test_gate)[0] == 0)

    def pull(
        self, objective: Objective, weights: Float[Tensor, "k p"], log_alpha: Float[Tensor, "k p"], batch: Batch, clock: Clock, draw: Draw
    ) -> Slopes:
        """grad_theta~ = g z and grad_phi = g theta~ dz/dphi, averaged over R gate samples (L114, L151)."""
        slopes = []
        for r in range(self.samples):
            gate = self.client_gates(log_alpha, objective.layout, draw, f"gates {r}")
            loss, gradient = objective.gradient(weights * gate.value, batch)
            by_weight, by_gate = gates.chain(gradient, weights, gate)
            size = self.step_size(loss, by_weight, batch, clock)
            if self.clip < inf:
                by_weight, by_gate = gates.chain(optimizers.clipped(gradient, self.clip), weights, gate)
            slopes.append(Slopes(by_weight, selection.shared(by_gate, objective.layout.groups), size))
        if self.samples == 1:
            return slopes[0]
        return Slopes(*(torch.stack(parts).mean(0) for parts in zip(*slopes, strict=True)))

    def client_gates(self, log_alpha: Float[Tensor, "k p"], layout: Layout, draw: Draw, purpose: str) -> gates.Gates:
        """The gates of one step: sampled."""
        return self.sampled(log_alpha, layout, draw, purpose)

    def sampled(self, log_alpha: Float[Tensor, "*k p"], layout: Layout, draw: Draw, purpose: str) -> gates.Gates:
        """Gates drawn anew, one draw a group."""
        return gates.sample(self.shape, log_alpha, selection.one_per_group(draw(purpose, log_alpha.shape[-1]), layout.groups))

    def regularize(
        self, log_alpha: Float[Tensor, "*k p"], multiplier: Float[Tensor, "*#k"], size: int, groups: Tensor | None
    ) -> Float[Tensor, "*k p"]:
        """lambda grad_phi L_con over `size` weights, minus the entropy bonus; a shared gate feels all its weights."""
        slope = constraint.slope(self.shape, log_alpha, multiplier, self.constraint, size)
        if self.entropy:
            slope = slope - self.entropy * gates.entropy_slope(self.shape, log_alpha)
        return selection.shared(slope, groups)

    def turned(
        self,
        log_alpha: Float[Tensor, "k p"],
        gradient: Float[Tensor, "k p"],
        multiplier: Float[Tensor, " k"],
        size: int,
        groups: Tensor | None,
        rate: float,
    ) -> Float[Tensor, "k p"]:
        """phi one step down the loss and the constraint over `size` weights, inside its limits."""
        if self.entropy or groups is not None:
            gradient, multiplier = gradient + self.regularize(log_alpha, multiplier, size, groups), torch.zeros_like(multiplier)
        return constraint.descend(self.shape, log_alpha, gradient, multiplier, self.constraint, size, rate)

    @property
    def dual_step(self) -> float:
        """The rate of the dual: as typed, or what goes with its kind."""
        if self.dual_rate is not None:
            return self.dual_rate
        return NATURAL_RATE if self.dual is Dual.NATURAL else ASCENT_RATE

    def ascend(self, multiplier: Float[Tensor, ""], log_alpha: Float[Tensor, " p"], layout: Layout, clock: Clock) -> Float[Tensor, ""]:
        """One dual step on the violation of these gates: FLoPS gives those before the primal step (B2), PA the aggregated ones (B3)."""
        if not self.weighs:
            return multiplier
        gated, density = log_alpha[: layout.gated] if layout.free else log_alpha, self.message_density(clock)
        return constraint.dual_step(self.shape, gated, multiplier, density, self.dual_step / self.exchanges)

    @property
    def weighs(self) -> bool:
        """Whether a multiplier pulls on the gates."""
        return self.dual is Dual.ASCENT

    def charged(
        self, log_alpha: Float[Tensor, " p"], multiplier: Float[Tensor, ""], layout: Layout, clock: Clock
    ) -> tuple[Float[Tensor, " p"], Float[Tensor, ""]]:
        """The natural dual: its steps taken from every log_alpha; the multiplier is all of them so far."""
        if self.dual is not Dual.NATURAL:
            return log_alpha, multiplier
        charged = constraint.cooled(self.shape, log_alpha, self.cooling(clock) ** (1 / self.exchanges))
        for _ in range(PRICES):
            step = constraint.price(self.shape, charged[: layout.gated], self.message_density(clock), self.dual_step)
            charged, multiplier = charged - step, multiplier + step
        return self.settled(charged, layout), multiplier

    def tighten(self, log_alpha: Float[Tensor, " p"], layout: Layout, clock: Clock) -> Float[Tensor, " p"]:
        """The exact dual: one shift of all log_alpha that makes the constraint tight."""
        if self.dual is not Dual.EXACT:
            return log_alpha
        colder = constraint.cooled(self.shape, log_alpha, self.cooling(clock))
        shift = constraint.exact_shift(self.shape, colder[: layout.gated], self.message_density(clock))
        return opened(constraint.shifted(colder, shift), layout)

    def cooling(self, clock: Clock) -> float:
        """By how much gates are surer of themselves after this round, all alike, once a falling target is reached (decision B5).

        Of weights that matter alike some then stay, and open test-time gates come to be as many as the dual expects.
        """
        reached = max(ceil(self.schedule_end * clock.rounds - 1e-9), self.warmup)
        return 1.0 if self.course is Schedule.CONSTANT or clock.round < reached else COLD ** (1 / (clock.rounds - reached))

    def score(self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """|theta~| times the test-time gate (decision C3)."""
        return gates.magnitude(self.shape, weights, log_alpha, self.test_gate, GATE_MARGIN)

    def open_gate(self, log_alpha: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """The test-time gate, a hair above 0: closed gates are then ranked by weight, and a kept weight is never zero (C5)."""
        return gates.at_test_time(self.shape, log_alpha, self.test_gate, least=GATE_MARGIN)

    def chosen(
        self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, clock: Clock
    ) -> Bool[Tensor, "*k p"]:
        """The top m of theta."""
        return selection.top(self.score(weights, log_alpha), self.message_budget(layout, clock), layout.groups)

    def scaled(self, log_alpha: Float[Tensor, "*k p"], chosen: Bool[Tensor, "*k p"] | bool) -> Float[Tensor, "*k p"]:
        """log_alpha pushed up where chosen and down elsewhere (L155-157)."""
        return selection.scale_log_alpha(log_alpha, chosen, self.scaling_rate, self.scaling)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """theta~ as given, log_alpha around logit rho_init, lambda = 0 (L140)."""
        noise = selection.one_per_group(draw("log_alpha", layout.size), layout.groups)
        log_alpha = gates.initial(noise, self.initial_logit_density).clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
        return Server(weights, opened(log_alpha, layout), torch.zeros_like(weights[0]), no_moments(weights), no_moments(weights), layout)

    def theta(self, server: Holder) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate, the m largest (decision C5)."""
        return exactly(self.final_budget(server.layout), server.weights * self.open_gate(server.log_alpha), server.layout)

    def full_theta(self, server: Holder) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate."""
        return server.weights * gates.at_test_time(self.shape, server.log_alpha, self.test_gate)

    def info(self, server: Holder) -> dict[str, Tensor]:
        """Density as expected and at test time, the multiplier, the violation."""
        return facts(self.shape, server, self.density, self.test_gate)
