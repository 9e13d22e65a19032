"""Budgets: exact counts and their allocation to layers."""

from decimal import Decimal
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import bisect

from fedsieve.core import budgets
from fedsieve.core.budgets import BudgetRule

LAYERS = [(slice(0, 150), (6, 1, 5, 5)), (slice(150, 156), (6,)), (slice(156, 30_876), (120, 256)), (slice(30_876, 31_716), (10, 84))]


def test_counts_are_exact_for_decimal_fractions():
    wrong_in_floats = 0
    for n in range(1, 2000, 7):
        for percent in range(1, 100):
            exact = int(Decimal(percent) / 100 * n)
            assert budgets.floor_of_decimal(percent / 100, n) == exact
            wrong_in_floats += int(percent / 100 * n) != exact
    assert wrong_in_floats > 0
    assert budgets.floor_of_decimal(0.29, 100) == 29


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_outside_its_range_is_an_error(density):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        budgets.num_kept(density, 100)


def test_the_error_for_a_density_that_keeps_nothing_names_the_minimum():
    with pytest.raises(ValueError, match=r"keeps none; use at least 0\.001"):
        budgets.num_kept(0.0005, 1000)


@given(st.integers(1, 31_716), st.sampled_from(BudgetRule))
def test_budgets_add_up_and_fit_their_layers(kept, rule):
    parts = budgets.allocate_budget(LAYERS, kept, rule)
    assert budgets.budget_total(parts) == kept
    assert all(0 <= count <= part.stop - part.start for part, count in parts)
    if kept >= len(LAYERS):
        assert all(count >= 1 for _, count in parts)


@given(st.integers(6_000, 31_716))
def test_uniform_budgets_differ_from_equal_densities_by_less_than_one_weight(kept):
    for part, count in budgets.allocate_budget(LAYERS, kept, BudgetRule.UNIFORM):
        assert abs(count - kept * (part.stop - part.start) / 31_716) < 1


@given(st.integers(4, 31_716))
def test_erk_densities_are_proportional_to_sum_over_product_of_the_shape_unless_full(kept):
    """Evci et al. 2020: a layer of shape s has density c sum(s) / prod(s), at most 1."""
    parts = budgets.allocate_budget(LAYERS, kept, BudgetRule.ERK)
    raw = [sum(shape) / prod(shape) for _, shape in LAYERS]
    sizes = [part.stop - part.start for part, _ in parts]
    target = float(bisect(lambda c: sum(n * min(c * r, 1) for n, r in zip(sizes, raw, strict=True)) - kept, 0, 1e6, xtol=1e-9))
    for (_, count), n, r in zip(parts, sizes, raw, strict=True):
        assert abs(count - n * min(target * r, 1)) < 2 or count == 1


def test_a_global_budget_is_one_part():
    assert budgets.allocate_budget(LAYERS, 77, BudgetRule.GLOBAL) == ((slice(0, 31_716), 77),)


@given(st.lists(st.floats(0, 30), min_size=1, max_size=8), st.data())
def test_rounding_to_a_sum_moves_the_largest_remainders_up(targets, data):
    total = round(sum(targets))
    counts = budgets._round_to_sum(targets, [100] * len(targets), total)
    assert sum(counts) == total
    assert min(counts) >= (1 if total >= len(targets) else 0)


def test_the_largest_remainder_is_rounded_up_first():
    assert budgets._round_to_sum([1.2, 1.7, 2.1], [9, 9, 9], 5) == [1, 2, 2]
    assert budgets._round_to_sum([1.2, 1.7, 2.1], [9, 1, 9], 5) == [2, 1, 2]
    assert budgets._round_to_sum([0.1, 0.1, 9.8], [9, 9, 20], 10) == [1, 1, 8]
    assert budgets._round_to_sum([0.3, 0.6, 0.1], [9, 9, 9], 1) == [0, 1, 0]
    assert budgets._round_to_sum([0.1, 0.1, 0.1, 4.9, 4.8], [9] * 5, 10) == [1, 1, 1, 4, 3]


def test_a_budget_fills_whole_groups_of_equal_size():
    equal, unequal = torch.arange(12) // 3 + 5, torch.tensor([0, 0, 0, 1, 1])
    assert [budgets.round_to_groups(kept, equal) for kept in (3, 5, 6, 12)] == [3, 3, 6, 12]
    assert budgets.round_to_groups(4, unequal) == 4 and budgets.round_to_groups(2, unequal) == 2
    assert budgets.groups_have_equal_size(equal) and not budgets.groups_have_equal_size(unequal)
    with pytest.raises(ValueError, match="a budget of 1 weights is less than one group of 2"):
        budgets.round_to_groups(1, unequal)


def test_groups_share_the_sum_or_the_value_of_their_first_weight():
    groups = torch.tensor([1, 0, 1, 2, 0])
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0], [3.0, 5.0, 7.0, 9.0, 11.0]])
    assert budgets.sum_within_groups(values, groups).tolist() == [[5, 18, 5, 8, 18], [10, 16, 10, 9, 16]]
    assert budgets.broadcast_within_groups(values, groups).tolist() == [[1, 2, 1, 8, 2], [3, 5, 3, 9, 5]]
    for share in (budgets.sum_within_groups, budgets.broadcast_within_groups):
        assert torch.equal(share(values[0], groups), share(values, groups)[0])
    assert budgets.sum_within_groups(values, None) is values is budgets.broadcast_within_groups(values, None)


@pytest.mark.parametrize(
    ("num_gated", "num_ungated", "expected"),
    [(30, 0, ((slice(0, 30), 10),)), (6, 0, ((slice(0, 6), 6),)), (30, 4, ((slice(0, 30), 6), (slice(30, 34), 4)))],
)
def test_a_restricted_budget_keeps_all_ungated_weights_and_no_more_than_there_are(num_gated, num_ungated, expected):
    assert budgets.restrict_budget(((slice(0, 100), 7), (slice(100, 200), 3)), num_gated, num_ungated) == expected


def test_a_whole_model_may_be_kept_and_a_single_weight():
    assert budgets.num_kept(1.0, 100) == 100 and budgets.num_kept(0.01, 100) == 1


def test_erk_makes_small_layers_denser_than_large_ones():
    parts = budgets.allocate_budget(LAYERS, 1600, BudgetRule.ERK)
    densities = [count / (part.stop - part.start) for part, count in parts]
    assert min(densities[0], densities[3]) > 5 * densities[2]
