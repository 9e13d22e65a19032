"""The synthetic tasks and the partitions have the distributions of the paper."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.core.random import generator
from fedsieve.data.federated_dataset import PartitionSpec
from fedsieve.data.partition import Partition, partition_by_clusters, partition_by_label, partition_by_quantity, partition_iid
from fedsieve.data.synthetic import Shift, Synthetic, client_shifts, correlated_examples, generate, make_targets, true_coefficients

SPEC = PartitionSpec(20, Partition.QUANTITY, 0.5)


def rng():
    return np.random.default_rng(3)


@given(st.integers(1, 40), st.integers(40, 300), st.floats(0.05, 1000), st.integers(0, 99))
@settings(deadline=None)
def test_every_partition_gives_each_example_to_exactly_one_client(num_clients, num_examples, alpha, seed):
    source = np.random.default_rng(seed)
    labels = source.integers(0, 5, num_examples)
    for parts in (
        partition_iid(num_examples, num_clients, source),
        partition_by_quantity(num_examples, num_clients, alpha, source),
        partition_by_label(labels, num_clients, alpha, source),
    ):
        assert len(parts) == num_clients
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples))


def test_client_sizes_are_equal_for_large_alpha_and_skewed_for_small():
    even = [len(p) for p in partition_by_quantity(10_000, 100, 1000.0, rng())]
    skewed = [len(p) for p in partition_by_quantity(10_000, 100, 0.5, rng())]
    assert np.std(even) < 15 < 50 < np.std(skewed)


def test_label_skew_concentrates_a_client_on_few_labels():
    labels = rng().integers(0, 10, 5000)

    def largest(alpha):
        parts = partition_by_label(labels, 20, alpha, rng())
        return np.mean([np.bincount(labels[p], minlength=10).max() / len(p) for p in parts if len(p)])

    assert largest(0.05) > 0.5 > 0.2 > largest(1000.0)


def test_each_client_has_at_most_two_clusters_and_no_example_twice():
    centres = 50 * np.eye(10, 30, dtype=np.float32)
    x = np.repeat(centres, 60, axis=0) + rng().standard_normal((600, 30), dtype=np.float32)
    parts = partition_by_clusters(x, 100, rng())
    indices = np.concatenate(parts)
    assert len(np.unique(indices)) == len(indices)
    assert all(len(np.unique(part // 60)) <= 2 for part in parts)
    assert np.mean([len(np.unique(part // 60)) == 2 for part in parts if len(part) > 1]) > 0.9


@pytest.mark.parametrize("correlation", [0.0, 0.2, 0.7])
def test_examples_have_the_toeplitz_covariance(correlation):
    x = correlated_examples(60_000, 6, correlation, rng())
    expected = correlation ** np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    assert np.abs(np.cov(x.T) - expected).max() < 0.03


def test_true_coefficients_are_signs_at_exactly_the_set_density():
    truth = true_coefficients(10, Synthetic(num_features=100, true_density=0.07), rng())
    assert truth.shape == (10, 100)
    assert set(np.unique(truth)) == {-1, 0, 1}
    assert (truth != 0).sum() == 70


def test_the_noise_has_the_set_signal_to_noise_ratio():
    data = Synthetic(num_examples=20_000, num_features=100, snr=3.0, shift=Shift.NONE)
    dataset = generate("lr", data, SPEC, 5)
    signal = dataset.x @ dataset.truth.T
    noise = dataset.y - signal[:, 0]
    assert (signal**2).sum() / (noise**2).sum() == pytest.approx(3.0, rel=0.05)


def test_labels_follow_from_noisy_logits():
    quiet = Synthetic(num_examples=300, num_features=40, snr=1e12)
    two = generate("lg", quiet, SPEC, 0)
    assert np.array_equal(two.y, (two.x @ two.truth[0] > 0).astype(np.float32))
    many = generate("mc", Synthetic(num_examples=300, num_features=40, num_classes=4, snr=1e12, true_density=0.2), SPEC, 0)
    assert np.array_equal(many.y, (many.x @ many.truth.T).argmax(1))


def test_a_logit_of_zero_is_negative_and_the_first_of_equal_logits_is_the_label():
    assert make_targets("lg", np.array([[0.0], [1e-9], [-1e-9]])).tolist() == [0, 1, 0]
    assert make_targets("mc", np.array([[1.0, 2.0, 2.0]])).tolist() == [1]


def test_the_default_is_the_first_setting_of_the_paper():
    """L210-211, L601: 10,000 examples of 1000 features, SNR 20, correlation .2, 5 % of the coefficients; F1 for ten classes."""
    data = Synthetic()
    assert (data.num_examples, data.num_features, data.num_classes) == (10_000, 1000, 10)
    assert (data.snr, data.correlation, data.true_density) == (20, 0.2, 0.05)


@pytest.mark.parametrize("shift", [Shift.SCALAR, Shift.VECTOR])
def test_a_shift_before_the_targets_changes_features_and_targets(shift):
    data = Synthetic(num_examples=400, num_features=30, snr=1e12, true_density=0.2, shift=shift, shift_scale=3.0)
    dataset = generate("lr", data, SPEC, 1)
    assert np.allclose(dataset.y, dataset.x @ dataset.truth[0], atol=1e-3)


@pytest.mark.parametrize("shift", [Shift.SCALAR_AFTER, Shift.VECTOR_AFTER])
def test_a_shift_after_the_targets_does_not_change_them(shift):
    plain = generate("lr", Synthetic(num_examples=400, num_features=30, shift=Shift.NONE), SPEC, 1)
    moved = generate("lr", Synthetic(num_examples=400, num_features=30, shift=shift), SPEC, 1)
    assert np.array_equal(plain.y, moved.y)
    assert not np.allclose(plain.x, moved.x)


def test_a_scalar_shift_is_one_number_per_client():
    plain = generate("lr", Synthetic(num_examples=400, num_features=30, shift=Shift.NONE), SPEC, 1)
    moved = generate("lr", Synthetic(num_examples=400, num_features=30, shift=Shift.SCALAR), SPEC, 1)
    difference = moved.x - plain.x
    assert np.ptp(difference, axis=1).max() < 1e-5
    ends = np.cumsum(moved.counts)[:-1]
    assert all(np.ptp(part) < 1e-5 for part in np.split(difference, ends) if len(part))


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("shift", [Shift.SCALAR, Shift.SCALAR_AFTER])
def test_scalar_shifts_have_the_set_standard_deviation(shift, scale):
    """L603: client c adds d_c ~ N(0, scale) to every feature; of 2000 clients, within five standard errors."""
    shifts = client_shifts(Synthetic(num_features=3, true_density=0.5, shift=shift, shift_scale=scale), 2000, rng())
    assert len(shifts) == 2000 and (shifts == shifts[:, :1]).all()
    assert abs(shifts[:, 0].mean()) <= 5 * scale / 2000**0.5
    assert abs(shifts[:, 0].std() - scale) <= 5 * scale / 4000**0.5


@pytest.mark.parametrize("shift", [Shift.VECTOR, Shift.VECTOR_AFTER])
def test_vector_shifts_vary_by_one_around_the_shift_of_their_client(shift):
    """L603: feature j of client c is shifted by N(d_c, 1), so variances add and features of a client correlate by d_c."""
    data = Synthetic(num_features=50, true_density=0.5, shift=shift, shift_scale=3.0)
    shifts = client_shifts(data, 2000, rng())
    assert shifts.mean(1).std() == pytest.approx((9 + 1 / 50) ** 0.5, rel=0.08)
    assert shifts.std(1, ddof=1).mean() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("shift", [Shift.VECTOR, Shift.VECTOR_AFTER])
def test_all_examples_of_a_client_are_shifted_alike(shift):
    plain, moved = (generate("lr", Synthetic(num_examples=400, num_features=30, shift=kind), SPEC, 1) for kind in (Shift.NONE, shift))
    parts = [part for part in np.split(moved.x - plain.x, np.cumsum(moved.counts)[:-1]) if len(part)]
    assert all(np.ptp(part, axis=0).max() < 1e-5 for part in parts)
    assert all(np.abs(one[0] - other[0]).max() > 0.1 for one, other in zip(parts, parts[1:], strict=False))


def test_the_shift_of_generated_clients_is_that_of_their_options():
    plain, moved = (
        generate(
            "lr", Synthetic(num_examples=2000, num_features=30, shift=shift, shift_scale=2.0), PartitionSpec(500, Partition.IID, 1.0), 1
        )
        for shift in (Shift.NONE, Shift.SCALAR)
    )
    assert (moved.x - plain.x)[::4, 0].std() == pytest.approx(2.0, rel=0.16)  # 500 clients: five standard errors


def test_server_and_test_examples_follow_the_same_coefficients():
    data = Synthetic(num_examples=300, num_features=20, true_density=0.1, shift_scale=50.0, snr=1e12)
    dataset = generate("lr", data, SPEC, 0, num_server_examples=40)
    assert dataset.server_x.shape == (40, 20) and dataset.test_x.shape == (10_000, 20)
    for x, y in ((dataset.server_x, dataset.server_y), (dataset.test_x, dataset.test_y)):
        assert np.allclose(y, x @ dataset.truth[0], rtol=1e-4, atol=1e-3)
    assert not np.allclose(dataset.server_x, dataset.test_x[:40])


@pytest.mark.parametrize("task", ["lr", "lg"])
def test_test_examples_have_the_noise_of_the_training_examples(task):
    data = Synthetic(num_examples=20_000, num_features=100, snr=3.0, shift=Shift.NONE)
    dataset = generate(task, data, SPEC, 5)
    signal, test_signal = dataset.x @ dataset.truth[0], dataset.test_x @ dataset.truth[0]
    if task == "lr":
        assert np.var(dataset.test_y - test_signal) == pytest.approx(np.var(dataset.y - signal), rel=0.08)
    else:
        assert np.mean((test_signal > 0) == dataset.test_y) == pytest.approx(np.mean((signal > 0) == dataset.y), abs=0.02)
        assert dataset.y.dtype == np.float32


def test_examples_of_a_client_keep_their_noise_when_they_are_put_in_order():
    """The partition only permutes examples: with other clients, the same examples have the same targets."""
    data = Synthetic(num_examples=400, num_features=30, snr=1.0, shift=Shift.NONE)
    one, other = (generate("lr", data, PartitionSpec(clients, Partition.IID, 1.0), 1) for clients in (1, 20))
    pairs = [np.concatenate((dataset.x, dataset.y[:, None]), 1) for dataset in (one, other)]
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(*(p[np.lexsort(p.T)] for p in pairs), strict=True))


def test_test_examples_are_never_shifted():
    data = Synthetic(num_examples=300, num_features=20, true_density=0.1, shift_scale=50.0)
    assert np.abs(generate("lr", data, SPEC, 0).test_x).max() < 7


@pytest.mark.parametrize("shift", [Shift.SCALAR, Shift.VECTOR_AFTER])
def test_server_examples_have_the_shifts_of_the_clients(shift):
    """Without noise in the examples' mean (2000 features), an example shows the shift of its client."""
    data = Synthetic(num_examples=300, num_features=2000, true_density=0.1, correlation=0.0, shift=shift, shift_scale=5.0)
    dataset = generate("lr", data, SPEC, 0, num_server_examples=500)
    plain = generate("lr", replace(data, shift=Shift.NONE), SPEC, 0, num_server_examples=500)
    shifts = np.concatenate([part[:1] for part in np.split((dataset.x - plain.x).mean(1), np.cumsum(dataset.counts)[:-1])])
    nearest = np.abs((dataset.server_x - plain.server_x).mean(1)[:, None] - shifts)
    assert nearest.min(1).max() < 1e-4
    held = dataset.counts[dataset.counts > 0]
    drawn = np.bincount(nearest.argmin(1), minlength=len(held))
    assert np.abs(drawn - 500 * held / held.sum()).max() < 5 * np.sqrt(500 * 0.25)
    assert np.corrcoef(drawn, held)[0, 1] > 0.9
    assert np.array_equal(dataset.server_y, plain.server_y) == (shift is Shift.VECTOR_AFTER)


