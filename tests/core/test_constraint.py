from math import inf, log

import pytest
import torch

from fedsieve.core import constraint
from fedsieve.core.constraint import ConstraintScale
from fedsieve.core.gates import HardConcrete, active_probability, sample

SHAPE = HardConcrete()


def log_alpha(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(("form", "total"), [(ConstraintScale.SUM, torch.sum), (ConstraintScale.MEAN, torch.mean)])
def test_the_slope_is_the_derivative_of_the_multiplied_constraint(form, total):
    phi = log_alpha(30).requires_grad_()
    (grad,) = torch.autograd.grad(1.7 * (total(active_probability(SHAPE, phi)) - 0.05), phi)
    found = constraint.penalty_gradient(SHAPE, phi.detach(), torch.tensor(1.7, dtype=torch.float64), form, 30)
    torch.testing.assert_close(found, grad)


def step_by_hand(phi, gradient, multiplier, rate, limit):
    p = active_probability(SHAPE, phi)
    return (phi - rate * (gradient + multiplier[:, None] * p * (1 - p) / 30)).clamp(-limit, limit)


def test_a_step_of_log_alpha_descends_the_loss_and_the_penalty_within_the_limits():
    phi, gradient, multiplier = 9 * log_alpha(2, 30), log_alpha(2, 30).flip(1), torch.tensor([0.0, 40.0], dtype=torch.float64)
    found = constraint.step_log_alpha(SHAPE, phi, gradient, multiplier, ConstraintScale.MEAN, 30, 0.7)
    torch.testing.assert_close(found, step_by_hand(phi, gradient, multiplier, 0.7, 12.0))
    assert found.amax() == 12 and found.amin() == -12


def test_a_gated_step_is_one_of_theta_and_one_of_phi():
    phi, gradient, weights = log_alpha(2, 30), log_alpha(2, 30).flip(1), log_alpha(2, 30).flip(0)
    gate = sample(SHAPE, phi, torch.rand(2, 30, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    sizes, multiplier = torch.tensor([[0.1], [0.3]], dtype=torch.float64), torch.tensor([0.0, 40.0], dtype=torch.float64)
    found = constraint.gated_sgd_step(SHAPE, weights, phi, gradient, gate, sizes, multiplier, ConstraintScale.MEAN, 30, 0.7, 1.5)
    torch.testing.assert_close(found[0], weights - sizes * gradient * gate.value)
    torch.testing.assert_close(found[1], step_by_hand(phi, gradient * weights * gate.derivative, multiplier, 0.7, 1.5))


def test_skipped_steps_apply_the_penalty_as_often():
    phi, multiplier = 9 * log_alpha(2, 30), torch.tensor([2.0, 40.0], dtype=torch.float64)
    skipped = torch.arange(60, dtype=torch.float64).reshape(2, 30) % 4
    found = constraint.apply_penalty(SHAPE, phi, skipped, multiplier, ConstraintScale.MEAN, 30, 0.7)
    once = step_by_hand(phi, torch.zeros_like(phi), multiplier, 0.7, inf) - phi
    torch.testing.assert_close(found, (phi + skipped * once).clamp(-12, 12))


def test_a_dual_step_on_the_gap_is_an_ascent_on_it():
    phi, multiplier = log_alpha(30), torch.tensor(2.0, dtype=torch.float64)
    for density, expected in ((0.1, 2 + 0.5 * (float(active_probability(SHAPE, phi).mean()) - 0.1)), (0.99, 0.0)):
        assert float(constraint.ascend(SHAPE, phi, multiplier, density, 0.5)) == pytest.approx(expected)


def test_the_multiplier_restarts_when_the_constraint_holds():
    phi = log_alpha(30)
    density = float(active_probability(SHAPE, phi).mean())
    assert float(constraint.ascend(SHAPE, phi, torch.tensor(1.0), density - 0.2, 0.5)) == pytest.approx(1.1)
    assert float(constraint.ascend(SHAPE, phi, torch.tensor(1.0), density + 0.01, 0.5)) == 0.0
    assert float(constraint.ascend(SHAPE, phi, torch.tensor(1.0), density, 0.5)) == 0.0


def charged(phi, density, rate, steps):
    """The distance of the density to its target, in logarithms, after each natural step of the dual."""
    gaps = []
    for _ in range(steps):
        phi = phi - constraint.mirror_step(SHAPE, phi, density, rate)
        gaps.append(float(active_probability(SHAPE, phi).mean().log()) - log(density))
    return phi, gaps


@pytest.mark.parametrize("density", [0.5, 0.05, 0.005])
@pytest.mark.parametrize("start", [4.0, -4.0])
def test_natural_steps_converge_to_the_exact_shift_without_overshooting(density, start):
    phi = 2 * log_alpha(2000) + start
    found, gaps = charged(phi, density, 1.0, 200)
    assert abs(gaps[-1]) < 1e-9
    torch.testing.assert_close(found, phi + constraint.bisect_shift(SHAPE, phi, density), atol=1e-3, rtol=0)  # that one's gates are clamped
    side = 1 if float(active_probability(SHAPE, phi).mean()) > density else -1
    assert all(side * gap > -1e-9 for gap in gaps)


def test_a_natural_rate_below_two_converges_and_one_above_does_not():
    few = torch.full((10,), -3.0, dtype=torch.float64)  # where hardly any gate is open, density follows the multiplier one to one
    assert abs(charged(few, 0.001, 1.9, 200)[1][-1]) < 1e-6
    assert abs(charged(few, 0.001, 2.5, 200)[1][-1]) > 0.1


def test_a_natural_step_is_finite_where_every_gate_is_far_beyond_its_limits():
    shut = torch.full((1000,), -400.0)
    assert float(constraint.mirror_step(SHAPE, shut, 0.05, 1.0)) == pytest.approx(-400.0 + SHAPE.offset - log(0.05))


def test_cooling_multiplies_the_logit_of_the_open_probability():
    phi = log_alpha(30)
    found = active_probability(SHAPE, constraint.cool(SHAPE, phi, 3.0))
    torch.testing.assert_close(torch.logit(found), 3.0 * torch.logit(active_probability(SHAPE, phi)))
    assert constraint.cool(SHAPE, phi, 1.0) is phi


def test_cooling_separates_equal_gates_under_a_tight_constraint():
    phi = 0.1 * log_alpha(1000)
    for _ in range(24):
        phi = constraint.cool(SHAPE, phi, 2.0)
        phi = constraint.shift_log_alpha(phi, constraint.bisect_shift(SHAPE, phi, 0.01))
    stay = active_probability(SHAPE, phi) > 0.5
    assert int(stay.sum()) == 10
    assert torch.equal(stay.nonzero()[:, 0], log_alpha(1000).topk(10).indices.sort().values)


@pytest.mark.parametrize("density", [0.5, 0.05, 0.005])
def test_the_exact_shift_makes_the_constraint_tight_for_every_client(density):
    phi = 2 * log_alpha(3, 2000) + 2
    moved = constraint.shift_log_alpha(phi, constraint.bisect_shift(SHAPE, phi, density))
    torch.testing.assert_close(active_probability(SHAPE, moved).mean(-1), torch.full((3,), density, dtype=torch.float64), atol=1e-9, rtol=0)


def test_the_exact_shift_reaches_gates_that_were_cooled_far_beyond_their_limits():
    phi = constraint.cool(SHAPE, log_alpha(1000) - 6, 1000.0)
    moved = constraint.shift_log_alpha(phi, constraint.bisect_shift(SHAPE, phi, 0.05, num_halvings=80))
    assert int((active_probability(SHAPE, moved) > 0.5).sum()) == 50


def test_the_exact_shift_opens_too_few_gates_and_keeps_a_tight_constraint():
    phi = torch.full((10,), -6.0, dtype=torch.float64)
    moved = constraint.shift_log_alpha(phi, constraint.bisect_shift(SHAPE, phi, 0.5))
    assert float(active_probability(SHAPE, moved).mean()) == pytest.approx(0.5)
    assert float(constraint.bisect_shift(SHAPE, moved, 0.5)) == pytest.approx(0.0, abs=1e-9)


def test_two_weighted_gates_are_shifted_like_all_gates_of_their_value():
    phi = torch.tensor([3.0] * 20 + [-1.0] * 80, dtype=torch.float64)
    two, shares = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([0.2, 0.8], dtype=torch.float64)
    assert float(constraint.bisect_shift(SHAPE, two, 0.1, shares)) == pytest.approx(float(constraint.bisect_shift(SHAPE, phi, 0.1)))


def test_the_clamp_on_log_alpha_leaves_room_for_half_a_percent():
    floor = active_probability(SHAPE, torch.tensor([-12.0], dtype=torch.float64))
    assert constraint.min_density(SHAPE) == pytest.approx(float(floor))
    assert constraint.min_density(SHAPE) < 0.005 / 100
