"""Budgets: exact counts and their allocation to layers."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_erk_makes_small_layers_denser_than_large_ones():
    parts = budgets.allocate_budget(LAYERS, 1600, BudgetRule.ERK)
    densities = [count / (part.stop - part.start) for part, count in parts]
    assert min(densities[0], densities[3]) > 5 * densities[2]
