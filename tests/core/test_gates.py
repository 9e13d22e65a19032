import pytest
import torch
from torch.distributions import RelaxedBernoulli

from fedsieve.core import gates
from fedsieve.core.gates import GateAtTest, HardConcrete

SHAPE = HardConcrete()
LOG_ALPHA = torch.linspace(-6, 6, 25, dtype=torch.float64)


def uniform(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("log_alpha", [-4.0, -1.0, 0.0, 2.5])
def test_active_probability_is_the_frequency_of_open_gates(log_alpha):
    draws = 200_000
    z = gates.sample(SHAPE, torch.full((draws,), log_alpha, dtype=torch.float64), uniform(draws)).value
    p = float(gates.active_probability(SHAPE, torch.tensor([log_alpha], dtype=torch.float64)))
    assert abs(float((z > 0).double().mean()) - p) < 4 * (p * (1 - p) / draws) ** 0.5


def test_sampled_gates_are_a_stretched_and_clipped_relaxed_bernoulli():
    draws = 100_000
    oracle = RelaxedBernoulli(torch.tensor(0.66), logits=torch.tensor(0.4))
    torch.manual_seed(3)
    theirs = torch.clamp(oracle.sample((draws,)) * 1.2 - 0.1, 0, 1).double()
    ours = gates.sample(SHAPE, torch.full((draws,), 0.4, dtype=torch.float64), uniform(draws)).value
    for level in (0.0, 0.25, 0.5, 0.75, 0.999):
        assert abs(float((theirs <= level).double().mean() - (ours <= level).double().mean())) < 0.012


def test_the_slope_is_the_derivative_that_autograd_finds():
    log_alpha = LOG_ALPHA.clone().requires_grad_()
    noise = uniform(25)
    s = torch.sigmoid((torch.logit(noise) + log_alpha) / 0.66)
    (grad,) = torch.autograd.grad(torch.clamp(s * 1.2 - 0.1, 0, 1).sum(), log_alpha)
    found = gates.sample(SHAPE, LOG_ALPHA, noise)
    torch.testing.assert_close(found.derivative, grad)
    assert (found.derivative[(found.value == 0) | (found.value == 1)] == 0).all()


def test_noise_at_its_bounds_is_moved_inside_by_the_margin():
    log_alpha, noise = torch.tensor([20.0, -20.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    inside = noise.clamp(1e-6, 1 - 1e-6)
    assert torch.equal(gates.sample(SHAPE, log_alpha, noise).derivative, gates.sample(SHAPE, log_alpha, inside, 0.0).derivative)
    near = gates.sample(SHAPE, torch.logit(1 - inside), noise)  # the noise and log_alpha cancel
    torch.testing.assert_close(near.value, torch.full_like(noise, 0.5))


def test_the_chain_rule_gives_the_gradients_of_autograd():
    weights, gradient, noise = uniform(25, seed=2) - 0.5, uniform(25, seed=3) - 0.5, uniform(25)
    inputs = weights.clone().requires_grad_(), LOG_ALPHA.clone().requires_grad_()
    z = torch.clamp(torch.sigmoid((torch.logit(noise) + inputs[1]) / 0.66) * 1.2 - 0.1, 0, 1)
    expected = torch.autograd.grad((inputs[0] * z * gradient).sum(), inputs)
    torch.testing.assert_close(gates.chain_rule(gradient, weights, gates.sample(SHAPE, LOG_ALPHA, noise)), expected)


def test_median_gates_are_samples_at_half_noise_with_their_derivative():
    half = gates.sample(SHAPE, LOG_ALPHA, torch.full_like(LOG_ALPHA, 0.5))
    torch.testing.assert_close(gates.median_gates(SHAPE, LOG_ALPHA), half)


@pytest.mark.parametrize("kind", GateAtTest)
def test_the_gated_magnitude_is_that_of_weight_times_test_gate(kind):
    weights = uniform(25, seed=2) - 0.5
    z = gates.compute_test_gates(SHAPE, LOG_ALPHA, kind)
    assert (z == 0).any()
    torch.testing.assert_close(gates.gated_magnitude(SHAPE, weights, LOG_ALPHA, kind, 0.01), weights.abs() * z.clamp_min(0.01))


def test_the_median_gate_is_closed_iff_the_gate_is_open_less_than_half_the_time():
    closed = gates.compute_test_gates(SHAPE, LOG_ALPHA) == 0
    assert torch.equal(closed, gates.active_probability(SHAPE, LOG_ALPHA) < 0.5)
    assert closed.any() and not closed.all()


def test_the_median_gate_is_the_sample_at_half_noise():
    half = gates.sample(SHAPE, LOG_ALPHA, torch.full_like(LOG_ALPHA, 0.5)).value
    torch.testing.assert_close(gates.compute_test_gates(SHAPE, LOG_ALPHA), half)
    plain = torch.clamp(torch.sigmoid(LOG_ALPHA) * 1.2 - 0.1, 0, 1)
    torch.testing.assert_close(gates.compute_test_gates(SHAPE, LOG_ALPHA, GateAtTest.NO_TEMPERATURE), plain)


def test_the_exact_inverse_inverts_median_gates_between_zero_and_one():
    inside = torch.linspace(-1.5, 1.5, 11, dtype=torch.float64)
    torch.testing.assert_close(gates.exact_inverse(SHAPE, gates.compute_test_gates(SHAPE, inside)), inside)
    assert gates.exact_inverse(SHAPE, torch.tensor([0.0, 1.0])).abs().max() < 1.59


def test_the_papers_inverse_stays_finite_at_closed_and_open_gates():
    found = gates.paper_inverse(SHAPE, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    assert found.isfinite().all()
    assert found[1] == 0
    torch.testing.assert_close(found[2], torch.tensor(0.66 * 13.815509557963774, dtype=torch.float64), rtol=1e-6, atol=0)


def test_the_papers_inverse_is_the_scaled_logit_of_a_gate():
    z = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    torch.testing.assert_close(gates.paper_inverse(SHAPE, z), 0.66 * torch.log(z / (1 - z)))


def test_larger_noise_starts_a_gate_further_open():
    assert (gates.initial_log_alpha(torch.linspace(0.01, 0.99, 9), 0.5).diff() > 0).all()


def test_initial_gates_have_the_papers_mean_and_variance():
    start = gates.initial_log_alpha(uniform(100_000), 0.95)
    assert abs(float(start.mean()) - 2.9444) < 0.002
    assert abs(float(start.var()) - 0.01) < 0.0003


@pytest.mark.parametrize(("density", "open_at_first"), [(0.05, 0.204), (0.5, 0.83), (0.95, 0.989)])
def test_rho_init_is_not_the_open_probability_it_starts_with(density, open_at_first):
    logit = torch.logit(torch.tensor([density], dtype=torch.float64))
    assert abs(float(gates.active_probability(SHAPE, logit)) - open_at_first) < 0.002


def test_the_entropy_slope_is_the_derivative_of_the_entropy():
    log_alpha = LOG_ALPHA.clone().requires_grad_()
    p = torch.sigmoid(log_alpha + SHAPE.offset)
    (grad,) = torch.autograd.grad(-(p * p.log() + (1 - p) * (1 - p).log()).sum(), log_alpha)
    torch.testing.assert_close(gates.entropy_derivative(SHAPE, LOG_ALPHA), grad)
