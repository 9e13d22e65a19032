"""Client-level differential privacy: what one client can change is bounded, the noise is as large as it says, epsilon is accounted."""

from dataclasses import replace
from math import log, sqrt

import pytest
import torch

from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.private_mean import GaussianMechanism, private_mean, standard_normal
from fedsieve.core.random import server_sampler
from fedsieve.experiments.config import Engine, FederationConfig, Precision, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import run_rounds
from fedsieve.runtime.attacks import Attack
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy, epsilon_by_round
from helpers.algorithms import SOME_ALGORITHMS
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
DRAW = server_sampler(0, 0, 0, torch.float64)


def vectors(k=6, n=30, size=1.0):
    return size * torch.randn(k, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def quiet(clip=1.0, gate_clip=1.0, cohort=6):
    return GaussianMechanism(0.0, clip, gate_clip, cohort)


def test_without_noise_short_differences_are_averaged_over_the_cohort_asked_for():
    short = 0.01 * vectors(4)
    torch.testing.assert_close(private_mean({"theta": short}, quiet(cohort=10), None, DRAW)["theta"], short.sum(0) / 10)


@pytest.mark.parametrize("name", ["gates", "log_alpha", "gate_gradient", "kept_gate"])
def test_every_field_of_gates_has_the_clip_of_gates(name):
    far = {"weights": torch.full((10, 4), 50.0), name: torch.full((10, 1), 50.0)}
    found = private_mean(far, quiet(clip=1.0, gate_clip=3.0, cohort=10), None, DRAW)
    assert {field: float(torch.linalg.vector_norm(value)) for field, value in found.items()} == pytest.approx({"weights": 1.0, name: 3.0})


@pytest.mark.parametrize("size", [0.1, 10.0, 1e6])
def test_replacing_one_client_changes_the_mean_by_at_most_the_sensitivity(size):
    each = {"theta": vectors(size=size), "gate": 3 * vectors(size=size)}
    other = {"theta": -1e3 * vectors(1, 30)[0], "gate": 1e3 * vectors(1, 30)[0]}
    noise = quiet(clip=0.5, gate_clip=2.0)
    before = private_mean(each, noise, None, DRAW)
    for name, stack in each.items():
        stack[2] = other[name]
    after = private_mean(each, noise, None, DRAW)
    changed = sum(float((after[name] - before[name]).norm()) ** 2 / clip**2 for name, clip in (("theta", 0.5), ("gate", 2.0)))
    assert sqrt(changed) <= 2 * sqrt(2) / noise.cohort_size + 1e-9


@pytest.mark.parametrize("gates", [False, True])
def test_the_noise_is_as_large_as_it_says(gates):
    zero = {"theta": torch.zeros(3, 20_000, dtype=torch.float64)} | ({"gate": torch.zeros(3, 20_000, dtype=torch.float64)} if gates else {})
    found = private_mean(zero, GaussianMechanism(1.5, 0.5, 2.0, 10), None, DRAW)
    for name, part in found.items():
        expected = 1.5 * 2 * sqrt(len(zero)) * (2.0 if name == "gate" else 0.5) / 10
        assert abs(float(part.std()) / expected - 1) < 4 / sqrt(2 * 20_000)
        assert abs(float(part.mean())) < 4 * expected / sqrt(20_000)


def test_noise_and_differences_stay_on_the_shared_support():
    support = torch.tensor([1, 5, 29])
    found = private_mean({"theta": vectors(), "kept_gate": vectors(6, 1)}, GaussianMechanism(1.0, 1.0, 1.0, 6), support, DRAW)
    assert found["theta"].nonzero()[:, 0].tolist() == [1, 5, 29]
    assert found["kept_gate"].any()


def test_the_noise_has_tails():
    from scipy import stats

    drawn = standard_normal(DRAW, "tails", 200_000)
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert len(drawn.unique()) == len(drawn)


# Epsilon


def test_epsilon_of_one_release_to_all_is_that_of_the_gaussian_mechanism():
    """Its Renyi divergence is alpha / (2 sigma^2); converted by the textbook, epsilon is at most that over a fine grid of orders."""
    found = next(epsilon_by_round(2.0, 1e-5, 50, 50, 1))
    textbook = min(alpha / 8 + log(1e5) / (alpha - 1) for alpha in [1 + x / 100 for x in range(10, 10_000)])
    assert 0.5 * textbook < found <= textbook + 0.1


def test_epsilon_grows_by_the_round_and_falls_with_noise_and_with_smaller_cohorts():
    account = epsilon_by_round(2.0, 1e-5, 1000, 100, 1)
    first, second, third = (next(account) for _ in range(3))
    assert first < second < third
    assert next(epsilon_by_round(4.0, 1e-5, 1000, 100, 1)) < first
    assert next(epsilon_by_round(2.0, 1e-5, 1000, 10, 1)) < first


def test_exchanges_with_one_cohort_cost_as_much_as_one_of_so_much_less_noise():
    assert next(epsilon_by_round(4.0, 1e-5, 1000, 100, 16)) == pytest.approx(next(epsilon_by_round(1.0, 1e-5, 1000, 100, 1)))


def test_a_resumed_privacy_account_continues():
    account = epsilon_by_round(2.0, 1e-5, 1000, 100, 1)
    whole = [next(account) for _ in range(5)]
    later = epsilon_by_round(2.0, 1e-5, 1000, 100, 1, first=3)
    assert [next(later) for _ in range(2)] == pytest.approx(whole[3:])


# Runs


def private_run(method="fed-avg", privacy=Privacy(noise_multiplier=0.5), **settings):  # noqa: B008
    return small_run(method, privacy=privacy, **{"rounds": 3, "precision": Precision.DOUBLE, **settings})


@pytest.mark.parametrize("method", SOME_ALGORITHMS)
def test_every_algorithm_trains_privately_to_equal_results_on_both_engines(method):
    loop, batched = (train_run(private_run(method, engine=engine)) for engine in (Engine.LOOP, Engine.BATCHED))
    assert torch.equal(loop[-1].parameters, batched[-1].parameters)
    assert int((loop[-1].parameters != 0).sum()) == 4
    epsilons = [step.metrics["epsilon"] for step in loop]
    assert epsilons == sorted(epsilons) and epsilons[0] > 0
    assert all(step.result.rejected == [] for step in loop)


def test_a_broken_client_counts_as_one_that_did_not_move():
    settings = {"privacy": Privacy(noise_multiplier=1e-9, clip=1e6), "rounds": 1}
    (broken,) = train_run(private_run(failures=Failures(malicious_fraction=0.25, attack=Attack.NAN), **settings))
    (whole,) = train_run(private_run(**settings))
    assert broken.result.rejected
    assert torch.isfinite(broken.parameters).all() and not torch.equal(broken.parameters, whole.parameters)


def test_while_polishing_the_noise_of_sieve_stays_on_the_support():
    run = private_run("sieve", rounds=10)
    steps = train_run(run)
    before, after = steps[-2].result.server.weights, steps[-1].result.server.weights
    kept = run.algorithm.residual_decay * before
    moved = ~torch.isclose(after, kept, rtol=1e-9)
    assert int(moved.sum()) <= 4


def test_a_resumed_private_run_continues_to_the_same_bits_and_epsilon():
    from fedsieve.runtime.evaluation import RunState

    run = private_run("sieve")
    whole = train_run(run)
    later = list(run_rounds(run, Simulation(run), RunState(whole[0].result.server, 1), bytes(32)))
    assert torch.equal(later[-1].parameters, whole[-1].parameters)
    assert [step.metrics["epsilon"] for step in later] == pytest.approx([step.metrics["epsilon"] for step in whole[1:]])


def test_privacy_is_off_by_default_and_delta_follows_the_number_of_clients():
    assert resolve(RunConfig()).algorithm.privacy is None
    assert resolve(RunConfig()).privacy.delta is None
    assert private_run().privacy.delta == pytest.approx(0.1 / 12)
    assert private_run().federation.client_weighting is ClientWeighting.UNIFORM


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"noise_multiplier": -1.0}, "at least 0"),
        ({"noise_multiplier": float("inf")}, "finite"),
        ({"clip": 1.0}, "has no effect without privacy.noise-multiplier"),
        ({"noise_multiplier": 1.0, "clip": 0.0}, "above 0"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "below 1"),
    ],
)
def test_settings_that_protect_nobody_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Privacy(**fields)


