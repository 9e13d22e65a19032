"""The exact top k, and its fast path."""

import numpy as np
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
