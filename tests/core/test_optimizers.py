from math import inf

import pytest
import torch

from fedsieve.core import optimizers
from fedsieve.core.optimizers import Optimizer, StepRule


@pytest.mark.parametrize(
    ("kind", "oracle"),
    [
        (Optimizer.SGD, lambda p: torch.optim.SGD(p, lr=0.1)),
        (Optimizer.MOMENTUM, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Optimizer.ADAM, lambda p: torch.optim.Adam(p, lr=0.1)),
    ],
)
def test_steps_are_those_of_torch_optim(kind, oracle):
    torch.manual_seed(0)
    gradients = torch.randn(12, 7, dtype=torch.float64)
    theirs = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    optimizer = oracle([theirs])
    ours, moments = torch.zeros(7, dtype=torch.float64), optimizers.initial_moments(torch.zeros(7, dtype=torch.float64))
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
        ours, moments = optimizers.step(kind, moments, ours, gradient, 0.1, momentum=0.9)
    torch.testing.assert_close(ours, theirs.detach())


def test_clipping_shortens_only_what_is_too_long():
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64)
    torch.testing.assert_close(optimizers.clip_norm(g, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4]], dtype=torch.float64))
    assert optimizers.clip_norm(g, inf) is g


def test_a_polyak_step_with_factor_one_reaches_the_zero_of_a_linear_loss():
    """For f(x) = |a x| with minimum 0, x - f/|g|^2 g is the minimiser."""
    a, x = torch.tensor([[2.0, -1.0]], dtype=torch.float64), torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    loss = (a * x).sum(-1)
    size = optimizers.step_size(StepRule.POLYAK, 1.0, loss, a, None)
    assert float((a * (x - size * a)).sum().abs()) < 1e-12


def test_a_polyak_step_does_not_depend_on_the_scale_of_the_loss():
    loss, g = torch.tensor([2.0], dtype=torch.float64), torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    one = optimizers.step_size(StepRule.POLYAK, 1.0, loss, g, None) * g
    scaled = optimizers.step_size(StepRule.POLYAK, 1.0, 50 * loss, 50 * g, None) * (50 * g)
    torch.testing.assert_close(one, scaled)


def test_a_polyak_step_is_at_most_one_over_smoothness():
    loss, g, smooth = torch.ones(3), torch.full((3, 4), 0.1), torch.tensor([2.0, 1e-3, 0.0])
    assert optimizers.step_size(StepRule.POLYAK, 1.0, loss, g, smooth)[:, 0].tolist() == pytest.approx([0.5, 25.0, 25.0])
    assert optimizers.step_size(StepRule.POLYAK, 1.0, torch.full((3,), -0.0), g, -0.0 * smooth)[:, 0].tolist() == [0.0, 0.0, 0.0]


def test_a_capped_step_is_the_smaller_of_rate_and_one_over_smoothness():
    loss, g, smooth = torch.ones(2), torch.ones(2, 3), torch.tensor([2.0, 100.0])
    assert optimizers.step_size(StepRule.CAPPED, 0.1, loss, g, smooth)[:, 0].tolist() == pytest.approx([0.1, 0.01])
    assert optimizers.step_size(StepRule.CONSTANT, 0.1, loss, g, None)[:, 0].tolist() == pytest.approx([0.1, 0.1])
