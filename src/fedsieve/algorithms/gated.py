"""What FLoPS and FLoPS-PA share: gated weights, the density constraint and its multiplier, log-alpha scaling.

Hard concrete gates are of Louizos et al. 2018, arXiv 1712.01312; gates under a constraint of Gallego-Posada et al. 2022, arXiv 2208.04425.
"""

from abc import ABC
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import ceil, inf
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.log_alpha import HasGates, gate_diagnostics, initial_log_alpha, open_nonzero, open_ungated
from fedsieve.algorithms.option_rules import require_at_least, require_fraction, require_positive
from fedsieve.algorithms.recipes import Recipe
from fedsieve.core import budgets, constraint, gates, optimizers, schedules, topk
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.batches import BatchSampling
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.constraint import ConstraintScale, DualUpdate
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT, GateAtTest, HardConcrete
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.protocols import Objective
from fedsieve.core.random import Draw
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling
from fedsieve.core.types import Batch, Clock, Layout

ASCENT_RATE, MIRROR_RATE = 5e-4, 1.0
"""Default learning rates of the dual variable."""
DUAL_STEPS_PER_EXCHANGE = 10
"""Mirror ascent steps per exchange: they need no message, and each one changes the density less as gates cool."""
FINAL_COOLING = 1000.0
"""The factor by which the temperature of the gates falls until the last round, if gates are cooled (decision B5)."""

PAPER_OPTIONS: dict[str, Any] = {
    "client_weighting": ClientWeighting.UNIFORM,
    "default_max_norm_ratio": inf,
    "batch_sampling": BatchSampling.INDEPENDENT,
    "step_rule": StepRule.CONSTANT,
    "final_learning_rate_fraction": 1.0,
    "max_gradient_norm": inf,
    "server_optimizer": Optimizer.SGD,
    "bits": 32,
    "sparsity_allocation": BudgetRule.GLOBAL,
    "density_schedule": DensitySchedule.CONSTANT,
    "warmup": 0,
    "gate_samples": 1,
    "test_gate": GateAtTest.NO_TEMPERATURE,
    "constraint_scale": ConstraintScale.MEAN,
    "dual_update": DualUpdate.ASCENT,
    "dual_rate": None,
    "log_alpha_scaling": LogAlphaScaling.LITERAL,
    "log_alpha_limit": inf,
    "entropy": 0.0,
}
"""What the paper states for both algorithms, also if it is our default: a change of our defaults does not change the paper."""


class GateNoise(StrEnum):
    """Whether a gate is sampled or replaced by its median (decision E9)."""

    SAMPLED = "sampled"
    DETERMINISTIC = "deterministic"


class GateGradients(NamedTuple):
    """Gradients of the loss in theta~ and phi, and each client's step size."""

    weights: Tensor
    log_alpha: Tensor
    step_size: Tensor


