"""Which weights are kept: the exact count m, top-m with deterministic ties, per-layer budgets, log_alpha scaling, schedules."""

from collections.abc import Callable
from enum import StrEnum
from fractions import Fraction
from math import isfinite, prod

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT

Budget = tuple[tuple[slice, int], ...]
"""(where, how many kept), parts that cover the parameter vector."""


class BudgetRule(StrEnum):
    """How m is spread over layers (decision C3)."""

    GLOBAL = "global"
    UNIFORM = "uniform"
    """every layer the same density"""
    ERK = "erk"
    """Erdos-Renyi-kernel: small layers denser (Evci et al. 2020)"""


class LogAlphaScaling(StrEnum):
    """How log_alpha is pushed apart at the top m and elsewhere (L155-157, decision C1)."""

    ADDITIVE = "additive"
    """+r and -r"""
    SIGN_AWARE = "sign-aware"
    """+r |log_alpha| and -r |log_alpha|"""
    LITERAL = "literal"
    """(1 + r) log_alpha and (1 - r) log_alpha, the paper's formula"""
    OFF = "off"


class DensitySchedule(StrEnum):
    """How the density of messages falls to its target."""

    CONSTANT = "constant"
    CUBIC = "cubic"


def floor_of_decimal(fraction: float, total: int) -> int:
    """floor(fraction * total) for the decimal number the user wrote: 0.29 of 100 is 29, not 28 (decision C4)."""
    return int(Fraction(str(fraction)) * total)


def num_kept(density: float, size: int) -> int:
    """m = floor(rho |theta|), exactly; a density outside (0, 1] or one that keeps nothing is refused."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, because it is the fraction of weights kept; got {density:g}")
    kept = floor_of_decimal(density, size)
    if kept == 0:
        raise ValueError(f"density {density:g} of {size} parameters keeps none; use at least {1 / size:.2g}")
    return kept


def allocate_budget(layers: list[tuple[slice, tuple[int, ...]]], num_nonzero: int, rule: BudgetRule) -> Budget:
    """Spread `kept` over the layers: globally, in proportion, or by ERK; the parts add up to `kept` exactly."""
    total = sum(_slice_length(part) for part, _ in layers)
    if rule is BudgetRule.GLOBAL:
        return ((slice(0, total), num_nonzero),)
    lengths = [_slice_length(part) for part, _ in layers]
    wanted = (
        [num_nonzero * n / total for n in lengths]
        if rule is BudgetRule.UNIFORM
        else _erk_counts([shape for _, shape in layers], lengths, num_nonzero)
    )
    counts = _round_to_sum(wanted, lengths, num_nonzero)
    return tuple((part, count) for (part, _), count in zip(layers, counts, strict=True))


def _slice_length(part: slice) -> int:
    return part.stop - part.start


def _erk_counts(shapes: list[tuple[int, ...]], lengths: list[int], num_nonzero: int) -> list[float]:
    """Density of a layer in proportion to sum(shape)/prod(shape), full layers capped and their surplus shared again."""
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
    """Whole numbers near `wanted`, each at least 1 where the total allows and at most its limit, that add up to `total`."""
    least = 1 if total >= len(targets) else 0
    counts = [min(max(int(w), least), limit) for w, limit in zip(targets, max_counts, strict=True)]
    by_remainder = sorted(range(len(targets)), key=lambda i: (int(targets[i]) - targets[i], i))
    while (difference := total - sum(counts)) != 0:
        step = 1 if difference > 0 else -1
        for i in by_remainder if step > 0 else reversed(by_remainder):
            if difference != 0 and least <= counts[i] + step <= max_counts[i]:
                counts[i] += step
                difference -= step
    return counts


def top_mask(score: Float[Tensor, "*k n"], budget: Budget, groups: Int64[Tensor, " n"] | None = None) -> Bool[Tensor, "*k n"]:
    """The mask of the largest scores within each part of the budget; ties go to the lowest index (decision C3).

    Groups are kept or dropped whole, by the mean of their squared scores.
    """
    if groups is not None:
        return torch.cat([top_group_mask(score[..., part], kept, groups[part]) for part, kept in budget], dim=-1)
    if len(budget) == 1:
        return top_k_mask(score, budget[0][1])
    return torch.cat([top_k_mask(score[..., part], kept) for part, kept in budget], dim=-1)


def top_group_mask(score: Float[Tensor, "*k n"], max_coordinates: int, groups: Int64[Tensor, " n"]) -> Bool[Tensor, "*k n"]:
    """The mask of as many whole groups as `kept` coordinates hold, the strongest a coordinate first."""
    first = groups - groups.amin()
    sizes = first.bincount()
    empty = torch.zeros(*score.shape[:-1], len(sizes), dtype=score.dtype, device=score.device)
    strength = empty.index_add(-1, first, score * score) / sizes
    if groups_have_equal_size(groups):
        return top_k_mask(strength, max_coordinates // int(sizes[0])).index_select(-1, first)
    return _greedy_groups(strength, sizes, max_coordinates).index_select(-1, first)


def _greedy_groups(strength: Float[Tensor, "*k g"], sizes: Int64[Tensor, " g"], max_coordinates: int) -> Bool[Tensor, "*k g"]:
    """Groups of unequal size in the order of their strength, each that still fits into what is left of `kept`."""
    order = strength.nan_to_num(nan=torch.inf).argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(strength, dtype=torch.bool)
    sizes_list, least = sizes.tolist(), int(sizes.amin())
    for row, mask in zip(order.reshape(-1, len(sizes)).tolist(), chosen.view(-1, len(sizes)), strict=True):
        room = max_coordinates
        for group in row:
            if sizes_list[group] <= room:
                mask[group] = True
                room -= sizes_list[group]
            if room < least:
                break
    return chosen


def groups_have_equal_size(groups: Int64[Tensor, " n"]) -> bool:
    """Whether all groups have one size."""
    sizes = (groups - groups.amin()).bincount()
    return bool(sizes.amin() == sizes.amax())


def sum_within_groups(values: Float[Tensor, "*k n"], groups: Int64[Tensor, " n"] | None) -> Float[Tensor, "*k n"]:
    """Every coordinate's value replaced by the sum over its group."""
    if groups is None:
        return values
    count = int(groups.amax()) + 1
    total = torch.zeros(*values.shape[:-1], count, dtype=values.dtype, device=values.device).index_add(-1, groups, values)
    return total.index_select(-1, groups)


