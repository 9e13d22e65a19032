"""The differentially private mean: clipped differences with equal weights, plus Gaussian noise (docs/theory.md)."""

from math import sqrt
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core.aggregation import mean
from fedsieve.core.packets import GATE_FIELDS
from fedsieve.core.random import Draw, uniform_to_normal


class GaussianMechanism(NamedTuple):
    """Clipping norms and noise of the private mean."""

    noise_multiplier: float
    """standard deviation of the noise over the sensitivity of the mean to replacing one client by another"""
    clip: float
    """C: largest norm of a client's difference in weights"""
    gate_clip: float
    """largest norm of a client's difference in gates"""
    cohort_size: int
    """K: the sum is divided by this number, however many clients replied"""


def private_mean(
    deltas: dict[str, Float[Tensor, "k _n"]], mechanism: GaussianMechanism, support: Int64[Tensor, " m"] | None, draw: Draw
) -> dict[str, Float[Tensor, " _n"]]:
    """(1/K) sum_k clip(d_k) + N(0, s^2), restricted to the public support if there is one.

    d_k has up to J = 2 parts, gates and weights, each clipped to its own C. In units of C the norm of a client is at most sqrt(J), so
    replacing one client changes the mean by at most 2 sqrt(J) C / K. s is `noise_multiplier` times this sensitivity.
    """
    deltas = {name: _restrict(stack, support) for name, stack in deltas.items()}
    kinds = {gates: [name for name in deltas if (name in GATE_FIELDS) is gates] for gates in (True, False)}
    kinds = {gates: names for gates, names in kinds.items() if names}
    means = {}
    for gates, names in kinds.items():
        max_norm = mechanism.gate_clip if gates else mechanism.clip
        norms = torch.linalg.vector_norm(torch.cat([deltas[name] for name in names], dim=-1), dim=-1, dtype=torch.float64)
        clip_weights = (max_norm / norms.clamp_min(max_norm)).to(deltas[names[0]]) / mechanism.cohort_size
        std = mechanism.noise_multiplier * 2 * sqrt(len(kinds)) * max_norm / mechanism.cohort_size
        for name in names:
            noise = std * standard_normal(draw, f"privacy {name}", deltas[name].shape[-1]).to(deltas[name])
            means[name] = mean(deltas[name], clip_weights) + _restrict(noise, support)
    return means


def standard_normal(draw: Draw, purpose: str, size: int) -> Float[Tensor, " n"]:
    """Standard normal variates from 46 random bits each; the 23 bits of one draw would cut the tails at five standard deviations."""
    coarse, fine = (draw(f"{purpose}, {part}", size).double() for part in ("first bits", "last bits"))
    return uniform_to_normal(coarse + (fine - 0.5) * 2.0**-23)


def _restrict(vectors: Float[Tensor, "*k n"], support: Int64[Tensor, " m"] | None) -> Float[Tensor, "*k n"]:
    """The vectors with zeros off the support; a field of one number has no coordinates and stays."""
    if support is None or vectors.shape[-1] == 1:
        return vectors
    return torch.zeros_like(vectors).index_copy(-1, support, vectors.index_select(-1, support))
