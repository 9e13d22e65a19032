"""Client weights, and the weighted mean of client replies."""

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.packets import GATE_FIELDS, SparseVector
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.kernels import accelerated


class ClientWeighting(StrEnum):
    """Weight of each client in the mean (decision D1); the weights of a cohort sum to one."""

    EXAMPLES = "examples"
    """n_k"""
    SQRT = "sqrt"
    """sqrt(n_k)"""
    UNIFORM = "uniform"
    """1/K, the paper's B/(K B)"""
    RIEMANNIAN = "riemannian"
    """n_k, for the Frechet mean of directions and the mean of norms (decision D6)"""


class Aggregator(StrEnum):
    """How client replies are aggregated (docs/theory.md). All but `weighted` are robust and act on differences to the broadcast."""

    WEIGHTED = "weighted"
    """the weighted mean of the replies; of every twenty, the one that differs most from the broadcast counts like the next"""
    MEDIAN = "median"
    """the weighted median of each coordinate"""
    TRIMMED = "trimmed"
    """the weighted mean of each coordinate without its smallest and largest values"""
    KRUM = "krum"
    """the weighted mean of the clients with the nearest neighbours (multi-Krum)"""
    GEOMETRIC_MEDIAN = "geometric-median"
    """the point with the least weighted distance to all replies"""
    SIMILARITY = "similarity"
    """the mean of replies that are no longer than the median; those unusually similar to others count less; recommended"""


@lru_cache(maxsize=16)
def client_weights(
    num_examples: tuple[float, ...], weighting: ClientWeighting, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Float[Tensor, " k"]:
    """w_k of the clients that replied, from n_k; cached, because it is the same in every exchange of a round."""
    examples = torch.tensor(num_examples, dtype=dtype, device=device)
    raw = {ClientWeighting.SQRT: torch.sqrt, ClientWeighting.UNIFORM: torch.ones_like}.get(weighting, torch.clone)(examples)
    return raw / raw.sum()


REPLIES_PER_MALICIOUS_CLIENT = 20
"""The weighted mean limits one reply of this many: what it promises to tolerate. Smaller cohorts have the plain mean."""


def limit_largest(sizes: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Return the sizes, of which the largest, one of twenty, are reduced to the next: a size that an honest client has, or less."""
    return sizes.clamp_max(sizes.topk(len(sizes) // REPLIES_PER_MALICIOUS_CLIENT + 1).values[-1])


def delta_norms(vectors: dict[str, SparseVector], sent: dict[str, Tensor], size: int) -> Float[Tensor, "*k"]:
    """The norm of each client's difference to the broadcast, over all fields and all coordinates with a value."""
    distances = [part.distance_to(sent.get(name), size) for name, part in vectors.items()]
    return torch.stack(distances).square().sum(0).sqrt()


def mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """sum_k w_k v_k. The order of a sum, unlike that of a matrix product, depends on the shape only: all engines give the same bits."""
    return (vectors * weights[:, None]).sum(0)


@accelerated(
    "vector",
    "mean_of_levels",
    tensors=("weights", "field.scale"),
    size=lambda field, _: field.codes.shape[-1],
    condition=lambda field, _: field.scale is not None and field.coding is not Coding.NORMAL2 and field.codes.is_contiguous(),
)
def quantized_mean(field: QuantizedField, weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """sum_k w_k v_k of the decoded values of a dense stack."""
    return mean(field.decode(weights.dtype), weights)


def sparse_mean(stacks: Sequence[SparseVector], weights: Float[Tensor, " k"], size: int) -> Float[Tensor, " n"]:
    """sum_k w_k v_k of stacks of sparse vectors, added client by client in every engine."""
    if all(stack.indices is None for stack in stacks):
        return mean(torch.cat([stack.values for stack in stacks]), weights)
    total, parts = weights.new_zeros(size), weights.split([len(stack.values) for stack in stacks])
    total += sum((part * stack.default).sum() for stack, part in zip(stacks, parts, strict=True) if stack.default is not None)
    for stack, part in zip(stacks, parts, strict=True):
        values = stack.values if stack.default is None else stack.values - stack.default[:, None]
        addends = values * part[:, None]
        if stack.indices is None:
            total += addends.sum(0)
        else:
            for indices, addend in zip(stack.indices, addends, strict=True):
                total.index_add_(0, indices, addend)
    return total


def limited_mean(
    stacks: Sequence[dict[str, SparseVector]], sent: dict[str, Tensor], weights: Float[Tensor, " k"], size: int
) -> dict[str, Float[Tensor, " _n"]]:
    """Return the mean of stacks of replies, by field, in which the longest differences to the broadcast are shortened to the next longest.

    Weights and gates are limited separately. So a malicious client counts as an honest one with its number of examples, however far it
    goes. A reply that is shortened by a factor is that part of itself, and the broadcast for the rest.
    """
    means = {}
    for names in ({*stacks[0]} - GATE_FIELDS, {*stacks[0]} & GATE_FIELDS):
        if names:
            norms = torch.cat([delta_norms({name: stack[name] for name in names}, sent, size) for stack in stacks])
            limited = weights * torch.where(norms > 0, limit_largest(norms) / norms, 1.0).to(weights)
            for name in names:
                mean_of_parts = sparse_mean([stack[name] for stack in stacks], limited, size)
                means[name] = mean_of_parts + (weights - limited).sum() * sent[name] if name in sent else mean_of_parts
    return {name: means[name] for name in stacks[0]}


def riemannian_mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"], num_iterations: int = 10) -> Float[Tensor, " n"]:
    """The weighted mean of norms times the weighted Frechet mean of directions (our reading of one clause, L170, decision D6).

    Karcher's iteration: average the log maps at the current point, step along the geodesic. Zero vectors have no direction and no weight.
    """
    norms = torch.linalg.vector_norm(vectors, dim=-1)
    tiny = torch.finfo(vectors.dtype).tiny
    directions = vectors / norms.clamp_min(tiny)[:, None]
    direction_weights = weights * (norms > 0)
    point = _normalize(mean(directions, direction_weights), tiny)
    for _ in range(num_iterations):
        cosine = (directions * point).sum(-1).clamp(-1, 1)
        tangent = directions - cosine[:, None] * point
        length = torch.linalg.vector_norm(tangent, dim=-1)
        angle = torch.atan2(length, cosine)
        step = mean(tangent / length.clamp_min(tiny)[:, None], direction_weights * angle)
        size = torch.linalg.vector_norm(step)
        point = _normalize(torch.cos(size) * point + torch.sin(size) * step / size.clamp_min(tiny), tiny)
    return mean(norms[:, None], weights) * point


def _normalize(vector: Float[Tensor, " n"], tiny: float) -> Float[Tensor, " n"]:
    return vector / torch.linalg.vector_norm(vector).clamp_min(tiny)