def test_data_is_a_function_of_its_seed():
    data = Synthetic(num_examples=100, num_features=20, true_density=0.1)
    one, again, other = (generate("lr", data, SPEC, seed) for seed in (4, 4, 5))
    assert np.array_equal(one.x, again.x) and np.array_equal(one.y, again.y)
    assert not np.array_equal(one.x, other.x)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"num_examples": 0}, "data.num-examples must be at least 1"),
        ({"num_features": 0}, "data.num-features must be at least 1"),
        ({"num_classes": 1}, "data.num-classes must be at least 2"),
        ({"snr": 0.0}, "data.snr must be above 0"),
        ({"correlation": -0.1}, "data.correlation must be at least 0"),
        ({"shift_scale": -0.1}, "data.shift-scale is a standard deviation"),
        ({"correlation": 1.0}, "below 1"),
        ({"true_density": 0.0001}, "data.true-density: density 0.0001 of 1000 parameters keeps none"),
    ],
)
def test_invalid_options_of_synthetic_data_raise_an_error(wrong, text):
    with pytest.raises(ValueError, match=text):
        Synthetic(**wrong)


def test_the_smallest_options_of_synthetic_data_are_allowed():
    smallest = {"num_examples": 1, "num_features": 1, "num_classes": 2, "true_density": 1.0, "correlation": 0.0, "shift_scale": 0.0}
    dataset = generate("mc", Synthetic(**smallest), PartitionSpec(1, Partition.IID, 1.0), 0)
    assert dataset.x.shape == (1, 1) and set(dataset.test_y) <= {0, 1}


def test_different_purposes_have_different_random_numbers():
    assert not np.array_equal(generator(0, "rows").random(3), generator(0, "noise").random(3))