def broadcast_within_groups(values: Float[Tensor, "*k n"], groups: Int64[Tensor, " n"] | None) -> Float[Tensor, "*k n"]:
    """Every coordinate's value replaced by that of its group's first coordinate."""
    if groups is None:
        return values
    count = int(groups.amax()) + 1
    leader = torch.full((count,), len(groups), device=groups.device).scatter_reduce(
        0, groups, torch.arange(len(groups), device=groups.device), "amin"
    )
    return values.index_select(-1, leader.index_select(0, groups))


def top_k_mask(score: Float[Tensor, "*k n"], k: int) -> Bool[Tensor, "*k n"]:
    """The mask of exactly `kept` largest scores in each row, ties to the lowest index."""
    if k >= score.shape[-1]:
        return torch.ones_like(score, dtype=torch.bool)
    if k == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    score = _nan_to_inf(score)
    least = _kth_largest(score, k)
    chosen = score >= least
    if int(chosen.count_nonzero()) == k * (chosen.numel() // chosen.shape[-1]):
        return chosen
    above, tied = score > least, score == least
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def top_k_indices(
    score: Float[Tensor, "*k n"],
    budget: Budget,
    groups: Int64[Tensor, " n"] | None = None,
    global_index: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Int64[Tensor, "*k m"]:
    """Where the mask of `top` is set, in increasing order, or in that of what `order` gives, which then breaks ties too.

    An order of their own have only vectors of one part, without groups.
    """
    (_, kept), size = budget[0], score.shape[-1]
    if groups is not None or len(budget) > 1 or not 0 < kept < size or score.device.type != "cpu":
        places = mask_to_indices(top_mask(score, budget, groups))
        return places if global_index is None else torch.from_numpy(_order_by(global_index, places.numpy()))
    score = _nan_to_inf(score)
    found = np.stack([_top_k_row(row, kept, global_index) for row in score.numpy().reshape(-1, size)])
    return torch.from_numpy(found).view(*score.shape[:-1], kept)


def _nan_to_inf(score: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """A broken weight is chosen, so that whoever validates sees it."""
    return score if isfinite(score.amax()) else score.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _top_k_row(row: Float[np.ndarray, " n"], k: int, global_index: Callable[[np.ndarray], np.ndarray] | None) -> Int64[np.ndarray, " k"]:
    """Places of the k largest."""
    likely = _candidates(row, k)
    values = row if likely is None else row[likely]
    least = np.partition(values, len(values) - k)[len(values) - k]
    found = np.flatnonzero(values >= least) if likely is None else likely[values >= least]
    if len(found) > k:
        tied = row[found] == least
        first, found = found[tied], found[~tied]
        first = first if global_index is None else _order_by(global_index, first)
        found = np.sort(np.concatenate((found, first[: k - len(found)])))
    return found if global_index is None else _order_by(global_index, found)


def _order_by(global_index: Callable[[np.ndarray], np.ndarray], indices: Int64[np.ndarray, "*k m"]) -> Int64[np.ndarray, "*k m"]:
    return np.take_along_axis(indices, global_index(indices).argsort(-1), -1)


SAMPLE_STRIDE = 64
"""Every 64th score tells where the k-th largest lies; few scores need no sample."""


def _kth_largest(score: Float[Tensor, "*k n"], k: int) -> Float[Tensor, "*k 1"]:
    """The k-th largest of each row; NumPy's partition is 7 to 18 times faster than a sorted top-k on 48,608 scores."""
    if score.device.type != "cpu":
        return torch.topk(score, k, dim=-1, sorted=True).values[..., -1:]
    rows = score.numpy().reshape(-1, score.shape[-1])
    least = np.array([_kth_largest_row(row, k) for row in rows], dtype=rows.dtype)
    return torch.from_numpy(least).view(*score.shape[:-1], 1)


def _kth_largest_row(row: Float[np.ndarray, " n"], k: int) -> np.floating:
    likely = _candidates(row, k)
    values = row if likely is None else row[likely]
    return np.partition(values, len(values) - k)[len(values) - k]


def _candidates(row: Float[np.ndarray, " n"], k: int) -> Int64[np.ndarray, " c"] | None:
    """Where few of many are kept, places of those above a bound that a sample suggests, the k largest among them; else None."""
    sample = row[::SAMPLE_STRIDE]
    guess = k // SAMPLE_STRIDE + 4 * int((k / SAMPLE_STRIDE) ** 0.5) + 8
    if guess >= len(sample) // 4:
        return None
    places = np.flatnonzero(row >= np.partition(sample, len(sample) - guess)[len(sample) - guess])
    return places if len(places) >= k else None


def mask_to_indices(mask: Bool[Tensor, "*k n"]) -> Int64[Tensor, "*k m"]:
    """Increasing indices of a mask that holds as many in every row."""
    if mask.device.type == "cpu":
        found = np.flatnonzero(mask.numpy())  # several times faster than torch's
        found %= mask.shape[-1]
        found = torch.from_numpy(found)
    else:
        found = mask.nonzero()[:, -1]
    rows = mask.numel() // mask.shape[-1]
    return found.reshape(*mask.shape[:-1], len(found) // rows)


def restrict_budget(budget: Budget, num_gated: int, num_ungated: int) -> Budget:
    """A global budget over the `gated` coordinates in sight, followed by `free` ones that are always kept."""
    kept = min(budget_total(budget) - num_ungated, num_gated)
    return (
        ((slice(0, num_gated), kept), (slice(num_gated, num_gated + num_ungated), num_ungated))
        if num_ungated
        else ((slice(0, num_gated), kept),)
    )


def budget_total(budget: Budget) -> int:
    """How many the whole budget keeps."""
    return sum(kept for _, kept in budget)


def scale_log_alpha(
    log_alpha: Float[Tensor, "*k n"], mask: Bool[Tensor, "*k n"] | bool, rate: float, kind: LogAlphaScaling
) -> Float[Tensor, "*k n"]:
    """Push log_alpha up where chosen and down elsewhere (L155-157; the literal form never closes an open gate, decision C1)."""
    if kind is LogAlphaScaling.OFF:
        return log_alpha
    if isinstance(mask, bool):
        push = rate if mask else -rate
    else:
        push = torch.where(mask, log_alpha.new_tensor(rate), log_alpha.new_tensor(-rate))
    if kind is not LogAlphaScaling.ADDITIVE:
        push = push * (log_alpha.abs() if kind is LogAlphaScaling.SIGN_AWARE else log_alpha)
    return (log_alpha + push).clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


def scheduled_density(target: float, initial: float, progress: float, kind: DensitySchedule) -> float:
    """The density of messages at `progress` in [0, 1] of the schedule: constant, or a cubic fall (Zhu & Gupta 2017)."""
    if kind is DensitySchedule.CONSTANT or progress >= 1:
        return target
    return target + (initial - target) * (1 - progress) ** 3
