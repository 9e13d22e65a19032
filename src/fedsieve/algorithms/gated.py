"""What the paper's two methods share: gates on weights, an L0 constraint with a multiplier, log_alpha scaling."""

from abc import ABC
from dataclasses import dataclass
from math import ceil, inf, log
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm, project_to_budget, require_at_least, require_fraction, require_positive
from fedsieve.core import budgets, constraint, gates, optimizers, schedules, topk
from fedsieve.core.constraint import ConstraintScale, DualUpdate
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT, GateAtTest, HardConcrete
from fedsieve.core.optimizers import Moments, initial_moments
from fedsieve.core.random import Draw
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling
from fedsieve.core.types import Batch, Clock, Layout, Objective

ASCENT_RATE, MIRROR_RATE = 5e-4, 1.0
"""Steps of the dual, unless they are typed."""
DUAL_STEPS_PER_EXCHANGE = 10
"""Natural steps an exchange: they cost no message, and as gates cool each of them moves density less."""
FINAL_COOLING = 1000.0
"""By how much the temperature of the gates has fallen at the end, where they are cooled (decision B5)."""


@runtime_checkable
class HasGates(Protocol):
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


class GateGradients(NamedTuple):
    """Gradients of the loss in theta~ and phi, and each client's step size."""

    weights: Tensor
    log_alpha: Tensor
    step_size: Tensor


def initial_log_alpha(initial_logit_density: float) -> float:
    """logit rho_init, around which log_alpha starts, inside its limits; refused where it is infinite."""
    require_positive(initial_logit_density=initial_logit_density)
    if not initial_logit_density < 1:
        raise ValueError(f"algorithm.initial-gate-probability must be below 1, its logit is infinite there; got {initial_logit_density}")
    return max(-LOG_ALPHA_LIMIT, min(log(initial_logit_density / (1 - initial_logit_density)), LOG_ALPHA_LIMIT))


