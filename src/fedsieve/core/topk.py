"""The exact top k of a vector, with ties broken by index, and a fast way to find them."""

from collections.abc import Callable
from math import isfinite

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.core.budgets import Budget, groups_have_equal_size


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
    """The mask of the strongest whole groups with at most `max_coordinates` coordinates together."""
    first = groups - groups.amin()
    sizes = first.bincount()
    empty = torch.zeros(*score.shape[:-1], len(sizes), dtype=score.dtype, device=score.device)
    strength = empty.index_add(-1, first, score * score) / sizes
    if groups_have_equal_size(groups):
        return top_k_mask(strength, max_coordinates // int(sizes[0])).index_select(-1, first)
    return _greedy_groups(strength, sizes, max_coordinates).index_select(-1, first)


def _greedy_groups(strength: Float[Tensor, "*k g"], sizes: Int64[Tensor, " g"], max_coordinates: int) -> Bool[Tensor, "*k g"]:
    """The mask of groups of unequal size: in the order of strength, each group that still fits."""
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


def top_k_mask(score: Float[Tensor, "*k n"], k: int) -> Bool[Tensor, "*k n"]:
    """The mask of exactly the k largest scores in each row; ties go to the lowest index."""
    if k >= score.shape[-1]:
        return torch.ones_like(score, dtype=torch.bool)
    if k == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    if score.device.type == "cpu":
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, _top_k_rows(score, k), True)
    score = score.nan_to_num(nan=torch.inf, posinf=torch.inf)
    least = torch.topk(score, k, dim=-1, sorted=True).values[..., -1:]
    above, tied = score > least, score == least
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def top_k_indices(
    score: Float[Tensor, "*k n"],
    budget: Budget,
    groups: Int64[Tensor, " n"] | None = None,
    global_index: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Int64[Tensor, "*k m"]:
    """The indices at which `top_mask` is set, in increasing order.

    With `global_index`, which maps indices to those of a longer vector, the order and the ties follow the longer vector. It needs a
    budget of one part without groups.
    """
    (_, kept), size = budget[0], score.shape[-1]
    if groups is not None or len(budget) > 1 or not 0 < kept < size or score.device.type != "cpu":
        indices = mask_to_indices(top_mask(score, budget, groups))
        return indices if global_index is None else torch.from_numpy(_order_by(global_index, indices.numpy()))
    return _top_k_rows(score, kept, global_index)


def _top_k_rows(
    score: Float[Tensor, "*k n"], k: int, global_index: Callable[[np.ndarray], np.ndarray] | None = None
) -> Int64[Tensor, "*k m"]:
    """Indices of the k largest scores of each row. NumPy's partition is 7 to 18 times faster than a sorted top-k of 48,608 scores.

    NaN counts as infinity: such a weight is selected, so that validation finds it.
    """
    score = score if isfinite(score.amax()) else score.nan_to_num(nan=torch.inf, posinf=torch.inf)
    rows = score.numpy().reshape(-1, score.shape[-1])
    return torch.from_numpy(np.stack([_top_k_row(row, k, global_index) for row in rows])).view(*score.shape[:-1], k)


def _top_k_row(row: Float[np.ndarray, " n"], k: int, global_index: Callable[[np.ndarray], np.ndarray] | None) -> Int64[np.ndarray, " k"]:
    """Indices of the k largest scores of one row."""
    likely = _candidates(row, k)
    values = row if likely is None else row[likely]
    least = np.partition(values, len(values) - k)[len(values) - k]
    indices = np.flatnonzero(values >= least) if likely is None else likely[values >= least]
    if len(indices) > k:
        is_tied = row[indices] == least
        tied, indices = indices[is_tied], indices[~is_tied]
        tied = tied if global_index is None else _order_by(global_index, tied)
        indices = np.sort(np.concatenate((indices, tied[: k - len(indices)])))
    return indices if global_index is None else _order_by(global_index, indices)


def _order_by(global_index: Callable[[np.ndarray], np.ndarray], indices: Int64[np.ndarray, "*k m"]) -> Int64[np.ndarray, "*k m"]:
    return np.take_along_axis(indices, global_index(indices).argsort(-1), -1)


SAMPLE_STRIDE = 64
"""Every 64th score is a sample that bounds the k-th largest score from below."""


def _candidates(row: Float[np.ndarray, " n"], k: int) -> Int64[np.ndarray, " c"] | None:
    """Indices of scores above a bound from a sample, which contain the k largest; None if k is too large for this to be faster."""
    sample = row[::SAMPLE_STRIDE]
    guess = k // SAMPLE_STRIDE + 4 * int((k / SAMPLE_STRIDE) ** 0.5) + 8
    if guess >= len(sample) // 4:
        return None
    indices = np.flatnonzero(row >= np.partition(sample, len(sample) - guess)[len(sample) - guess])
    return indices if len(indices) >= k else None


def mask_to_indices(mask: Bool[Tensor, "*k n"]) -> Int64[Tensor, "*k m"]:
    """Increasing indices of a mask with the same number of entries in every row."""
    if mask.device.type == "cpu":
        flat = np.flatnonzero(mask.numpy())  # several times faster than torch's
        flat %= mask.shape[-1]
        indices = torch.from_numpy(flat)
    else:
        indices = mask.nonzero()[:, -1]
    rows = mask.numel() // mask.shape[-1]
    return indices.reshape(*mask.shape[:-1], len(indices) // rows)
