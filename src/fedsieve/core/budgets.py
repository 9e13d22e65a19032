"""How many weights each layer keeps, and groups of weights that share a gate."""

from enum import StrEnum
from fractions import Fraction
from math import prod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

Budget = tuple[tuple[slice, int], ...]
"""(slice, number of kept weights) of the parts that cover the parameter vector."""


class BudgetRule(StrEnum):
    """How the m kept weights are allocated to layers (decision C3)."""

    GLOBAL = "global"
    UNIFORM = "uniform"
    """every layer has the same density"""
    ERK = "erk"
    """Erdos-Renyi-kernel: small layers are denser (Evci et al. 2020)"""


def floor_of_decimal(fraction: float, total: int) -> int:
    """floor(fraction * total) for the decimal number the user wrote: 0.29 of 100 is 29, not 28 (decision C4)."""
    return int(Fraction(str(fraction)) * total)


def num_kept(density: float, size: int) -> int:
    """m = floor(rho |theta|), exactly. A density outside (0, 1], or one that keeps no weight, is an error."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, because it is the fraction of weights kept; got {density:g}")
    kept = floor_of_decimal(density, size)
    if kept == 0:
        raise ValueError(f"density {density:g} of {size} parameters keeps none; use at least {1 / size:.2g}")
    return kept


def allocate_budget(layers: list[tuple[slice, tuple[int, ...]]], num_nonzero: int, rule: BudgetRule) -> Budget:
    """Allocate `num_nonzero` weights to the layers by the rule; the parts sum to it exactly."""
    lengths = [part.stop - part.start for part, _ in layers]
    total = sum(lengths)
    if rule is BudgetRule.GLOBAL:
        return ((slice(0, total), num_nonzero),)
    targets = (
        [num_nonzero * n / total for n in lengths]
        if rule is BudgetRule.UNIFORM
        else _erk_counts([shape for _, shape in layers], lengths, num_nonzero)
    )
    counts = _round_to_sum(targets, lengths, num_nonzero)
    return tuple((part, count) for (part, _), count in zip(layers, counts, strict=True))


def _erk_counts(shapes: list[tuple[int, ...]], lengths: list[int], num_nonzero: int) -> list[float]:
    """Weights of each layer if densities are proportional to sum(shape)/prod(shape); the surplus of full layers is shared again."""
    raw = [sum(shape) / prod(shape) * n for shape, n in zip(shapes, lengths, strict=True)]
    full: set[int] = set()
    while True:
        left = num_nonzero - sum(lengths[i] for i in full)
        scale = left / sum(r for i, r in enumerate(raw) if i not in full) if len(full) < len(raw) else 0.0
        over = {i for i, n in enumerate(lengths) if i not in full and scale * raw[i] > n}
        if not over:
            return [float(n) if i in full else scale * raw[i] for i, n in enumerate(lengths)]
        full |= over


def _round_to_sum(targets: list[float], max_counts: list[int], total: int) -> list[int]:
    """Integers near `targets` that sum to `total`, each at most its maximum and at least 1 if the total allows it."""
    min_count = 1 if total >= len(targets) else 0
    counts = [min(max(int(w), min_count), limit) for w, limit in zip(targets, max_counts, strict=True)]
    by_remainder = sorted(range(len(targets)), key=lambda i: (int(targets[i]) - targets[i], i))
    while (difference := total - sum(counts)) != 0:
        step = 1 if difference > 0 else -1
        for i in by_remainder if step > 0 else reversed(by_remainder):
            if difference != 0 and min_count <= counts[i] + step <= max_counts[i]:
                counts[i] += step
                difference -= step
    return counts


def round_to_groups(kept: int, groups: Int64[Tensor, " n"]) -> int:
    """Return the largest count up to `kept` that whole groups of equal size fill; `kept` itself if the sizes differ."""
    sizes = (groups - groups.amin()).bincount()
    smallest = int(sizes.amin())
    if kept < smallest:
        raise ValueError(f"a budget of {kept} weights is less than one group of {smallest}; use a higher density")
    return kept - kept % smallest if groups_have_equal_size(groups) else kept


def groups_have_equal_size(groups: Int64[Tensor, " n"]) -> bool:
    """Whether all groups have the same size."""
    sizes = (groups - groups.amin()).bincount()
    return bool(sizes.amin() == sizes.amax())


def sum_within_groups(values: Float[Tensor, "*k n"], groups: Int64[Tensor, " n"] | None) -> Float[Tensor, "*k n"]:
    """Replace every value by the sum over its group."""
    if groups is None:
        return values
    count = int(groups.amax()) + 1
    total = torch.zeros(*values.shape[:-1], count, dtype=values.dtype, device=values.device).index_add(-1, groups, values)
    return total.index_select(-1, groups)


def broadcast_within_groups(values: Float[Tensor, "*k n"], groups: Int64[Tensor, " n"] | None) -> Float[Tensor, "*k n"]:
    """Replace every value by that of the first coordinate of its group."""
    if groups is None:
        return values
    count = int(groups.amax()) + 1
    leader = torch.full((count,), len(groups), device=groups.device).scatter_reduce(
        0, groups, torch.arange(len(groups), device=groups.device), "amin"
    )
    return values.index_select(-1, leader.index_select(0, groups))


def restrict_budget(budget: Budget, num_gated: int, num_ungated: int) -> Budget:
    """The global budget of a vector with `num_gated` active coordinates, followed by `num_ungated` ones that are always kept."""
    kept = min(budget_total(budget) - num_ungated, num_gated)
    return (
        ((slice(0, num_gated), kept), (slice(num_gated, num_gated + num_ungated), num_ungated))
        if num_ungated
        else ((slice(0, num_gated), kept),)
    )


def budget_total(budget: Budget) -> int:
    """The number of weights that the whole budget keeps."""
    return sum(kept for _, kept in budget)