@dataclass(frozen=True, kw_only=True)
class GatedAlgorithm(BaseAlgorithm, ABC):
    """theta = theta~ * z with hard concrete gates z (L60, L118-122)."""

    weight_fields: ClassVar[tuple[str, ...]] = ("weights",)
    paper_dual_rate: ClassVar[float]
    """the paper's eta_lambda per exchange, in units of 1/|theta|"""

    temperature: float = 0.66
    """beta' of the hard concrete distribution"""
    stretch_low: float = -0.1
    """gamma, the lower end of the stretched distribution"""
    stretch_high: float = 1.1
    """zeta, the upper end of the stretched distribution"""
    gate_samples: int = 1
    """R: gate samples per step"""
    test_gate: GateAtTest = GateAtTest.MEDIAN
    """test-time gate: the median, or the gate without temperature"""
    initial_gate_probability: float = 0.95
    """rho_init: log_alpha is initialized around logit(rho_init); below .17 all test-time gates are closed at the start"""
    gate_rate: float = 0.01
    """learning rate of log_alpha"""
    constraint_scale: ConstraintScale = ConstraintScale.SUM
    """whether the penalty is the sum over all gates, or their mean as in the paper"""
    dual_update: DualUpdate = DualUpdate.ASCENT
    """how the multiplier is found: ascent with restarts, mirror ascent on log_alpha (FLoPS, annealed density), bisection, or off"""
    dual_rate: float | None = None
    """learning rate of the dual variable per round (default: 5e-4 for ascent, the paper's with the mean scale; 1, at most 2, for mirror)"""
    log_alpha_scaling: LogAlphaScaling = LogAlphaScaling.LINEAR
    """how log_alpha of the top m weights and of the others is pushed apart"""
    log_alpha_scaling_rate: float = 0.5
    """r: strength of the literal scaling"""
    scaling_start: float = 0.5
    """fraction of the rounds after which scaling starts"""
    log_alpha_limit: float = LOG_ALPHA_LIMIT
    """log_alpha is clamped to plus or minus this limit; inf does not clamp, as in the paper"""
    entropy: float = 0.0
    """weight of the gates' entropy, which the paper's bound drops"""

    def __post_init__(self) -> None:
        """Validate the options: the gates need a valid distribution, and the clamp on log_alpha must allow the density."""
        super().__post_init__()
        require_positive(temperature=self.temperature, gate_rate=self.gate_rate, log_alpha_limit=self.log_alpha_limit)
        initial_log_alpha(self.initial_gate_probability)
        require_at_least(1, gate_samples=self.gate_samples)
        require_at_least(0, dual_rate=self.dual_rate or 0, log_alpha_scaling_rate=self.log_alpha_scaling_rate, entropy=self.entropy)
        require_fraction(scaling_start=self.scaling_start)
        if self.dual_rate is not None and self.dual_update in (DualUpdate.BISECTION, DualUpdate.OFF):
            raise ValueError(
                f"algorithm.dual-rate is the learning rate of an ascent, and algorithm.dual-update {self.dual_update} has none; "
                f"leave out {self.dual_rate:g}"
            )
        if self.dual_update is DualUpdate.MIRROR and self.dual_rate is not None and self.dual_rate >= 2:
            raise ValueError(
                f"algorithm.dual-rate must be below 2 for algorithm.dual-update mirror, or its steps diverge; got {self.dual_rate:g}"
            )
        if self.constraint_scale is ConstraintScale.MEAN and self.dual_update is not DualUpdate.ASCENT:
            raise ValueError(
                f"algorithm.constraint-scale mean scales the multiplier, and algorithm.dual-update {self.dual_update} uses none; "
                f"leave it out"
            )
        if not self.stretch_low < 0 < 1 < self.stretch_high:
            raise ValueError(
                f"algorithm.stretch-low must be below 0 and algorithm.stretch-high above 1, or gates are never exactly 0 or 1; "
                f"got {self.stretch_low}, {self.stretch_high}"
            )
        lowest = constraint.min_density(self.shape, self.log_alpha_limit)
        if self.density < lowest:
            raise ValueError(
                f"density {self.density:g} is out of reach: with these options gates are open with probability {lowest:.2g} or more; "
                f"use a higher density, a lower algorithm.temperature or a higher algorithm.log-alpha-limit"
            )

    @cached_property
    def shape(self) -> HardConcrete:
        """The distribution of the gates."""
        return HardConcrete(self.temperature, self.stretch_low, self.stretch_high)

    @property
    def milestones(self) -> dict[str, float]:
        """The start of scaling, in addition to the schedule's milestones."""
        return super().milestones | {"prune start": self.scaling_start}

    @property
    def needed_settings(self) -> dict[str, str]:
        """Options without effect beside the others: those of a scaling that is not used."""
        needed = super().needed_settings
        if self.log_alpha_scaling is not LogAlphaScaling.LITERAL:
            needed["log_alpha_scaling_rate"] = "log-alpha-scaling literal"
        if self.log_alpha_scaling is LogAlphaScaling.OFF:
            needed["scaling_start"] = "log-alpha-scaling linear"
        return needed

    def all_gates_start_closed(self) -> bool:
        """Return whether every test-time gate is 0 at the start (decision A6)."""
        start = torch.tensor([initial_log_alpha(self.initial_gate_probability)])
        return bool(gates.compute_test_gates(self.shape, start, self.test_gate)[0] == 0)

    # Gates

    def initial_gates(self, layout: Layout, draw: Draw) -> Float[Tensor, " p"]:
        """Return log_alpha ~ N(logit rho_init, 0.1^2), one value per group (L140)."""
        noise = budgets.broadcast_within_groups(draw("log_alpha", layout.size), layout.groups)
        log_alpha = gates.initial_log_alpha(noise, self.initial_gate_probability).clamp(-self.log_alpha_limit, self.log_alpha_limit)
        return open_ungated(log_alpha, layout)

    def normalize_log_alpha(self, log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
        """Return log_alpha clamped, with one value per group (quantization makes them differ) and ungated coordinates open."""
        clamped = log_alpha.clamp(-self.log_alpha_limit, self.log_alpha_limit)
        return open_ungated(budgets.broadcast_within_groups(clamped, layout.groups), layout)

    def sample_gates(
        self, log_alpha: Float[Tensor, "*k p"], layout: Layout, draw: Draw, purpose: str, noise: GateNoise = GateNoise.SAMPLED
    ) -> gates.Gates:
        """Return gates, one sample per group, or their medians."""
        if noise is GateNoise.DETERMINISTIC:
            return gates.median_gates(self.shape, log_alpha)
        uniform = budgets.broadcast_within_groups(draw(purpose, log_alpha.shape[-1]), layout.groups)
        return gates.sample(self.shape, log_alpha, uniform)

    def gate_gradients(
        self,
        objective: Objective,
        weights: Float[Tensor, "k p"],
        log_alpha: Float[Tensor, "k p"],
        batch: Batch,
        clock: Clock,
        draw: Draw,
        noise: GateNoise = GateNoise.SAMPLED,
    ) -> GateGradients:
        """Return grad_theta~ = g z and grad_phi = g theta~ dz/dphi, averaged over R gate samples (L114, L151)."""
        samples = []
        for r in range(self.gate_samples):
            gate = self.sample_gates(log_alpha, objective.layout, draw, f"gates {r}", noise)
            loss, gradient = objective.gradient(weights * gate.value, batch)
            step_size = self.step_size(objective, loss, gradient, batch, clock, gate.value)
            by_weight, by_gate = gates.chain_rule(optimizers.clip_norm(gradient, self.max_gradient_norm), weights, gate)
            samples.append(GateGradients(by_weight, budgets.sum_within_groups(by_gate, objective.layout.groups), step_size))
        if self.gate_samples == 1:
            return samples[0]
        return GateGradients(*(torch.stack(parts).mean(0) for parts in zip(*samples, strict=True)))

    # The constraint

    def dual_rate_per_round(self, layout: Layout) -> float:
        """Return the learning rate of ascent over one round; for the mean scale the paper's, eta_lambda ~ 1/|theta| (L140, L303)."""
        if self.dual_rate is not None:
            return self.dual_rate
        is_mean = self.constraint_scale is ConstraintScale.MEAN
        return self.paper_dual_rate / layout.num_gated * self.workload.exchanges if is_mean else ASCENT_RATE

    def penalty_gradient(
        self, log_alpha: Float[Tensor, "*k p"], multiplier: Float[Tensor, "*#k"], size: int, groups: Tensor | None
    ) -> Float[Tensor, "*k p"]:
        """Return lambda grad_phi L_con over `size` weights minus the entropy bonus, summed within groups."""
        gradient = constraint.penalty_gradient(self.shape, log_alpha, multiplier, self.constraint_scale, size)
        if self.entropy:
            gradient = gradient - self.entropy * gates.entropy_derivative(self.shape, log_alpha)
        return budgets.sum_within_groups(gradient, groups)

    def ascend(
        self, multiplier: Float[Tensor, "*k"], log_alpha: Float[Tensor, "*k p"], layout: Layout, clock: Clock
    ) -> Float[Tensor, "*k"]:
        """Return the multiplier after one dual step: FLoPS uses the gates before the primal step (B2), PA the aggregated ones (B3)."""
        if self.dual_update is not DualUpdate.ASCENT:
            return multiplier
        gated, density = log_alpha[..., : layout.num_gated] if layout.num_ungated else log_alpha, self.message_density(clock)
        rate = self.dual_rate_per_round(layout) / self.workload.exchanges
        return constraint.ascend(self.shape, gated, multiplier, density, rate)

    def mirror_dual_step(
        self, log_alpha: Float[Tensor, " p"], multiplier: Float[Tensor, ""], layout: Layout, clock: Clock
    ) -> tuple[Float[Tensor, " p"], Float[Tensor, ""]]:
        """Return log_alpha after the steps of mirror ascent, and the multiplier: the sum of all steps so far."""
        if self.dual_update is not DualUpdate.MIRROR:
            return log_alpha, multiplier
        log_alpha = constraint.cool(self.shape, log_alpha, self.cooling_factor(clock) ** (1 / self.workload.exchanges))
        rate = MIRROR_RATE if self.dual_rate is None else self.dual_rate
        for _ in range(DUAL_STEPS_PER_EXCHANGE):
            gated = log_alpha[: layout.num_gated]
            step = constraint.mirror_step(self.shape, gated, self.message_density(clock), rate)
            log_alpha, multiplier = log_alpha - step, multiplier + step
        return self.normalize_log_alpha(log_alpha, layout), multiplier

    def solve_dual(self, log_alpha: Float[Tensor, " p"], layout: Layout, clock: Clock) -> Float[Tensor, " p"]:
        """Return log_alpha shifted by the value that makes the constraint tight, found by bisection."""
        if self.dual_update is not DualUpdate.BISECTION:
            return log_alpha
        colder = constraint.cool(self.shape, log_alpha, self.cooling_factor(clock))
        density, limit = self.message_density(clock), self.log_alpha_limit
        shift = constraint.bisect_shift(self.shape, colder[: layout.num_gated], density, limit=limit)
        return open_ungated(constraint.shift_log_alpha(colder, shift, limit), layout)

    def cooling_factor(self, clock: Clock) -> float:
        """Return the factor on the logits of all gates after this round, once an annealed density has reached its target (B5).

        Of equally important weights some stay open, and the number of open test-time gates approaches the expected number.
        """
        reached = max(ceil(self.anneal_end * clock.num_rounds - 1e-9), self.warmup)
        if self.density_schedule is DensitySchedule.CONSTANT or clock.round < reached:
            return 1.0
        return FINAL_COOLING ** (1 / (clock.num_rounds - reached))

    # Selection

    def importance(self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """Return |theta~| times the test-time gate (decision C3)."""
        return gates.gated_magnitude(self.shape, weights, log_alpha, self.test_gate, GATE_MARGIN)

    def top_mask(
        self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, clock: Clock
    ) -> Bool[Tensor, "*k p"]:
        """Return the mask of the top m of theta: of this round's messages, in the last round of the final model."""
        is_last = clock.round == clock.num_rounds - 1
        budget = self.final_budget(layout) if is_last else self.message_budget(layout, clock)
        return topk.top_mask(self.importance(weights, log_alpha), budget, layout.groups)

    def scalings_left(self, clock: Clock) -> int:
        """Return the number of rounds left, this one included, or 0 before scaling starts; it starts in the last round at the latest."""
        start = self.scaling_start * clock.num_rounds
        if self.scaling_start < 1:
            start = min(start, clock.num_rounds - 1)
        return clock.num_rounds - clock.round if clock.round >= max(start, self.warmup) else 0

    def scale_log_alpha(
        self, log_alpha: Float[Tensor, "*k p"], mask: Bool[Tensor, "*k p"] | bool, scalings_left: int
    ) -> Float[Tensor, "*k p"]:
        """Return log_alpha increased under the mask and decreased elsewhere (L155-157); the last scaling reaches the limits (C1)."""
        rate = 1 / scalings_left if self.log_alpha_scaling is LogAlphaScaling.LINEAR else self.log_alpha_scaling_rate
        return schedules.scale_log_alpha(log_alpha, mask, rate, self.log_alpha_scaling, self.log_alpha_limit)

    # The model

    def parameters(self, server: HasGates) -> Float[Tensor, " p"]:
        """Return the m largest entries of theta~ times the test-time gate (decision C5).

        Gates are at least GATE_MARGIN here: weights with closed gates are then ranked by magnitude, and no kept weight is zero.
        """
        gate = gates.compute_test_gates(self.shape, server.log_alpha, self.test_gate, min_gate=GATE_MARGIN)
        return self.project(server.weights * gate, server.layout)

    def unprojected_parameters(self, server: HasGates) -> Float[Tensor, " p"]:
        """Return theta~ times the test-time gate."""
        return server.weights * gates.compute_test_gates(self.shape, server.log_alpha, self.test_gate)

    def with_parameters(self, server: Any, theta: Float[Tensor, " p"]) -> Any:
        """Return the server state whose test-time parameters are theta: gates are open on its nonzero weights only."""
        return super().with_parameters(server, theta)._replace(log_alpha=open_nonzero(theta))

    def divergence_reason(self, server: HasGates) -> str | None:
        """Return which of the paper's formulas diverged, if it is used as printed."""
        if self.log_alpha_scaling is LogAlphaScaling.LITERAL and self.log_alpha_limit == inf and not server.log_alpha.isfinite().all():
            return (
                f"log_alpha is not finite: the paper's scaling (1 +- r) log_alpha (L155-157) multiplies it by "
                f"{1 + self.log_alpha_scaling_rate:g} in every round without a limit; use --algorithm.log-alpha-limit {LOG_ALPHA_LIMIT:g}"
            )
        return None if self.unstable_formula is None else f"theta~ is not finite: {self.unstable_formula}"

    @property
    def unstable_formula(self) -> str | None:
        """The formula of the paper's recipe that makes a run unstable, and what helps; None for the recommended recipe."""
        if self.recipe is not Recipe.PAPER:
            return None
        option = "learning-rate" if "learning_rate" in self.option_names() else "server-learning-rate"
        return (
            f"the paper's step theta~ - eta g with a constant eta (L138) grows without bound once eta exceeds 2/L, "
            f"and features shifted by their clients make L large; lower algorithm.{option} {getattr(self, option.replace('-', '_')):g} "
            f"or use --algorithm.recipe recommended"
        )

    @property
    def formula_note(self) -> str | None:
        """What a reader must know about a formula that cannot run as printed, or None."""
        return None

    def diagnostics(self, server: HasGates) -> dict[str, Tensor]:
        """Return expected and test-time density, the multiplier and the violation."""
        return gate_diagnostics(self.shape, server, self.density, self.test_gate)
