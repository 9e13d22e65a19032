"""Client weights, and the weighted mean of client replies."""

from enum import StrEnum
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.packets import SparseVector
from fedsieve.core.quantization import QuantizedField
from fedsieve.kernels import accelerated


class ClientWeighting(StrEnum):
    """How much each client of the cohort counts (decision D1); the weights of a cohort add up to one."""

    EXAMPLES = "examples"
    """n_k"""
    SQRT = "sqrt"
    """sqrt(n_k)"""
    UNIFORM = "uniform"
    """1/K, the paper's B/(K B)"""
    RIEMANNIAN = "riemannian"
    """n_k for the Frechet mean of directions, norms averaged apart (decision D6)"""


class Aggregator(StrEnum):
    """What stands in the middle of a cohort's replies (docs/theory.md); all but the first are robust and act on differences."""

    WEIGHTED = "weighted"
    """the weighted mean of what was sent: one client can move it as far as it likes"""
    MEDIAN = "median"
    """the weighted median of each coordinate"""
    TRIMMED = "trimmed"
    """the weighted mean of each coordinate without its two ends"""
    KRUM = "krum"
    """the weighted mean of the clients with the nearest neighbours (multi-Krum)"""
    GEOMETRIC_MEDIAN = "geometric-median"
    """the point with the least weighted distance to all replies (geometric median)"""


@lru_cache(maxsize=16)
def client_weights(
    num_examples: tuple[float, ...], weighting: ClientWeighting, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Float[Tensor, " k"]:
    """w_k over the cohort that replied, given n_k; the same in every exchange of a round."""
    examples = torch.tensor(num_examples, dtype=dtype, device=device)
    raw = {ClientWeighting.SQRT: torch.sqrt, ClientWeighting.UNIFORM: torch.ones_like}.get(weighting, torch.clone)(examples)
    return raw / raw.sum()


def mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """sum_k w_k v_k. A sum, not a product of matrices: its order depends on the shape alone, so every engine gives the same bits."""
    return (vectors * weights[:, None]).sum(0)


@accelerated(
    "vector",
    "mean_of_levels",
    tensors=("weights", "field.scale"),
    size=lambda field, _: field.codes.shape[-1],
    condition=lambda field, _: field.scale is not None and field.codes.is_contiguous(),
)
def quantized_mean(field: QuantizedField, weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """sum_k w_k v_k of the decoded values of a dense stack."""
    return mean(field.decode(weights.dtype), weights)


def sparse_mean(stack: SparseVector, weights: Float[Tensor, " k"], size: int) -> Float[Tensor, " n"]:
    """sum_k w_k v_k of a stack that speaks of a few coordinates each: client after client, in every engine."""
    if stack.indices is None:
        return mean(stack.values, weights)
    values, rest = stack.values, 0.0
    if stack.default is not None:
        values, rest = values - stack.default[:, None], (weights * stack.default).sum()
    total = values.new_empty(size).fill_(rest)
    for places, addend in zip(stack.indices, values * weights[:, None], strict=True):
        total.index_add_(0, places, addend)
    return total


def riemannian_mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"], num_iterations: int = 10) -> Float[Tensor, " n"]:
    """Norms averaged plainly, directions by the weighted Frechet mean on the sphere (our reading of one clause, L170, decision D6).

    Karcher's iteration: average the log maps at the current point, walk along the geodesic. Zero vectors have no direction and no say.
    """
    norms = torch.linalg.vector_norm(vectors, dim=-1)
    tiny = torch.finfo(vectors.dtype).tiny
    directions = vectors / norms.clamp_min(tiny)[:, None]
    say = weights * (norms > 0)
    point = _normalize(mean(directions, say), tiny)
    for _ in range(num_iterations):
        cosine = (directions * point).sum(-1).clamp(-1, 1)
        tangent = directions - cosine[:, None] * point
        length = torch.linalg.vector_norm(tangent, dim=-1)
        angle = torch.atan2(length, cosine)
        step = mean(tangent / length.clamp_min(tiny)[:, None], say * angle)
        size = torch.linalg.vector_norm(step)
        point = _normalize(torch.cos(size) * point + torch.sin(size) * step / size.clamp_min(tiny), tiny)
    return mean(norms[:, None], weights) * point


def _normalize(vector: Float[Tensor, " n"], tiny: float) -> Float[Tensor, " n"]:
    return vector / torch.linalg.vector_norm(vector).clamp_min(tiny)
