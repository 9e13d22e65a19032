"""L-BFGS that knows gradients only: against exact solutions."""

import pytest
import torch

from fedsieve.core.lbfgs import minimize


def quadratic(scale, size=6, seed=0):
    """A positive definite matrix, a right-hand side, and the exact minimizer."""
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=rng, dtype=torch.float64)
    matrix, right = scale * (root @ root.T + torch.eye(size, dtype=torch.float64)), torch.randn(size, generator=rng, dtype=torch.float64)
    return matrix, right, torch.linalg.solve(matrix, right)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_quadratic_is_minimized_whatever_its_scale(scale):
    matrix, right, exact = quadratic(scale)
    start = torch.zeros_like(right)
    found = minimize(lambda x: matrix @ x - right, start, -right, max_gradients=60, max_decrease=1e-13 / scale)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6 / scale)


def test_gradients_are_counted_and_none_ends_the_search():
    matrix, right, _ = quadratic(1.0)
    calls = []

    def gradient(x):
        calls.append(x)
        return None if len(calls) == 3 else matrix @ x - right

    minimize(gradient, torch.zeros_like(right), -right, max_gradients=60, max_decrease=0.0)
    assert len(calls) == 3
    calls[:] = [0] * 3
    minimize(gradient, torch.zeros_like(right), -right, max_gradients=8, max_decrease=0.0)
    assert len(calls) == 3 + 7


def test_at_the_minimum_nothing_is_asked():
    zero = torch.zeros(3)
    assert minimize(lambda _: pytest.fail("no gradient is needed"), zero, zero, max_gradients=9, max_decrease=0.0) is zero
