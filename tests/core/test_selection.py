from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.core import budgets, schedules, topk
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling


def test_counts_are_exact_where_floats_are_not():
    wrong_in_floats = 0
    for n in range(1, 2000, 7):
        for percent in range(1, 100):
            exact = int(Decimal(percent) / 100 * n)
            assert budgets.floor_of_decimal(percent / 100, n) == exact
            wrong_in_floats += int(percent / 100 * n) != exact
    assert wrong_in_floats > 0
    assert budgets.floor_of_decimal(0.29, 100) == 29


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        budgets.num_kept(density, 100)


def test_a_density_that_keeps_nothing_is_refused_with_the_least_that_works():
    with pytest.raises(ValueError, match=r"keeps none; use at least 0\.001"):
        budgets.num_kept(0.0005, 1000)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_the_top_is_the_largest_with_ties_to_the_lowest_index(values, data):
    kept = data.draw(st.integers(0, len(values)))
    mask = topk.top_k_mask(torch.tensor(values, dtype=torch.float64), kept)
    brute = sorted(range(len(values)), key=lambda i: (-values[i], i))[:kept]
    assert mask.nonzero()[:, 0].tolist() == sorted(brute)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.data())
def test_the_places_of_the_top_are_its_mask_in_the_order_asked_for(values, data):
    kept, size = data.draw(st.integers(1, len(values))), len(values)
    score, parts = torch.tensor(values, dtype=torch.float64)[None], ((slice(0, size), kept),)
    assert torch.equal(topk.top_k_indices(score, parts), topk.mask_to_indices(topk.top_mask(score, parts)))
    stands = np.array(data.draw(st.permutations(range(size))))
    brute = sorted(sorted(range(size), key=lambda i: (-values[i], stands[i]))[:kept], key=lambda i: stands[i])
    assert topk.top_k_indices(score, parts, global_index=lambda places: stands[places])[0].tolist() == brute


def test_few_of_many_are_found_among_those_a_sample_suggests():
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


def test_a_weight_that_is_not_a_number_is_chosen_so_that_validation_sees_it():
    score = torch.tensor([1.0, float("nan"), 3.0, 2.0])
    assert topk.top_k_mask(score, 2).tolist() == [False, True, True, False]


@given(st.lists(st.integers(1, 6), min_size=2, max_size=12), st.data())
def test_groups_of_unequal_size_fill_the_budget_in_the_order_of_their_strength(sizes, data):
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


LAYERS = [(slice(0, 150), (6, 1, 5, 5)), (slice(150, 156), (6,)), (slice(156, 30_876), (120, 256)), (slice(30_876, 31_716), (10, 84))]


@given(st.integers(1, 31_716), st.sampled_from(BudgetRule))
def test_budgets_add_up_and_fit_their_layers(kept, rule):
    parts = budgets.allocate_budget(LAYERS, kept, rule)
    assert budgets.budget_total(parts) == kept
    assert all(0 <= count <= part.stop - part.start for part, count in parts)
    if kept >= len(LAYERS):
        assert all(count >= 1 for _, count in parts)


def test_erk_makes_small_layers_denser_than_large_ones():
    parts = budgets.allocate_budget(LAYERS, 1600, BudgetRule.ERK)
    densities = [count / (part.stop - part.start) for part, count in parts]
    assert min(densities[0], densities[3]) > 5 * densities[2]


def test_a_layered_top_keeps_its_count_in_every_layer():
    parts = budgets.allocate_budget(LAYERS, 1600, BudgetRule.UNIFORM)
    mask = topk.top_mask(torch.rand(31_716, generator=torch.Generator().manual_seed(1)), parts)
    assert [int(mask[part].sum()) for part, _ in parts] == [count for _, count in parts]


def test_the_three_scalings():
    log_alpha = torch.tensor([2.0, 2.0, -2.0, -2.0])
    chosen = torch.tensor([True, False, True, False])
    scaled = {kind: schedules.scale_log_alpha(log_alpha, chosen, 0.5, kind).tolist() for kind in LogAlphaScaling}
    assert scaled[LogAlphaScaling.ADDITIVE] == [2.5, 1.5, -1.5, -2.5]
    assert scaled[LogAlphaScaling.SIGN_AWARE] == [3.0, 1.0, -1.0, -3.0]
    assert scaled[LogAlphaScaling.LITERAL] == [3.0, 1.0, -3.0, -1.0]
    assert scaled[LogAlphaScaling.OFF] == log_alpha.tolist()


def test_the_literal_scaling_never_closes_an_open_gate():
    log_alpha = torch.tensor([3.0])
    for _ in range(200):
        log_alpha = schedules.scale_log_alpha(log_alpha, torch.tensor([False]), 0.5, LogAlphaScaling.LITERAL)
    assert float(log_alpha) >= 0


def test_scaling_stays_inside_the_clamp():
    far = torch.tensor([11.9, -11.9])
    assert schedules.scale_log_alpha(far, torch.tensor([True, False]), 0.5, LogAlphaScaling.ADDITIVE).tolist() == [12.0, -12.0]


def test_the_cubic_schedule_falls_from_start_to_target():
    values = [schedules.scheduled_density(0.05, 0.5, t / 10, DensitySchedule.CUBIC) for t in range(12)]
    assert values[0] == 0.5
    assert values[10:] == [0.05, 0.05]
    assert all(a >= b for a, b in zip(values, values[1:], strict=False))
    assert schedules.scheduled_density(0.05, 0.5, 0.0, DensitySchedule.CONSTANT) == 0.05
