"""How replies become one vector."""

from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor


class Weighting(StrEnum):
    """How much each client of the cohort counts (decision D1); the weights of a cohort add up to one."""

    EXAMPLES = "examples"
    """n_k"""
    SQRT = "sqrt"
    """sqrt(n_k)"""
    UNIFORM = "uniform"
    """1/K, the paper's B/(K B)"""
    RIEMANNIAN = "riemannian"
    """n_k for the Frechet mean of directions, norms averaged apart (decision D6)"""


def cohort_weights(examples: Float[Tensor, " k"], kind: Weighting) -> Float[Tensor, " k"]:
    """w_k over the cohort that replied."""
    raw = {Weighting.SQRT: torch.sqrt, Weighting.UNIFORM: torch.ones_like}.get(kind, torch.clone)(examples)
    return raw / raw.sum()


def mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """sum_k w_k v_k. A sum, not a product of matrices: its order depends on the shape alone, so every engine gives the same bits."""
    return (vectors * weights[:, None]).sum(0)


def riemannian_mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"], iterations: int = 10) -> Float[Tensor, " n"]:
    """Norms averaged plainly, directions by the weighted Frechet mean on the sphere (our reading of one clause, L170, decision D6).

    Karcher's iteration: average the log maps at the current point, walk along the geodesic. Zero vectors have no direction and no say.
    """
    norms = torch.linalg.vector_norm(vectors, dim=-1)
    tiny = torch.finfo(vectors.dtype).tiny
    directions = vectors / norms.clamp_min(tiny)[:, None]
    say = weights * (norms > 0)
    point = _unit(mean(directions, say), tiny)
    for _ in range(iterations):
        cosine = (directions * point).sum(-1).clamp(-1, 1)
        tangent = directions - cosine[:, None] * point
        length = torch.linalg.vector_norm(tangent, dim=-1)
        angle = torch.atan2(length, cosine)
        step = mean(tangent / length.clamp_min(tiny)[:, None], say * angle)
        size = torch.linalg.vector_norm(step)
        point = _unit(torch.cos(size) * point + torch.sin(size) * step / size.clamp_min(tiny), tiny)
    return mean(norms[:, None], weights) * point


def _unit(vector: Float[Tensor, " n"], tiny: float) -> Float[Tensor, " n"]:
    return vector / torch.linalg.vector_norm(vector).clamp_min(tiny)


def combine(vectors: Float[Tensor, "k n"], examples: Float[Tensor, " k"], kind: Weighting) -> Float[Tensor, " n"]:
    """The cohort's mean under the chosen weighting."""
    weights = cohort_weights(examples, kind)
    return riemannian_mean(vectors, weights) if kind is Weighting.RIEMANNIAN else mean(vectors, weights)
