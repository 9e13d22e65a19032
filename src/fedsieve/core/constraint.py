"""The L0 density constraint, sum_j P(z_j != 0) <= rho |theta|, and its multiplier."""

from enum import StrEnum
from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT, Gates, HardConcrete, active_probability, chain_rule
from fedsieve.kernels import accelerated


class ConstraintScale(StrEnum):
    """Scale of the constraint in the Lagrangian."""

    SUM = "sum"
    """lambda sum_j P_j: the penalty of one gate does not depend on |theta| (decision B1)"""
    MEAN = "mean"
    """lambda / |theta| sum_j P_j (L74, L109): has almost no effect if eta_lambda ~ 1/|theta|"""


class DualUpdate(StrEnum):
    """How the multiplier is updated."""

    ASCENT = "ascent"
    """gradient ascent with restart (L138)"""
    MIRROR = "mirror"
    """subtracted from every log_alpha and raised by log(density / target): also holds a target that falls (decision B5)"""
    BISECTION = "bisection"
    """the shift of log_alpha for which the constraint is an equation, by bisection (decision B4)"""
    OFF = "off"
    """lambda = 0"""


@accelerated("vector", "penalty_gradient", tensors=("log_alpha", "multiplier"))
def penalty_gradient(
    shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], multiplier: Float[Tensor, "*#k"], constraint_scale: ConstraintScale, size: int
) -> Float[Tensor, "*k n"]:
    """lambda grad_phi L_con = lambda P (1 - P); it is added in descent (L138; the sign in L136 is a slip, decision A1)."""
    scale = multiplier if constraint_scale is ConstraintScale.SUM else multiplier / size
    p = active_probability(shape, log_alpha)
    return torch.ops.aten.sigmoid_backward(scale[..., None].expand_as(p), p)


@accelerated("vector", "step_log_alpha", tensors=("log_alpha", "gradient", "multiplier"))
def step_log_alpha(
    shape: HardConcrete,
    log_alpha: Float[Tensor, "k n"],
    gradient: Float[Tensor, "k n"],
    multiplier: Float[Tensor, " k"],
    constraint_scale: ConstraintScale,
    size: int,
    rate: float,
    limit: float = LOG_ALPHA_LIMIT,
) -> Float[Tensor, "k n"]:
    """log_alpha - eta_phi (gradient + lambda grad_phi L_con), clamped to its limits."""
    direction = gradient + penalty_gradient(shape, log_alpha, multiplier, constraint_scale, size)
    return log_alpha.sub(direction, alpha=rate).clamp_(-limit, limit)


@accelerated(
    "vector",
    "gated_sgd_step",
    tensors=("weights", "log_alpha", "gradient", "gate.value", "gate.derivative", "step_size", "multiplier"),
)
def gated_sgd_step(
    shape: HardConcrete,
    weights: Float[Tensor, "k n"],
    log_alpha: Float[Tensor, "k n"],
    gradient: Float[Tensor, "k n"],
    gate: Gates,
    step_size: Float[Tensor, "k 1"],
    multiplier: Float[Tensor, " k"],
    constraint_scale: ConstraintScale,
    size: int,
    rate: float,
    limit: float = LOG_ALPHA_LIMIT,
) -> tuple[Float[Tensor, "k n"], Float[Tensor, "k n"]]:
    """One step of theta~ and phi with the gradient g in theta = theta~ z: theta~ - eta g z, and phi along g theta~ dz/dphi."""
    weight_gradient, gate_gradient = chain_rule(gradient, weights, gate)
    new_log_alpha = step_log_alpha(shape, log_alpha, gate_gradient, multiplier, constraint_scale, size, rate, limit)
    return torch.addcmul(weights, step_size, weight_gradient, value=-1), new_log_alpha


