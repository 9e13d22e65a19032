"""Hard concrete gates in closed form (Louizos et al. 2018; L118-128).

    s = sigmoid((logit u + log_alpha) / beta'),   z = clip(s (zeta - gamma) + gamma, 0, 1)

Autograd is not used: `sample` returns z and its derivative dz/dphi.
"""

from enum import StrEnum
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core.budgets import sum_within_groups
from fedsieve.kernels import accelerated

LOG_ALPHA_LIMIT = 12.0
"""log_alpha is clamped to +-12 (decision A7). The common limit +-log 100 would keep P(z != 0) above .046."""
NOISE_MARGIN = 1e-6
GATE_MARGIN = 1e-6
"""Distance that the paper's inverse keeps from the gates 0 and 1, whose log_alpha is infinite (decision E1)."""


class GateAtTest(StrEnum):
    """Gate of the final model, "without noise and smoothing" (L128)."""

    MEDIAN = "median"
    """noise u = 1/2 with the temperature: exactly zero if P(z != 0) is small, in agreement with the constraint (decision A5)"""
    NO_TEMPERATURE = "no-temperature"
    """without the temperature too"""


class HardConcrete(NamedTuple):
    """Parameters of the distribution: beta', gamma and zeta of the paper."""

    temperature: float = 0.66
    stretch_low: float = -0.1
    stretch_high: float = 1.1

    @property
    def offset(self) -> float:
        """-beta' log(-gamma / zeta), the difference of logit P(z != 0) and log_alpha."""
        return -self.temperature * log(-self.stretch_low / self.stretch_high)


class Gates(NamedTuple):
    """Gates z and their derivative dz/dphi."""

    value: Tensor
    derivative: Tensor


@accelerated("vector", "sample_gates", tensors=("log_alpha", "noise"), returns=Gates)
def sample(
    shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], noise: Float[Tensor, "*k n"], noise_margin: float = NOISE_MARGIN
) -> Gates:
    """Gates for uniform noise u, with dz/dphi = (zeta - gamma)/beta' s (1 - s) if 0 < z < 1, else 0 (L118-122, decision A3)."""
    return _from_logits(shape, torch.logit(noise, noise_margin).add_(log_alpha).div_(shape.temperature))


@accelerated("vector", "median_gates", tensors=("log_alpha",), returns=Gates)
def median_gates(shape: HardConcrete, log_alpha: Float[Tensor, "*k n"]) -> Gates:
    """Gates at the median of the noise, u = 1/2, with their derivative."""
    return _from_logits(shape, log_alpha / shape.temperature)


@accelerated("vector", "chain_rule", tensors=("gradient", "weights", "gate.value", "gate.derivative"))
def chain_rule(
    gradient: Float[Tensor, "*k n"], weights: Float[Tensor, "*k n"], gate: Gates
) -> tuple[Float[Tensor, "*k n"], Float[Tensor, "*k n"]]:
    """The gradients in theta~ and phi, g z and g theta~ dz/dphi, from the gradient g in theta = theta~ z."""
    return gradient * gate.value, gradient * weights * gate.derivative


@accelerated(
    "vector", "saliency_step", tensors=("weights", "log_alpha", "gradient", "gate", "step_size"), condition=lambda *args: args[-1] is None
)
def saliency_step(
    weights: Float[Tensor, "k n"],
    log_alpha: Float[Tensor, "k n"],
    gradient: Float[Tensor, "k n"],
    gate: Float[Tensor, "k n"],
    step_size: Float[Tensor, "k 1"],
    gate_rate: float,
    num_kept: int,
    limit: float = LOG_ALPHA_LIMIT,
    groups: Int64[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, "k n"], Float[Tensor, "k n"]]:
    """theta~ - eta z g, and log_alpha - gate_rate s / rms(s), clamped, with the saliency s = theta~ g and its rms over m entries."""
    saliency = sum_within_groups(weights * gradient, groups)
    rms = (saliency.square().sum(-1, keepdim=True) / num_kept).sqrt().clamp_min(torch.finfo(saliency.dtype).tiny)
    return weights - step_size * gate * gradient, (log_alpha - gate_rate * saliency / rms).clamp_(-limit, limit)


def _from_logits(shape: HardConcrete, logits: Float[Tensor, "*k n"]) -> Gates:
    """z and dz/dphi from (logit u + phi) / beta', which is overwritten."""
    s = logits.sigmoid_()
    width = shape.stretch_high - shape.stretch_low
    stretched = (s * width).add_(shape.stretch_low)
    slope = torch.ops.aten.sigmoid_backward(torch.full_like(s[..., :1], width / shape.temperature).expand_as(s), s)
    # A masked choice would take longer than the rest of the function; the derivative of hardtanh is the same mask in one pass.
    return Gates(stretched.clamp(0.0, 1.0), torch.ops.aten.hardtanh_backward(slope, stretched, 0.0, 1.0))


def compute_test_gates(
    shape: HardConcrete, log_alpha: Float[Tensor, "*k n"], kind: GateAtTest = GateAtTest.MEDIAN, min_gate: float = 0.0
) -> Float[Tensor, "*k n"]:
    """Gates of the final model (L128, decision A5), at least `min_gate`."""
    s = (log_alpha / (shape.temperature if kind is GateAtTest.MEDIAN else 1.0)).sigmoid_()
    return (s * (shape.stretch_high - shape.stretch_low)).add_(shape.stretch_low).clamp_(min_gate, 1.0)


@accelerated("vector", "gated_magnitude", tensors=("weights", "log_alpha"), condition=lambda *args: args[3] is GateAtTest.MEDIAN)
def gated_magnitude(
    shape: HardConcrete, weights: Float[Tensor, "*k n"], log_alpha: Float[Tensor, "*k n"], kind: GateAtTest, min_gate: float
) -> Float[Tensor, "*k n"]:
    """|theta~ z| with the gates of the final model."""
    return compute_test_gates(shape, log_alpha, kind, min_gate).mul_(weights).abs_()


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
