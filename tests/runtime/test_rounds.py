import numpy as np
import pytest
import torch

from fedsieve.algorithms import ALGORITHMS
from fedsieve.core.protocols import Workload
from fedsieve.core.types import Clock, ExchangeResult, Traffic
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss
from fedsieve.runtime.client_data import ClientData, draw_batches, shuffle_into_batches
from fedsieve.runtime.rounds import Population, cohort_size, initial_server, sample_cohort, train


def test_cohort_sizes_are_exact_and_never_zero():
    assert cohort_size(100, 0.29) == 29
    assert cohort_size(100, 0.05) == 5
    assert cohort_size(3, 0.1) == 1


def test_a_cohort_is_sampled_without_replacement_from_clients_with_examples():
    for t in range(50):
        cohort = sample_cohort(range(0, 100, 3), 20, 0, t)
        assert len(set(cohort)) == 20
        assert cohort == sorted(cohort)
        assert all(c % 3 == 0 for c in cohort)


def test_a_small_population_takes_part_whole():
    assert sample_cohort([1, 5], 50, 0, 0) == [1, 5]


def test_cohorts_differ_between_rounds_and_repeat_from_the_seed():
    rounds = [tuple(sample_cohort(range(100), 5, 7, t)) for t in range(20)]
    assert len(set(rounds)) > 15
    assert rounds[3] == tuple(sample_cohort(range(100), 5, 7, 3))


def test_every_client_takes_part_about_equally_often():
    counts = np.bincount([c for t in range(2000) for c in sample_cohort(range(20), 5, 0, t)], minlength=20)
    assert abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


def test_every_example_is_used_once_before_any_is_repeated():
    batches = shuffle_into_batches(0, 2, 4, 40, batch_size=8, num_batches=8)
    assert np.array_equal(np.sort(batches[:5].ravel()), np.arange(40))
    assert len(set(batches[7])) == 8


def test_examples_repeat_in_a_batch_only_if_there_are_too_few():
    assert np.bincount(shuffle_into_batches(0, 0, 0, 3, batch_size=8, num_batches=5)[0]).tolist() in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_independent_batches_are_random_subsets_whatever_the_others_hold():
    batches = np.concatenate([draw_batches(0, round, 1, 20, batch_size=5, num_batches=40) for round in range(100)])
    assert all(len(set(batch)) == 5 for batch in batches)
    counts = np.bincount(batches.ravel(), minlength=20)
    assert abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)
    shared = [len(set(a) & set(b)) for a, b in zip(batches[::2], batches[1::2], strict=True)]
    assert np.mean(shared) == pytest.approx(5 * 5 / 20, abs=0.1)
    assert len(draw_batches(0, 0, 1, 3, batch_size=8, num_batches=2)[0]) == 8


def test_a_stack_of_clients_gets_the_batches_of_each():
    objective = Linear(loss=Loss.SQUARED, num_features=1)
    rows = ClientData(torch.arange(60.0)[:, None], torch.arange(60.0), [20, 30, 10], objective, batch_size=8)
    for round in (3, 4):
        batches = list(rows.batches(0, Clock(round, 5, exchange=1), [2, 0], Workload(2, 2, 8)))
        assert np.array_equal([batch.y[0] for batch in batches], shuffle_into_batches(0, round, 2, 10, 8, 4)[2:] + 50)
        assert np.array_equal([batch.y[1] for batch in batches], shuffle_into_batches(0, round, 0, 20, 8, 4)[2:])


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_round_without_replies_changes_nothing(method):
    run = resolve(RunConfig(algorithm_name=method, rounds=2))
    server = initial_server(run.algorithm, run.objective, 0, torch.float32)
    rounds = list(
        train(run.algorithm, server, Population(100, range(100)), 0.05, lambda *_: ExchangeResult([], [], Traffic(), Traffic()), 2, 0)
    )
    assert all(torch.equal(a, b) for a, b in zip(rounds[-1].server, server, strict=True) if isinstance(a, torch.Tensor))
    assert rounds[-1].replied == []
