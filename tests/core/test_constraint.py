from math import log

import pytest
import torch

from fedsieve.core import constraint
from fedsieve.core.constraint import Form
from fedsieve.core.gates import HardConcrete, active_probability

SHAPE = HardConcrete()


def log_alpha(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(("form", "total"), [(Form.COUNT, torch.sum), (Form.PAPER, torch.mean)])
def test_the_slope_is_the_derivative_of_the_multiplied_constraint(form, total):
    phi = log_alpha(30).requires_grad_()
    (grad,) = torch.autograd.grad(1.7 * (total(active_probability(SHAPE, phi)) - 0.05), phi)
    found = constraint.slope(SHAPE, phi.detach(), torch.tensor(1.7, dtype=torch.float64), form, 30)
    torch.testing.assert_close(found, grad)


def test_the_gap_is_the_mean_open_probability_less_the_target():
    phi = log_alpha(4, 30)
    torch.testing.assert_close(constraint.gap(SHAPE, phi, 0.05), active_probability(SHAPE, phi).mean(-1) - 0.05)


def test_the_multiplier_restarts_when_the_constraint_holds():
    violated, held = torch.tensor(0.2), torch.tensor(-0.01)
    assert float(constraint.ascend(torch.tensor(1.0), violated, 0.5)) == pytest.approx(1.1)
    assert float(constraint.ascend(torch.tensor(1.0), held, 0.5)) == 0.0


def test_the_controller_adds_the_logarithms_of_the_excess_and_of_the_change():
    open_gates, fewer = (torch.full((10,), level, dtype=torch.float64) for level in (1.0, -1.0))
    d, less = (float(active_probability(SHAPE, part).mean()) for part in (open_gates, fewer))

    def followed(before, after, density):
        return float(constraint.follow(SHAPE, torch.tensor(0.3, dtype=torch.float64), before, after, density, 0.1))

    assert followed(open_gates, open_gates, d) == pytest.approx(0.3)
    assert followed(open_gates, open_gates, d / 2) == pytest.approx(0.3 + 0.1 * log(2))
    assert followed(open_gates, fewer, less) == pytest.approx(0.3 + log(less / d))
    assert followed(fewer, fewer, 20 * less) < 0.01


@pytest.mark.parametrize("density", [0.5, 0.05, 0.005])
def test_the_exact_shift_makes_the_constraint_tight_for_every_client(density):
    phi = 2 * log_alpha(3, 2000) + 2
    moved = constraint.shifted(phi, constraint.exact_shift(SHAPE, phi, density))
    torch.testing.assert_close(active_probability(SHAPE, moved).mean(-1), torch.full((3,), density, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_exact_shift_opens_gates_that_are_too_few_and_leaves_a_tight_constraint_alone():
    phi = torch.full((10,), -6.0, dtype=torch.float64)
    moved = constraint.shifted(phi, constraint.exact_shift(SHAPE, phi, 0.5))
    assert float(active_probability(SHAPE, moved).mean()) == pytest.approx(0.5)
    assert float(constraint.exact_shift(SHAPE, moved, 0.5)) == pytest.approx(0.0, abs=1e-9)


def test_two_values_with_shares_are_shifted_like_all_the_gates_they_stand_for():
    phi = torch.tensor([3.0] * 20 + [-1.0] * 80, dtype=torch.float64)
    two, shares = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([0.2, 0.8], dtype=torch.float64)
    assert float(constraint.exact_shift(SHAPE, two, 0.1, shares)) == pytest.approx(float(constraint.exact_shift(SHAPE, phi, 0.1)))


def test_the_clamp_on_log_alpha_leaves_room_for_half_a_percent():
    floor = active_probability(SHAPE, torch.tensor([-12.0], dtype=torch.float64))
    assert constraint.least_density(SHAPE) == pytest.approx(float(floor))
    assert constraint.least_density(SHAPE) < 0.005 / 100
