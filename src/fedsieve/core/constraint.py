"""The L0 density constraint, sum_j P(z_j != 0) <= rho |theta|, and its multiplier."""

from enum import StrEnum
from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT, Gates, HardConcrete, active_probability, chain_rule
from fedsieve.kernels import addresses, for_tensors, load_sparse_kernels


class ConstraintScale(StrEnum):
    """How the constraint enters the Lagrangian."""

    SUM = "sum"
    """lambda sum_j P_j: the pull on one gate does not fade with |theta| (decision B1)"""
    MEAN = "mean"
    """lambda / |theta| sum_j P_j (L74, L109): with eta_lambda ~ 1/|theta| it is inert"""


class DualUpdate(StrEnum):
    """How the multiplier is found."""

    ASCENT = "ascent"
    """gradient ascent with restart (L138)"""
    MIRROR = "mirror"
    """taken from log_alpha itself, and raised by log(density / target): an ascent that holds at any target that falls to it (B5)"""
    BISECTION = "bisection"
    """the shift of log_alpha that makes the constraint tight, by bisection (decision B4)"""
    OFF = "off"
    """lambda stays 0"""


def gap(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], density: float) -> Float[Tensor, "*k"]:
    """The violation L_con = mean_j P(z_j != 0) - rho."""
    return active_probability(shape, log_alpha).mean(-1) - density


def penalty_per_gate(multiplier: Float[Tensor, "*k"], constraint_scale: ConstraintScale, size: int) -> Float[Tensor, "*k"]:
    """What the multiplier weighs on one gate: over |theta| in the paper's form."""
    return multiplier if constraint_scale is ConstraintScale.SUM else multiplier / size


def penalty_gradient(
    shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], multiplier: Float[Tensor, "*#k"], constraint_scale: ConstraintScale, size: int
) -> Float[Tensor, "*k n"]:
    """lambda grad_phi L_con: lambda P (1 - P), weighed; added in descent (L138; L136 has a slip, A1)."""
    scale = penalty_per_gate(multiplier, constraint_scale, size)
    if fast := for_tensors(log_alpha, scale, size=log_alpha.shape[-1]):
        found, gates = torch.empty_like(log_alpha), log_alpha.shape[-1]
        fast.penalty_gradient(*addresses(log_alpha, scale, found), log_alpha.numel() // gates, gates, scale.numel(), shape.offset)
        return found
    p = active_probability(shape, log_alpha)
    return torch.ops.aten.sigmoid_backward(scale[..., None].expand_as(p), p)


def step_log_alpha(
    shape: HardConcrete,
    log_alpha: Float[Tensor, "k n"],
    gradient: Float[Tensor, "k n"],
    multiplier: Float[Tensor, " k"],
    constraint_scale: ConstraintScale,
    size: int,
    rate: float,
) -> Float[Tensor, "k n"]:
    """log_alpha - eta_phi (gradient + lambda grad_phi L_con), inside its limits."""
    scale = penalty_per_gate(multiplier, constraint_scale, size)
    if fast := for_tensors(log_alpha, gradient, scale):
        found = torch.empty_like(log_alpha)
        fast.step_log_alpha(*addresses(log_alpha, gradient, scale, found), *log_alpha.shape, shape.offset, rate, LOG_ALPHA_LIMIT)
        return found
    turn = gradient + penalty_gradient(shape, log_alpha, multiplier, constraint_scale, size)
    return log_alpha.sub(turn, alpha=rate).clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


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
) -> tuple[Float[Tensor, "k n"], Float[Tensor, "k n"]]:
    """theta~ and phi moved together along the gradient g in theta = theta~ z: theta~ - eta g z, and `descend` along g theta~ dz/dphi."""
    scale = penalty_per_gate(multiplier, constraint_scale, size)
    if fast := for_tensors(weights, log_alpha, gradient, *gate, step_size, scale):
        moved, turned = torch.empty_like(weights), torch.empty_like(weights)
        vectors = addresses(weights, log_alpha, gradient, *gate, step_size, scale, moved, turned)
        fast.gated_sgd_step(*vectors, *weights.shape, shape.offset, rate, LOG_ALPHA_LIMIT)
        return moved, turned
    by_weight, by_gate = chain_rule(gradient, weights, gate)
    return torch.addcmul(weights, step_size, by_weight, value=-1), step_log_alpha(
        shape, log_alpha, by_gate, multiplier, constraint_scale, size, rate
    )


