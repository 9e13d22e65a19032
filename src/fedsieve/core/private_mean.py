"""A mean that hides each client: differences clipped, one say each, Gaussian noise once (docs/theory.md)."""

from math import sqrt
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core.aggregation import mean
from fedsieve.core.random import Draw, uniform_to_normal


class GaussianMechanism(NamedTuple):
    """How far one client may move the mean, and what hides it."""

    noise_multiplier: float
    """standard deviation of the noise over the most that one client replaced by another can change"""
    clip: float
    """C: longest difference of a client in weights"""
    gate_clip: float
    """the same in gates"""
    cohort_size: int
    """K: the mean is the sum over this, however many replied"""


def private_mean(
    deltas: dict[str, Float[Tensor, "k _n"]], mechanism: GaussianMechanism, support: Int64[Tensor, " m"] | None, draw: Draw
) -> dict[str, Float[Tensor, " _n"]]:
    """(1/K) sum_k clip(d_k) + N(0, s^2), on the shared support only where there is one.

    d_k is in up to J = 2 parts, gates and weights, each clipped to its own C: in units of C a client is no longer than sqrt(J), and one
    client in the place of another changes the mean by 2 sqrt(J) C / K at most. s is `multiplier` times that.
    """
    deltas = {name: _restrict(stack, support) for name, stack in deltas.items()}
    kinds = {gates: [name for name in deltas if ("gate" in name) is gates] for gates in (True, False)}
    kinds = {gates: names for gates, names in kinds.items() if names}
    found = {}
    for gates, names in kinds.items():
        longest = mechanism.gate_clip if gates else mechanism.clip
        length = torch.linalg.vector_norm(torch.cat([deltas[name] for name in names], dim=-1), dim=-1, dtype=torch.float64)
        say = (longest / length.clamp_min(longest)).to(deltas[names[0]]) / mechanism.cohort_size
        spread = mechanism.noise_multiplier * 2 * sqrt(len(kinds)) * longest / mechanism.cohort_size
        for name in names:
            hidden = spread * standard_normal(draw, f"privacy {name}", deltas[name].shape[-1]).to(deltas[name])
            found[name] = mean(deltas[name], say) + _restrict(hidden, support)
    return found


def standard_normal(draw: Draw, purpose: str, size: int) -> Float[Tensor, " n"]:
    """Standard normal variates of 46 random bits each: 23, a draw's own, would cut the tails at five standard deviations."""
    coarse, fine = (draw(f"{purpose}, {part}", size).double() for part in ("first bits", "last bits"))
    return uniform_to_normal(coarse + (fine - 0.5) * 2.0**-23)


def _restrict(vectors: Float[Tensor, "*k n"], support: Int64[Tensor, " m"] | None) -> Float[Tensor, "*k n"]:
    """Zero outside the support; a part of one number is no vector of coordinates."""
    if support is None or vectors.shape[-1] == 1:
        return vectors
    return torch.zeros_like(vectors).index_copy(-1, support, vectors.index_select(-1, support))
