"""Hard concrete gates (Louizos et al. 2018; L118-128): noise and log_alpha in, gates in [0, 1] out, all in closed form.

    s = sigmoid((logit u + log_alpha) / beta'),   z = clip(s (zeta - gamma) + gamma, 0, 1)

No gradient runs through here by autograd: `sample` hands back dz/dphi beside z.
"""

from enum import StrEnum
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.kernels import addresses, for_tensors

LOG_ALPHA_LIMIT = 12.0
"""log_alpha lives in +-12 (decision A7): the usual +-log 100 would keep P(z != 0) above .046."""
NOISE_MARGIN = 1e-6
GATE_MARGIN = 1e-6
"""A gate sent by the paper's inverse is kept this far from 0 and 1, where its log_alpha is infinite (decision E1)."""


class GateAtTest(StrEnum):
    """The gate used when the model is used: L128 says "without noise and smoothing"."""

    MEDIAN = "median"
    """noise u = 1/2, temperature kept: zero exactly where P(z != 0) is small, so it agrees with the constraint (decision A5)."""
    NO_TEMPERATURE = "no-temperature"
    """temperature dropped too"""


class HardConcrete(NamedTuple):
    """The shape of the distribution: beta', gamma and zeta of the paper."""

    temperature: float = 0.66
    stretch_low: float = -0.1
    stretch_high: float = 1.1

    @property
    def offset(self) -> float:
        """-beta' log(-gamma / zeta): what separates P(z != 0) from sigmoid(log_alpha)."""
        return -self.temperature * log(-self.stretch_low / self.stretch_high)


class Gates(NamedTuple):
    """Sampled gates z and their derivative dz/dphi."""

    value: Tensor
    derivative: Tensor


def stretch(shape: HardConcrete, s: Float[Tensor, "*k n"], min_gate: float = 0.0) -> Float[Tensor, "*k n"]:
    """Stretch (0, 1) to (gamma, zeta) and clip to [0, 1], or to [least, 1]."""
    return (s * (shape.stretch_high - shape.stretch_low)).add_(shape.stretch_low).clamp_(min_gate, 1.0)


def sample(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], noise: Float[Tensor, "*k n"]) -> Gates:
    """Gates for uniform noise u, with dz/dphi = (zeta - gamma)/beta' s (1 - s) where 0 < z < 1, else 0 (L118-122, decision A3)."""
    if fast := for_tensors(log_alpha, noise):
        found = Gates(torch.empty_like(log_alpha), torch.empty_like(log_alpha))
        fast.sampled_gates(*addresses(log_alpha, noise, *found), log_alpha.numel(), NOISE_MARGIN, *shape)
        return found
    return _from_logits(shape, torch.logit(noise, NOISE_MARGIN).add_(log_alpha).div_(shape.temperature))


def median_gates(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"]) -> Gates:
    """The gates at the noise's median, u = 1/2, with their derivative."""
    if fast := for_tensors(log_alpha):
        found = Gates(torch.empty_like(log_alpha), torch.empty_like(log_alpha))
        fast.median_gates(*addresses(log_alpha, *found), log_alpha.numel(), *shape)
        return found
    return _from_logits(shape, log_alpha / shape.temperature)


def chain_rule(
    gradient: Float[Tensor, "*k n"], weights: Float[Tensor, "*k n"], gate: Gates
) -> tuple[Float[Tensor, "*k n"], Float[Tensor, "*k n"]]:
    """The gradient g in theta = theta~ z as gradients in theta~ and phi: g z and g theta~ dz/dphi."""
    if fast := for_tensors(gradient, weights, *gate):
        by_weight, by_gate = torch.empty_like(gradient), torch.empty_like(gradient)
        fast.chain_rule(*addresses(gradient, weights, *gate, by_weight, by_gate), gradient.numel())
        return by_weight, by_gate
    return gradient * gate.value, gradient * weights * gate.derivative


def _from_logits(shape: HardConcrete, logits: Float[Tensor, "*k n"]) -> Gates:
    """z and dz/dphi of logits nobody else holds.

    A masked choice would take longer than all the rest; hardtanh's derivative is the same mask in one pass.
    """
    s = logits.sigmoid_()
    width = shape.stretch_high - shape.stretch_low
    stretched = (s * width).add_(shape.stretch_low)
    slope = torch.ops.aten.sigmoid_backward(torch.full_like(s[..., :1], width / shape.temperature).expand_as(s), s)
    return Gates(stretched.clamp(0.0, 1.0), torch.ops.aten.hardtanh_backward(slope, stretched, 0.0, 1.0))


def test_gates(
    shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], kind: GateAtTest = GateAtTest.MEDIAN, min_gate: float = 0.0
) -> Float[Tensor, "*k n"]:
    """The gate of the finished model (L128, decision A5), at least `least`."""
    temperature = shape.temperature if kind is GateAtTest.MEDIAN else 1.0
    return stretch(shape, (log_alpha / temperature).sigmoid_(), min_gate)


def gated_magnitude(
    shape: HardConcrete, weights: Float[Tensor, "*k n"], log_alpha: Float[Tensor, "*k n"], kind: GateAtTest, min_gate: float
) -> Float[Tensor, "*k n"]:
    """|theta~ z| with the test-time gate."""
    if kind is GateAtTest.MEDIAN and (fast := for_tensors(weights, log_alpha)):
        found = torch.empty_like(weights)
        fast.gated_magnitude(*addresses(weights, log_alpha, found), weights.numel(), *shape, min_gate)
        return found
    return test_gates(shape, log_alpha, kind, min_gate).mul_(weights).abs_()


def active_probability(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """P(z != 0) = sigmoid(log_alpha - beta' log(-gamma/zeta)) (L126; the paper writes E[z], decision A2)."""
    return (log_alpha + shape.offset).sigmoid_()


def exact_inverse(shape: HardConcrete, gate: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """log_alpha whose median gate is z: beta' logit((z - gamma)/(zeta - gamma)). z in [0, 1] bounds it to +-1.58 (decision E2)."""
    return shape.temperature * torch.logit((gate - shape.stretch_low) / (shape.stretch_high - shape.stretch_low))


def paper_inverse(shape: HardConcrete, gate: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """log_alpha = beta' log(z / (1 - z)) (L171), with z kept off 0 and 1, where it is infinite (decision E1)."""
    return shape.temperature * torch.logit(gate.clamp(GATE_MARGIN, 1 - GATE_MARGIN))


def initial_log_alpha(noise: Float[Tensor, "*k n"], gate_probability: float, std: float = 0.1) -> Float[Tensor, "*k n"]:
    """log_alpha ~ N(logit rho_init, 0.1^2) (L140, L607). rho_init is not the open probability it starts with (decision A6)."""
    return log(gate_probability / (1 - gate_probability)) + std * torch.special.ndtri(noise)


def entropy_derivative(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """d/dphi of the entropy of an open/closed gate with P = active_probability: -(log_alpha + offset) P (1 - P) (decision A12)."""
    p = active_probability(shape, log_alpha)
    return -(log_alpha + shape.offset) * p * (1 - p)
