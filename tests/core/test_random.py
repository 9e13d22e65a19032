import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.core.random import client_sampler, derive_key, generator, server_sampler, uniform_to_normal, uniforms


def test_a_stack_of_clients_draws_what_each_client_draws_alone():
    stack = client_sampler(3, 1, 0, 2, [5, 9, 70], torch.float64)("gates", 40)
    for row, client in zip(stack, [5, 9, 70], strict=True):
        assert torch.equal(row, client_sampler(3, 1, 0, 2, [client], torch.float64)("gates", 40)[0])


def test_the_noise_of_some_coordinates_is_the_same_as_among_all():
    base = derive_key(0, "gates")
    at = np.array([3, 17, 900])
    assert np.array_equal(uniforms(base, [4], at), uniforms(base, [4], np.arange(1000))[:, at])


def test_every_part_of_the_name_changes_the_noise():
    base = client_sampler(0, 1, 2, 3, [4], torch.float64)("gates", 16)
    others = [
        client_sampler(1, 1, 2, 3, [4], torch.float64)("gates", 16),
        client_sampler(0, 2, 2, 3, [4], torch.float64)("gates", 16),
        client_sampler(0, 1, 3, 3, [4], torch.float64)("gates", 16),
        client_sampler(0, 1, 2, 4, [4], torch.float64)("gates", 16),
        client_sampler(0, 1, 2, 3, [5], torch.float64)("gates", 16),
        client_sampler(0, 1, 2, 3, [4], torch.float64)("round theta", 16),
        server_sampler(0, 1, 2, torch.float64)("gates", 16)[None],
    ]
    for other in others:
        assert not (other == base).any()


def test_single_and_double_precision_see_the_same_noise():
    single = client_sampler(0, 0, 0, 0, [1], torch.float32)("gates", 100)
    assert torch.equal(single.double(), client_sampler(0, 0, 0, 0, [1], torch.float64)("gates", 100))


def test_uniforms_are_uniform_and_never_at_an_end():
    u = uniforms(derive_key(0, "x"), range(50), np.arange(20_000))
    assert 0 < u.min() and u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    expected = u.size / 100
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 99 + 5 * (2 * 99) ** 0.5


def test_neighbouring_coordinates_clients_and_steps_are_uncorrelated():
    u = uniforms(derive_key(0, "x"), range(500), np.arange(500)).astype(np.float64) - 0.5
    later = uniforms(derive_key(0, "y"), range(500), np.arange(500)).astype(np.float64) - 0.5
    limit = 4 * (1 / 12) / np.sqrt(u.size)
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u, later)):
        assert abs((a * b).mean()) < limit


@given(st.integers(0, 2**40), st.lists(st.one_of(st.integers(-5, 10**6), st.text(max_size=5)), max_size=4))
def test_keys_repeat_and_fit_64_bits(seed, path):
    assert derive_key(seed, *path) == derive_key(seed, *path) < 2**64


def test_a_named_stream_repeats():
    assert np.array_equal(generator(1, "cohort", 3).random(5), generator(1, "cohort", 3).random(5))
    assert not np.array_equal(generator(1, "cohort", 3).random(5), generator(1, "cohort", 4).random(5))


def test_normals_have_mean_zero_and_variance_one():
    z = uniform_to_normal(server_sampler(0, 0, 0, torch.float64)("start", 100_000))
    assert abs(float(z.mean())) < 4 / 100_000**0.5
    assert abs(float(z.var()) - 1) < 4 * (2 / 100_000) ** 0.5
