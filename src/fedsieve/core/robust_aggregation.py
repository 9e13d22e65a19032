"""Aggregation that tolerates malicious clients: median, trimmed mean, multi-Krum and geometric median of client deltas."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.core.aggregation import Aggregator, mean
from fedsieve.core.budgets import floor_of_decimal


def robust_aggregate(
    deltas: dict[str, Float[Tensor, "k _n"]], weights: Float[Tensor, " k"], aggregator: Aggregator, max_malicious_fraction: float
) -> dict[str, Float[Tensor, " _n"]]:
    """The middle of a cohort's differences, part by part, `tolerate` being the share of clients that may be hostile.

    Only coordinates somebody spoke of are looked at; elsewhere nobody moved. Coordinate-wise rules see each part alone; krum and the
    geometric median judge a client by all it sent, gates and weights each in units of their median norm in the cohort.
    """
    spoken = {name: (stack != 0).any(0) for name, stack in deltas.items()}
    dense = {name: stack[:, spoken[name]] for name, stack in deltas.items()}
    if aggregator is Aggregator.MEDIAN:
        middle = {name: median(stack, weights) for name, stack in dense.items()}
    elif aggregator is Aggregator.TRIMMED:
        middle = {name: trimmed_mean(stack, weights, max_malicious_fraction) for name, stack in dense.items()}
    else:
        units = _median_norms(dense)
        whole = torch.cat([stack.double() / units[name] for name, stack in dense.items()], dim=-1)
        if aggregator is Aggregator.KRUM:
            say = weights * krum_selection(whole, floor_of_decimal(max_malicious_fraction, len(whole)))
            middle = {name: mean(stack, say / say.sum()) for name, stack in dense.items()}
        else:
            point = geometric_median(whole, weights.double())
            parts = point.split([stack.shape[-1] for stack in dense.values()])
            middle = {name: (part * units[name]).to(dense[name]) for name, part in zip(dense, parts, strict=True)}
    return {name: _scatter(value, spoken[name]) for name, value in middle.items()}


def _scatter(values: Float[Tensor, " m"], mask: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    return torch.zeros(len(mask), dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def _median_norms(deltas: dict[str, Float[Tensor, "k _n"]]) -> dict[str, Float[Tensor, ""]]:
    """The median norm of a cohort's differences in gates, and in weights; 1 where most did not move."""
    found = {}
    for gates in (True, False):
        names = [name for name in deltas if ("gate" in name) is gates]
        if names:
            size = torch.linalg.vector_norm(torch.cat([deltas[name] for name in names], dim=-1), dim=-1, dtype=torch.float64).median()
            found |= dict.fromkeys(names, torch.where(size > 0, size, torch.ones_like(size)))
    return found


TOLERANCE = 1e-6
"""Sums of weights are exact to this."""


def median(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """The weighted median of each coordinate: half of the weight lies on either side; between two values their middle."""
    values, order = vectors.sort(dim=0, stable=True)
    after = weights[order].cumsum(0)
    lower = (after < 0.5 - TOLERANCE).sum(0, keepdim=True).clamp_max(len(values) - 1)
    upper = (after < 0.5 + TOLERANCE).sum(0, keepdim=True).clamp_max(len(values) - 1)
    return ((values.gather(0, lower) + values.gather(0, upper)) / 2)[0]


def trimmed_mean(vectors: Float[Tensor, "k n"], weights: Float[Tensor, " k"], trim_fraction: float) -> Float[Tensor, " n"]:
    """The mean of each coordinate's values between its quantiles `trim` and 1 - `trim`, weights cut where a quantile falls inside one."""
    values, order = vectors.sort(dim=0, stable=True)
    share = weights[order]
    after = share.cumsum(0)
    inside = (after.clamp_max(1 - trim_fraction) - (after - share).clamp_min(trim_fraction)).clamp_min(0)
    inside = torch.where(inside > TOLERANCE * share, inside, torch.zeros_like(inside))  # a hostile 1e30 times a rounding error is not small
    return (values * inside).sum(0) / inside.sum(0)


def krum_selection(vectors: Float[Tensor, "k n"], num_malicious: int) -> Bool[Tensor, " k"]:
    """Multi-Krum (Blanchard et al. 2017): the k - f clients with the least sum of squared distances to their k - f - 2 nearest others.

    Every client counts once, whatever its weight: neighbours are counted. Safe while f <= (k - 3) / 2.
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
        apart = distance > 0
        if weights[~apart].sum() >= 0.5 - TOLERANCE:
            return point
        pull = weights / distance.clamp_min(TOLERANCE * distance[apart].min())
        moved = mean(vectors, pull / pull.sum())
        if torch.linalg.vector_norm(moved - point) <= TOLERANCE * torch.linalg.vector_norm(moved):
            return moved
        point = moved
    return point
