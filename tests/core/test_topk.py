"""The exact top k, and its fast path."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.core import budgets, topk
from fedsieve.core.budgets import BudgetRule


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_the_top_is_the_largest_with_ties_to_the_lowest_index(values, data):
    kept = data.draw(st.integers(0, len(values)))
    mask = topk.top_k_mask(torch.tensor(values, dtype=torch.float64), kept)
    brute = sorted(range(len(values)), key=lambda i: (-values[i], i))[:kept]
    assert mask.nonzero()[:, 0].tolist() == sorted(brute)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_top_indices_are_those_of_the_mask_in_global_order(values, data):
    kept, size = data.draw(st.integers(1, len(values))), len(values)
    score, parts = torch.tensor(values, dtype=torch.float64)[None], ((slice(0, size), kept),)
    assert torch.equal(topk.top_k_indices(score, parts), topk.mask_to_indices(topk.top_mask(score, parts)))
    stands = np.array(data.draw(st.permutations(range(size))))
    brute = sorted(sorted(range(size), key=lambda i: (-values[i], stands[i]))[:kept], key=lambda i: stands[i])
    assert topk.top_k_indices(score, parts, global_index=lambda places: stands[places])[0].tolist() == brute


def test_the_fast_path_finds_the_same_top_k():
    score = torch.rand(2, 40_000, generator=torch.Generator().manual_seed(0)).mul(2000).floor()
    parts = ((slice(0, 40_000), 300),)
    assert torch.equal(topk.top_k_indices(score, parts), topk.mask_to_indices(topk.top_mask(score, parts)))
    score[1, 77] = torch.nan
    assert 77 in topk.top_k_indices(score, parts)[1]


def test_a_stack_is_selected_row_by_row():
    score = torch.randint(0, 5, (6, 40), generator=torch.Generator().manual_seed(0)).double()
    stacked = topk.top_k_mask(score, 7)
    for row, mask in zip(score, stacked, strict=True):
        assert torch.equal(topk.top_k_mask(row, 7), mask)
    positions = topk.mask_to_indices(stacked)
    assert (positions.diff(dim=-1) > 0).all()
    assert stacked.gather(-1, positions).all()


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40)])
@pytest.mark.parametrize("kept", [0, 1, 7, 39, 40])
def test_indices_of_vectors_and_stacks_are_those_of_a_stable_sort(shape, kept):
    score = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(2)).double()
    expected = score.argsort(dim=-1, descending=True, stable=True)[..., :kept].sort(-1).values
    assert torch.equal(topk.top_k_indices(score, ((slice(0, 40), kept),)), expected)
    mask = torch.zeros(shape, dtype=torch.bool).scatter_(-1, expected, True)
    assert torch.equal(topk.top_k_mask(score, kept), mask)
    assert torch.equal(topk.mask_to_indices(mask), expected)


@pytest.mark.parametrize("kept", [3, 12])
def test_a_restricted_vector_with_layers_is_ordered_by_its_place_in_the_full_one(kept):
    """The path of masks: a full budget, or one with several parts."""
    stands = np.random.default_rng(0).permutation(12)
    score = torch.arange(12.0, dtype=torch.float64)[None]
    parts = ((slice(0, 12), 12),) if kept == 12 else ((slice(0, 6), 2), (slice(6, 12), 1))
    chosen = range(12) if kept == 12 else (4, 5, 11)
    found = topk.top_k_indices(score, parts, global_index=lambda places: stands[places])
    assert found[0].tolist() == sorted(chosen, key=lambda i: stands[i])


def test_groups_are_ranked_by_the_mean_of_their_squared_scores():
    groups = torch.tensor([4, 4, 4, 5, 5, 6])
    score = torch.tensor([[1.0, 1.0, 1.0, -2.0, 0.0, 1.2], [3.0, 0.0, 0.0, -2.0, 1.0, 1.0]])
    mask = topk.top_group_mask(score, 3, groups)
    assert mask.tolist() == [[False] * 3 + [True] * 3, [True] * 3 + [False] * 3]  # means 1, 2, 1.44 and 3, 2.5, 1
    assert torch.equal(topk.top_k_indices(score[:1], ((slice(0, 6), 3),), groups), torch.tensor([[3, 4, 5]]))


def test_groups_of_equal_size_are_kept_whole_row_by_row():
    groups, score = torch.arange(12) // 3, torch.rand(2, 2, 12, generator=torch.Generator().manual_seed(5))
    strength = score.square().view(2, 2, 4, 3).mean(-1)
    expected = (strength >= strength.topk(2).values[..., -1:]).repeat_interleave(3, dim=-1)
    assert torch.equal(topk.top_group_mask(score, 8, groups), expected)
    assert torch.equal(topk.top_mask(score, ((slice(0, 12), 8),), groups), expected)
    layers = ((slice(0, 6), 3), (slice(6, 12), 6))
    halves = [topk.top_group_mask(score[..., part], kept, groups[part]) for part, kept in layers]
    assert torch.equal(topk.top_mask(score, layers, groups), torch.cat(halves, dim=-1))
    assert halves[0].sum(-1).unique().tolist() == [3]


def test_infinite_scores_come_after_none_and_before_all_finite_ones():
    score = torch.tensor([[1.0, torch.inf, 5.0, torch.nan], [2.0, -torch.inf, 1.0, 0.0]])
    assert topk.top_k_mask(score, 2).tolist() == [[False, True, False, True], [True, False, True, False]]
    assert topk.top_k_indices(score, ((slice(0, 4), 2),)).tolist() == [[1, 3], [0, 2]]


def test_a_weight_that_is_not_a_number_is_selected():
    score = torch.tensor([1.0, float("nan"), 3.0, 2.0])
    assert topk.top_k_mask(score, 2).tolist() == [False, True, True, False]


@given(st.lists(st.integers(1, 6), min_size=2, max_size=12), st.data())
def test_unequal_groups_fill_the_budget_in_order_of_strength(sizes, data):
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    strength = data.draw(st.permutations(range(1, len(sizes) + 1)))
    kept = data.draw(st.integers(min(sizes), sum(sizes)))
    score = torch.tensor(strength, dtype=torch.float64)[groups]
    mask = topk.top_mask(score[None], ((slice(0, len(groups)), kept),), groups)[0]
    room, expected = kept, set()
    for group in sorted(range(len(sizes)), key=lambda g: -strength[g]):
        if sizes[group] <= room:
            expected.add(group)
            room -= sizes[group]
    if budgets.groups_have_equal_size(groups):
        room = kept % sizes[0]
    assert mask.tolist() == [int(g) in expected for g in groups]
    assert kept - int(mask.sum()) == room


def test_every_layer_keeps_its_budget():
    layers = [(slice(0, 150), (6, 1, 5, 5)), (slice(150, 30_870), (120, 256)), (slice(30_870, 31_716), (846,))]
    parts = budgets.allocate_budget(layers, 1600, BudgetRule.UNIFORM)
    mask = topk.top_mask(torch.rand(31_716, generator=torch.Generator().manual_seed(1)), parts)
    assert [int(mask[part].sum()) for part, _ in parts] == [count for _, count in parts]