@pytest.mark.parametrize(
    ("federation", "says"),
    [
        ({"client_weighting": ClientWeighting.EXAMPLES}, "equal client weights"),
        ({"aggregator": Aggregator.MEDIAN}, "not on federation.aggregator"),
        ({"max_norm_ratio": 10.0}, "compares a reply"),
        ({"server_examples": 5}, "own examples"),
    ],
)
def test_what_would_void_the_guarantee_is_refused(federation, says):
    with pytest.raises(ValueError, match=says):
        resolve(RunConfig(algorithm_name="fed-avg", federation=FederationConfig(**federation), privacy=Privacy(noise_multiplier=1.0)))


def test_privacy_needs_more_than_one_client():
    with pytest.raises(ValueError, match="only one client"):
        resolve(RunConfig(algorithm_name="fed-avg", centralized=True, privacy=Privacy(noise_multiplier=1.0)))


def test_a_clip_for_gates_is_refused_where_there_are_none():
    with pytest.raises(ValueError, match="sends no gates"):
        private_run("fed-avg", privacy=Privacy(noise_multiplier=1.0, gate_clip=1.0))
    assert private_run("sieve", privacy=Privacy(noise_multiplier=1.0, gate_clip=2.0)).algorithm.privacy.gate_clip == 2.0


def test_without_the_accountant_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr("fedsieve.runtime.privacy.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"fedsieve\[privacy\]"):
        Privacy(noise_multiplier=1.0)


def test_a_private_run_is_restored_from_its_settings():
    from fedsieve.experiments.config_io import from_settings_dict

    run = private_run()
    assert resolve(from_settings_dict(run.settings_dict)).settings_dict == run.settings_dict
    assert resolve(replace(run.config, seed=3)).algorithm.privacy == run.algorithm.privacy