def apply_penalty(
    shape: HardConcrete,
    log_alpha: Float[Tensor, "k n"],
    num_skipped: Float[Tensor, "k n"],
    multiplier: Float[Tensor, " k"],
    constraint_scale: ConstraintScale,
    size: int,
    rate: float,
) -> Float[Tensor, "k n"]:
    """log_alpha - eta_phi n lambda grad_phi L_con, inside its limits: n steps at once, the first order of them."""
    if for_tensors(log_alpha, num_skipped):
        found = torch.empty_like(log_alpha)
        scale = penalty_per_gate(multiplier, constraint_scale, size)
        given = (part.numpy() for part in (log_alpha, num_skipped, scale.contiguous()))
        load_sparse_kernels().apply_penalty(*given, shape.offset, rate, LOG_ALPHA_LIMIT, found.numpy())
        return found
    turn = penalty_gradient(shape, log_alpha, multiplier, constraint_scale, size).mul_(num_skipped)
    return log_alpha.sub(turn, alpha=rate).clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


def ascend(multiplier: Float[Tensor, "*k"], violation: Float[Tensor, "*k"], rate: float) -> Float[Tensor, "*k"]:
    """One dual step: lambda + eta_lambda * gap, restarted at 0 once the constraint holds (L138, decision B2)."""
    return torch.where(violation > 0, torch.add(multiplier, violation, alpha=rate), 0.0)


def ascend_on_gap(
    shape: HardConcrete, log_alpha: Float[Tensor, " n"], multiplier: Float[Tensor, ""], density: float, rate: float
) -> Float[Tensor, ""]:
    """`ascend` on the `gap` of these gates."""
    if fast := for_tensors(log_alpha, multiplier):
        found = torch.empty_like(multiplier)
        fast.ascend_on_gap(*addresses(log_alpha, multiplier, found), len(log_alpha), shape.offset, density, rate)
        return found
    return ascend(multiplier, gap(shape, log_alpha, density), rate)


def mirror_step(shape: HardConcrete, log_alpha: Float[Tensor, " n"], density: float, rate: float) -> Float[Tensor, ""]:
    """eta log(d / rho): a step of the multiplier that is taken from every log_alpha alike, d the mean of P(z != 0) (decision B5).

    Gates that minimise -sum u_j P_j + lambda sum P_j with their entropy kept have logit P = u - lambda. As -d log d / d lambda =
    sum P (1 - P) / sum P is at most 1, no rate up to 1 overshoots and any below 2 converges, whatever the target, size and loss.
    """
    log_density = torch.nn.functional.logsigmoid(log_alpha + shape.offset).logsumexp(-1) - log(log_alpha.shape[-1])
    return rate * (log_density - log(density))


def cool(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], factor: float) -> Float[Tensor, "*k n"]:
    """Gates at a temperature lower by a factor: the logit of P(z != 0) times it. Their limits wait for the dual's step, or all shut tie."""
    return log_alpha if factor == 1 else (log_alpha + shape.offset) * factor - shape.offset


def bisect_shift(
    shape: HardConcrete,
    log_alpha: Float[Tensor, "*k n"],
    density: float,
    gate_weights: Float[Tensor, " n"] | None = None,
    num_halvings: int = 50,
) -> Float[Tensor, "*k"]:
    """The tau for which the mean of P(z != 0 | clamp(log_alpha + tau)) is rho, by bisection (decision B4).

    The mean is monotone in a common shift, so this is the multiplier of the constraint solved rather than ascended to. It is solved as
    an equation: gates that are too few open again. `shares` are the weights of the mean (n values may stand for many gates).
    """
    gate_weights = log_alpha.new_full((log_alpha.shape[-1],), 1 / log_alpha.shape[-1]) if gate_weights is None else gate_weights
    high = (log_alpha.abs().amax(-1) + LOG_ALPHA_LIMIT).clamp_min(2 * LOG_ALPHA_LIMIT)  # cooled gates may be beyond their limits
    low = -high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        above = (active_probability(shape, shift_log_alpha(log_alpha, middle)) * gate_weights).sum(-1) > density
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return low


def shift_log_alpha(log_alpha: Float[Tensor, "*k n"], shift: Float[Tensor, "*k"]) -> Float[Tensor, "*k n"]:
    """log_alpha moved by a common shift, inside its limits."""
    return (log_alpha + shift[..., None]).clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


def min_density(shape: HardConcrete) -> float:
    """The smallest mean P(z != 0) the clamp on log_alpha can reach (decision A7)."""
    return float(torch.sigmoid(torch.tensor(-LOG_ALPHA_LIMIT + shape.offset, dtype=torch.float64)))
