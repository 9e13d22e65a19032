"""Aggregation that tolerates malicious clients: median, trimmed mean, multi-Krum, geometric median, weights by similarity."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.core.aggregation import Aggregator, mean
from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.packets import GATE_FIELDS


def robust_aggregate(
    deltas: dict[str, Float[Tensor, "k _n"]], weights: Float[Tensor, " k"], aggregator: Aggregator, max_malicious_fraction: float
) -> dict[str, Float[Tensor, " _n"]]:
    """Aggregate the differences of clients to the broadcast, field by field.

    Coordinates that no client changed are skipped. Median and trimmed mean treat each field alone, similarity weights gates and weights.
    Krum and the geometric median compare clients by all their fields, with gates and weights each divided by their median norm.
    """
    changed = {name: (stack != 0).any(0) for name, stack in deltas.items()}
    dense = {name: stack[:, changed[name]] for name, stack in deltas.items()}
    if aggregator is Aggregator.MEDIAN:
        aggregate = {name: median(stack, weights) for name, stack in dense.items()}
    elif aggregator is Aggregator.TRIMMED:
        aggregate = {name: trimmed_mean(stack, weights, max_malicious_fraction) for name, stack in dense.items()}
    elif aggregator is Aggregator.SIMILARITY:
        aggregate = {}
        for names in _gates_and_weights(dense):
            whole = similarity_mean(torch.cat([dense[name] for name in names], dim=-1), weights)
            aggregate |= zip(names, whole.split([dense[name].shape[-1] for name in names]), strict=True)
    else:
        units = _median_norms(dense)
        whole = torch.cat([stack.double() / units[name] for name, stack in dense.items()], dim=-1)
        if aggregator is Aggregator.KRUM:
            selected = weights * krum_selection(whole, floor_of_decimal(max_malicious_fraction, len(whole)))
            aggregate = {name: mean(stack, selected / selected.sum()) for name, stack in dense.items()}
        else:
            point = geometric_median(whole, weights.double())
            parts = point.split([stack.shape[-1] for stack in dense.values()])
            aggregate = {name: (part * units[name]).to(dense[name]) for name, part in zip(dense, parts, strict=True)}
    return {name: _scatter(value, changed[name]) for name, value in aggregate.items()}


def _scatter(values: Float[Tensor, " m"], mask: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    return torch.zeros(len(mask), dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _median_norms(deltas: dict[str, Float[Tensor, "k _n"]]) -> dict[str, Float[Tensor, ""]]:
    """The median norm of the gate fields and that of the weight fields over the cohort; 1 if it is zero."""
    norms = {}
    for names in _gates_and_weights(deltas):
        size = torch.linalg.vector_norm(torch.cat([deltas[name] for name in names], dim=-1), dim=-1, dtype=torch.float64).median()
        norms |= dict.fromkeys(names, torch.where(size > 0, size, torch.ones_like(size)))
    return norms


def _gates_and_weights(fields: Iterable[str]) -> list[list[str]]:
    """The names of the fields that are gates, and of those that are weights; what has no field is left out."""
    gates = {name: name in GATE_FIELDS for name in fields}
    return [names for kind in (True, False) if (names := [name for name, is_gate in gates.items() if is_gate is kind])]


TOLERANCE = 1e-6
"""Accuracy of sums of client weights, and of the geometric median."""


def median(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """The weighted median of each coordinate: half of the weight (they sum to 1) lies on either side; between two values their mean."""
    values, order = vectors.sort(dim=0, stable=True)
    after = weights[order].cumsum(0)
    lower = (after < 0.5 - TOLERANCE).sum(0, keepdim=True)
    upper = (after < 0.5 + TOLERANCE).sum(0, keepdim=True)
    return ((values.gather(0, lower) + values.gather(0, upper)) / 2)[0]


def trimmed_mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"], trim_fraction: float) -> Float[Tensor, " n"]:
    """The mean of each coordinate between its quantiles `trim_fraction` and 1 - `trim_fraction`; a weight may count in part."""
    values, order = vectors.sort(dim=0, stable=True)
    share = weights[order]
    after = share.cumsum(0)
    inside = (after.clamp_max(1 - trim_fraction) - (after - share).clamp_min(trim_fraction)).clamp_min(0)
    inside = torch.where(
        inside > TOLERANCE * share, inside, torch.zeros_like(inside)
    )  # a rounding error times a malicious 1e30 is not small
    return (values * inside).sum(0) / inside.sum(0)


def similarity_mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """The mean of vectors no longer than their median length, with weights divided by 1 + sum_j max(cos_ij - c_i, 0)^2.

    c_i is the median cosine of vector i and the others: what agreement is usual. So r equal vectors among others that are orthogonal count
    as one, and those of a majority in full. FoolsGold (Fung et al. 2018, arXiv 1808.04866) weights by similarity too.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64)
    directions = vectors.double() / lengths.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    count = len(vectors)
    is_other = ~torch.eye(count, dtype=torch.bool, device=vectors.device)
    shares = weights
    if count > 1:
        cosine = (directions @ directions.T)[is_other].view(count, count - 1)
        excess = (cosine - cosine.median(dim=-1, keepdim=True).values).clamp_min(0)
        shares = weights / (1 + excess.square().sum(-1)).to(weights)
    factors = torch.where(lengths > lengths.median(), lengths.median() / lengths, 1.0).to(weights)
    return mean(vectors, factors * shares / shares.sum())


def krum_selection(vectors: Float[Tensor, "k n"], num_malicious: int) -> Bool[Tensor, " k"]:
    """Multi-Krum (Blanchard et al. 2017): the k - f clients with the least sum of squared distances to their k - f - 2 nearest others.

    Every client counts once, whatever its weight. The guarantee needs f <= (k - 3) / 2.
    """
    count = len(vectors)
    square = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
    near = square.sort(dim=-1).values[:, 1 : max(count - num_malicious - 1, 1)].sum(-1)
    kept = torch.zeros(count, dtype=torch.bool, device=vectors.device)
    kept[near.argsort(stable=True)[: count - num_malicious]] = True
    return kept


def geometric_median(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"], num_iterations: int = 100) -> Float[Tensor, " n"]:
    """argmin_x sum_k w_k |x - v_k| by Weiszfeld's iteration, smoothed as in RFA (Pillutla et al. 2022), from the coordinate-wise median."""
    point = median(vectors, weights)
    for _ in range(num_iterations):
        distance = torch.linalg.vector_norm(vectors - point, dim=-1)
        is_distinct = distance > 0
        if weights[~is_distinct].sum() >= 0.5 - TOLERANCE:
            return point
        inverse_distance = weights / distance.clamp_min(TOLERANCE * distance[is_distinct].min())
        new_point = mean(vectors, inverse_distance / inverse_distance.sum())
        if torch.linalg.vector_norm(new_point - point) <= TOLERANCE * torch.linalg.vector_norm(new_point):
            return new_point
        point = new_point
    return point