def open_ungated(log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
    """log_alpha with the gates of free coordinates wide open."""
    if not layout.num_ungated:
        return log_alpha
    wide = torch.full_like(log_alpha[..., layout.num_gated :], LOG_ALPHA_LIMIT)
    return torch.cat((log_alpha[..., : layout.num_gated], wide), dim=-1)


def zero_ungated(log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
    """log_alpha with 0 at free coordinates, for a message: their limit would set the scale of all levels, and receivers know it."""
    if not layout.num_ungated:
        return log_alpha
    return torch.cat((log_alpha[..., : layout.num_gated], torch.zeros_like(log_alpha[..., layout.num_gated :])), dim=-1)


def gate_diagnostics(shape: HardConcrete, server: HasGates, density: float, kind: GateAtTest = GateAtTest.MEDIAN) -> dict[str, Tensor]:
    """What people ask of a server with gates: density as expected and at test time, the multiplier, the violation."""
    log_alpha = server.log_alpha[: server.layout.num_gated]
    probability = gates.active_probability(shape, log_alpha)
    return {
        "expected_density": probability.mean(),
        "test_density": (gates.compute_test_gates(shape, log_alpha, kind) > 0).to(probability).mean(),
        "multiplier": server.multiplier,
        "violation": probability.mean() - density,
    }


@dataclass(frozen=True, kw_only=True)
class Gated(BaseAlgorithm, ABC):
    """theta = theta~ * z with hard-concrete gates z (L60, L118-122)."""

    temperature: float = 0.66
    """beta' of the hard concrete distribution"""
    stretch_low: float = -0.1
    """gamma, where the stretched distribution begins"""
    stretch_high: float = 1.1
    """zeta, where it ends"""
    gate_samples: int = 1
    """R: gate samples per step"""
    test_gate: GateAtTest = GateAtTest.MEDIAN
    """gate of the finished model: the median, or without temperature too (plain)"""
    initial_gate_probability: float = 0.95
    """rho_init: log_alpha starts around its logit (below .17 every test-time gate starts closed)"""
    gate_rate: float = 0.01
    """learning rate of log_alpha"""
    constraint_scale: ConstraintScale = ConstraintScale.SUM
    """constraint in counts, or over the number of weights as in the paper"""
    dual_update: DualUpdate = DualUpdate.ASCENT
    """multiplier by ascent with restart, by ascent on log_alpha itself (mirror: FLoPS, falling schedule), solved exactly, or off"""
    dual_rate: float | None = None
    """step of the dual: over a round with ascent (none: 5e-4; the paper: about 1/size an exchange), below 2 with mirror (none: 1)"""
    log_alpha_scaling: LogAlphaScaling = LogAlphaScaling.ADDITIVE
    """how log_alpha is pushed apart at the top weights and elsewhere"""
    log_alpha_scaling_rate: float = 0.5
    """r: strength of that push per round"""
    scaling_start: float = 0.5
    """part of the rounds after which scaling begins"""
    entropy: float = 0.0
    """bonus on the entropy of the gates, which the paper's bound drops"""

    @property
    def milestones(self) -> dict[str, float]:
        """Where scaling begins, beside the schedule's turns."""
        return super().milestones | {"prune start": self.scaling_start}

    def __post_init__(self) -> None:
        """Refuse shapes that are no distribution and targets the clamp on log_alpha cannot reach."""
        super().__post_init__()
        require_positive(temperature=self.temperature, gate_rate=self.gate_rate)
        initial_log_alpha(self.initial_gate_probability)
        require_at_least(1, gate_samples=self.gate_samples)
        require_at_least(0, dual_rate=self.dual_learning_rate, log_alpha_scaling_rate=self.log_alpha_scaling_rate, entropy=self.entropy)
        require_fraction(scaling_start=self.scaling_start)
        if self.dual_rate is not None and self.dual_update in (DualUpdate.BISECTION, DualUpdate.OFF):
            raise ValueError(
                f"algorithm.dual-rate is the step of an ascent, and dual {self.dual_update} has none; leave {self.dual_rate:g} out"
            )
        if self.dual_update is DualUpdate.MIRROR and self.dual_learning_rate >= 2:
            raise ValueError(
                f"algorithm.dual-rate of dual mirror must be below 2, or steps overshoot more and more; got {self.dual_rate:g}"
            )
        if self.constraint_scale is ConstraintScale.MEAN and not self.uses_multiplier:
            raise ValueError(
                f"algorithm.constraint-scale mean is how a multiplier weighs on gates, and with dual {self.dual_update} none does; leave it out"
            )
        if not self.stretch_low < 0 < 1 < self.stretch_high:
            raise ValueError(
                f"algorithm.stretch-low must be below 0 and algorithm.stretch-high above 1, or no gate is ever 0 or 1; got {self.stretch_low}, {self.stretch_high}"
            )
        least = constraint.min_density(self.shape)
        if self.density < least:
            raise ValueError(
                f"density {self.density:g} is out of reach: gates with these settings stay open with probability {least:.2g} or more; "
                f"ask for more, or lower algorithm.temperature"
            )

    @property
    def shape(self) -> HardConcrete:
        """The gates' distribution."""
        return HardConcrete(self.temperature, self.stretch_low, self.stretch_high)

    def normalize_log_alpha(self, log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
        """log_alpha inside its limits, one value a group (rounding draws them apart), free gates wide open."""
        inside = log_alpha.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
        return open_ungated(budgets.broadcast_within_groups(inside, layout.groups), layout)

    def all_gates_start_closed(self) -> bool:
        """Whether every test-time gate begins at exactly 0 (decision A6)."""
        start = torch.tensor([initial_log_alpha(self.initial_gate_probability)])
        return bool(gates.compute_test_gates(self.shape, start, self.test_gate)[0] == 0)

    def gate_gradients(
        self, objective: Objective, weights: Float[Tensor, "k p"], log_alpha: Float[Tensor, "k p"], batch: Batch, clock: Clock, draw: Draw
    ) -> GateGradients:
        """grad_theta~ = g z and grad_phi = g theta~ dz/dphi, averaged over R gate samples (L114, L151)."""
        slopes = []
        for r in range(self.gate_samples):
            gate = self.local_gates(log_alpha, objective.layout, draw, f"gates {r}")
            loss, gradient = objective.gradient(weights * gate.value, batch)
            by_weight, by_gate = gates.chain_rule(gradient, weights, gate)
            size = self.step_size(loss, by_weight, batch, clock)
            if self.max_gradient_norm < inf:
                by_weight, by_gate = gates.chain_rule(optimizers.clip_norm(gradient, self.max_gradient_norm), weights, gate)
            slopes.append(GateGradients(by_weight, budgets.sum_within_groups(by_gate, objective.layout.groups), size))
        if self.gate_samples == 1:
            return slopes[0]
        return GateGradients(*(torch.stack(parts).mean(0) for parts in zip(*slopes, strict=True)))

    def local_gates(self, log_alpha: Float[Tensor, "k p"], layout: Layout, draw: Draw, purpose: str) -> gates.Gates:
        """The gates of one step: sampled."""
        return self.sample_gates(log_alpha, layout, draw, purpose)

    def sample_gates(self, log_alpha: Float[Tensor, "*k p"], layout: Layout, draw: Draw, purpose: str) -> gates.Gates:
        """Gates drawn anew, one draw a group."""
        return gates.sample(self.shape, log_alpha, budgets.broadcast_within_groups(draw(purpose, log_alpha.shape[-1]), layout.groups))

    def penalty_gradient(
        self, log_alpha: Float[Tensor, "*k p"], multiplier: Float[Tensor, "*#k"], size: int, groups: Tensor | None
    ) -> Float[Tensor, "*k p"]:
        """lambda grad_phi L_con over `size` weights, minus the entropy bonus; a shared gate feels all its weights."""
        slope = constraint.penalty_gradient(self.shape, log_alpha, multiplier, self.constraint_scale, size)
        if self.entropy:
            slope = slope - self.entropy * gates.entropy_derivative(self.shape, log_alpha)
        return budgets.sum_within_groups(slope, groups)

    def step_log_alpha(
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
            gradient, multiplier = gradient + self.penalty_gradient(log_alpha, multiplier, size, groups), torch.zeros_like(multiplier)
        return constraint.step_log_alpha(self.shape, log_alpha, gradient, multiplier, self.constraint_scale, size, rate)

    @property
    def dual_learning_rate(self) -> float:
        """The rate of the dual: as typed, or what goes with its kind."""
        if self.dual_rate is not None:
            return self.dual_rate
        return MIRROR_RATE if self.dual_update is DualUpdate.MIRROR else ASCENT_RATE

    def ascend(self, multiplier: Float[Tensor, ""], log_alpha: Float[Tensor, " p"], layout: Layout, clock: Clock) -> Float[Tensor, ""]:
        """One dual step on the violation of these gates: FLoPS gives those before the primal step (B2), PA the aggregated ones (B3)."""
        if not self.uses_multiplier:
            return multiplier
        gated, density = log_alpha[: layout.num_gated] if layout.num_ungated else log_alpha, self.message_density(clock)
        return constraint.ascend_on_gap(self.shape, gated, multiplier, density, self.dual_learning_rate / self.exchanges_per_round)

    @property
    def uses_multiplier(self) -> bool:
        """Whether a multiplier pulls on the gates."""
        return self.dual_update is DualUpdate.ASCENT

    def mirror_dual_step(
        self, log_alpha: Float[Tensor, " p"], multiplier: Float[Tensor, ""], layout: Layout, clock: Clock
    ) -> tuple[Float[Tensor, " p"], Float[Tensor, ""]]:
        """The mirror dual: its steps taken from every log_alpha; the multiplier is all of them so far."""
        if self.dual_update is not DualUpdate.MIRROR:
            return log_alpha, multiplier
        charged = constraint.cool(self.shape, log_alpha, self.cooling_factor(clock) ** (1 / self.exchanges_per_round))
        for _ in range(DUAL_STEPS_PER_EXCHANGE):
            step = constraint.mirror_step(self.shape, charged[: layout.num_gated], self.message_density(clock), self.dual_learning_rate)
            charged, multiplier = charged - step, multiplier + step
        return self.normalize_log_alpha(charged, layout), multiplier

    def solve_dual(self, log_alpha: Float[Tensor, " p"], layout: Layout, clock: Clock) -> Float[Tensor, " p"]:
        """The exact dual: one shift of all log_alpha that makes the constraint tight."""
        if self.dual_update is not DualUpdate.BISECTION:
            return log_alpha
        colder = constraint.cool(self.shape, log_alpha, self.cooling_factor(clock))
        shift = constraint.bisect_shift(self.shape, colder[: layout.num_gated], self.message_density(clock))
        return open_ungated(constraint.shift_log_alpha(colder, shift), layout)

    def cooling_factor(self, clock: Clock) -> float:
        """By how much gates are surer of themselves after this round, all alike, once a falling target is reached (decision B5).

        Of weights that matter alike some then stay, and open test-time gates come to be as many as the dual expects.
        """
        reached = max(ceil(self.anneal_end * clock.num_rounds - 1e-9), self.warmup)
        return (
            1.0
            if self.resolved_schedule is DensitySchedule.CONSTANT or clock.round < reached
            else FINAL_COOLING ** (1 / (clock.num_rounds - reached))
        )

    def importance(self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """|theta~| times the test-time gate (decision C3)."""
        return gates.gated_magnitude(self.shape, weights, log_alpha, self.test_gate, GATE_MARGIN)

    def test_gates_above_zero(self, log_alpha: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """The test-time gate, a hair above 0: closed gates are then ranked by weight, and a kept weight is never zero (C5)."""
        return gates.compute_test_gates(self.shape, log_alpha, self.test_gate, min_gate=GATE_MARGIN)

    def top_mask(
        self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, clock: Clock
    ) -> Bool[Tensor, "*k p"]:
        """The top m of theta."""
        return topk.top_mask(self.importance(weights, log_alpha), self.message_budget(layout, clock), layout.groups)

    def scale_log_alpha(self, log_alpha: Float[Tensor, "*k p"], chosen: Bool[Tensor, "*k p"] | bool) -> Float[Tensor, "*k p"]:
        """log_alpha pushed up where chosen and down elsewhere (L155-157)."""
        return schedules.scale_log_alpha(log_alpha, chosen, self.log_alpha_scaling_rate, self.log_alpha_scaling)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """theta~ as given, log_alpha around logit rho_init, lambda = 0 (L140)."""
        noise = budgets.broadcast_within_groups(draw("log_alpha", layout.size), layout.groups)
        log_alpha = gates.initial_log_alpha(noise, self.initial_gate_probability).clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
        return Server(
            weights,
            open_ungated(log_alpha, layout),
            torch.zeros_like(weights[0]),
            initial_moments(weights),
            initial_moments(weights),
            layout,
        )

    def parameters(self, server: HasGates) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate, the m largest (decision C5)."""
        return project_to_budget(
            self.final_budget(server.layout), server.weights * self.test_gates_above_zero(server.log_alpha), server.layout
        )

    def unprojected_parameters(self, server: HasGates) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate."""
        return server.weights * gates.compute_test_gates(self.shape, server.log_alpha, self.test_gate)

    def diagnostics(self, server: HasGates) -> dict[str, Tensor]:
        """Density as expected and at test time, the multiplier, the violation."""
        return gate_diagnostics(self.shape, server, self.density, self.test_gate)