@accelerated("sparse", "apply_penalty", tensors=("log_alpha", "num_skipped"))
def apply_penalty(
    shape: HardConcrete,
    log_alpha: Float[Tensor, "k n"],
    num_skipped: Float[Tensor, "k n"],
    multiplier: Float[Tensor, " k"],
    constraint_scale: ConstraintScale,
    size: int,
    rate: float,
    limit: float = LOG_ALPHA_LIMIT,
) -> Float[Tensor, "k n"]:
    """log_alpha - eta_phi n lambda grad_phi L_con, clamped to its limits: a first-order approximation of n steps."""
    direction = penalty_gradient(shape, log_alpha, multiplier, constraint_scale, size).mul_(num_skipped)
    return log_alpha.sub(direction, alpha=rate).clamp_(-limit, limit)


@accelerated("vector", "ascend", tensors=("log_alpha", "multiplier"), condition=lambda _, log_alpha, *__: log_alpha.ndim == 1)
def ascend(
    shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], multiplier: Float[Tensor, "*k"], density: float, rate: float
) -> Float[Tensor, "*k"]:
    """One dual step along L_con = mean_j P(z_j != 0) - rho; lambda restarts at 0 once the constraint holds (L138, decision B2)."""
    violation = active_probability(shape, log_alpha).mean(-1) - density
    return torch.where(violation > 0, torch.add(multiplier, violation, alpha=rate), 0.0)


def mirror_step(shape: HardConcrete, log_alpha: Float[Tensor, " n"], density: float, rate: float) -> Float[Tensor, ""]:
    """eta log(d / rho), a step of the multiplier to subtract from every log_alpha; d is the mean of P(z != 0) (decision B5).

    Gates that minimize -sum u_j P_j + lambda sum P_j minus their entropy have logit P = u - lambda. Since -d log d / d lambda =
    sum P (1 - P) / sum P is at most 1, no rate up to 1 overshoots and any below 2 converges, for every target, size and loss.
    """
    log_density = torch.nn.functional.logsigmoid(log_alpha + shape.offset).logsumexp(-1) - log(log_alpha.shape[-1])
    return rate * (log_density - log(density))


def cool(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], factor: float) -> Float[Tensor, "*k n"]:
    """log_alpha of gates whose logit P(z != 0) is multiplied by `factor`.

    It is not clamped: the dual step comes first, or all closed gates would be equal.
    """
    return log_alpha if factor == 1 else (log_alpha + shape.offset) * factor - shape.offset


def bisect_shift(
    shape: HardConcrete,
    log_alpha: Float[Tensor, "*k n"],
    density: float,
    gate_weights: Float[Tensor, " n"] | None = None,
    num_halvings: int = 50,
    limit: float = LOG_ALPHA_LIMIT,
) -> Float[Tensor, "*k"]:
    """The shift tau for which the mean of P(z != 0 | clamp(log_alpha + tau)) is rho, by bisection (decision B4).

    The mean is monotone in the shift, so -tau is the multiplier that solves the constraint. It is solved as an equation: if too few
    gates are open, they open again. `gate_weights` are the weights of the mean, for values that represent many gates.
    """
    gate_weights = log_alpha.new_full((log_alpha.shape[-1],), 1 / log_alpha.shape[-1]) if gate_weights is None else gate_weights
    high = (log_alpha.abs().amax(-1) + LOG_ALPHA_LIMIT).clamp_min(2 * LOG_ALPHA_LIMIT)  # cooled gates may exceed the limits
    low = -high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        above = (active_probability(shape, shift_log_alpha(log_alpha, middle, limit)) * gate_weights).sum(-1) > density
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return low


def shift_log_alpha(log_alpha: Float[Tensor, "*k n"], shift: Float[Tensor, "*k"], limit: float = LOG_ALPHA_LIMIT) -> Float[Tensor, "*k n"]:
    """log_alpha plus a common shift, clamped to its limits."""
    return (log_alpha + shift[..., None]).clamp(-limit, limit)


def min_density(shape: HardConcrete, limit: float = LOG_ALPHA_LIMIT) -> float:
    """The smallest mean P(z != 0) that log_alpha can reach within its limits (decision A7)."""
    return float(torch.sigmoid(torch.tensor(-limit + shape.offset, dtype=torch.float64)))
