"""Client-level differential privacy: what one client can change is bounded, the noise is as large as it says, epsilon is accounted."""

from dataclasses import replace
from math import log, sqrt

import pytest
import torch

from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.core.aggregation import Mean, Weighting
from fedsieve.core.private_mean import Noise, gaussian, noisy_mean
from fedsieve.core.random import server_drawer
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import Engine, Federation, Precision, Run
from fedsieve.experiments.simulation import Problem
from fedsieve.experiments.training import execute
from fedsieve.runtime.failures import Attack, Failures
from fedsieve.runtime.privacy import Privacy, spent

pytestmark = pytest.mark.usefixtures("few_test_rows")
DATA = Synthetic(rows=300, features=40, true_density=0.1)
DRAW = server_drawer(0, 0, 0, torch.float64)


def vectors(k=6, n=30, size=1.0):
    return size * torch.randn(k, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def quiet(clip=1.0, gate_clip=1.0, cohort=6):
    return Noise(0.0, clip, gate_clip, cohort)


def test_without_noise_short_differences_are_averaged_over_the_cohort_asked_for():
    short = 0.01 * vectors(4)
    torch.testing.assert_close(noisy_mean({"theta": short}, quiet(cohort=10), None, DRAW)["theta"], short.sum(0) / 10)


@pytest.mark.parametrize("size", [0.1, 10.0, 1e6])
def test_one_client_in_the_place_of_another_changes_the_mean_by_no_more_than_its_sensitivity(size):
    each = {"theta": vectors(size=size), "gate": 3 * vectors(size=size)}
    other = {"theta": -1e3 * vectors(1, 30)[0], "gate": 1e3 * vectors(1, 30)[0]}
    noise = quiet(clip=0.5, gate_clip=2.0)
    before = noisy_mean(each, noise, None, DRAW)
    for name, stack in each.items():
        stack[2] = other[name]
    after = noisy_mean(each, noise, None, DRAW)
    changed = sum(float((after[name] - before[name]).norm()) ** 2 / clip**2 for name, clip in (("theta", 0.5), ("gate", 2.0)))
    assert sqrt(changed) <= 2 * sqrt(2) / noise.cohort + 1e-9


@pytest.mark.parametrize("gates", [False, True])
def test_the_noise_is_as_large_as_it_says(gates):
    zero = {"theta": torch.zeros(3, 20_000, dtype=torch.float64)} | ({"gate": torch.zeros(3, 20_000, dtype=torch.float64)} if gates else {})
    found = noisy_mean(zero, Noise(1.5, 0.5, 2.0, 10), None, DRAW)
    for name, part in found.items():
        expected = 1.5 * 2 * sqrt(len(zero)) * (2.0 if name == "gate" else 0.5) / 10
        assert abs(float(part.std()) / expected - 1) < 4 / sqrt(2 * 20_000)
        assert abs(float(part.mean())) < 4 * expected / sqrt(20_000)


def test_noise_and_differences_stay_on_the_shared_support():
    support = torch.tensor([1, 5, 29])
    found = noisy_mean({"theta": vectors(), "kept_gate": vectors(6, 1)}, Noise(1.0, 1.0, 1.0, 6), support, DRAW)
    assert found["theta"].nonzero()[:, 0].tolist() == [1, 5, 29]
    assert found["kept_gate"].any()


def test_the_noise_has_tails():
    from scipy import stats

    drawn = gaussian(DRAW, "tails", 200_000)
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert len(drawn.unique()) == len(drawn)


# Epsilon


def test_epsilon_of_one_release_to_all_is_that_of_the_gaussian_mechanism():
    """Its Renyi divergence is alpha / (2 sigma^2); converted by the textbook, epsilon is at most that over a fine grid of orders."""
    found = next(spent(2.0, 1e-5, 50, 50, 1))
    textbook = min(alpha / 8 + log(1e5) / (alpha - 1) for alpha in [1 + x / 100 for x in range(10, 10_000)])
    assert 0.5 * textbook < found <= textbook + 0.1


def test_epsilon_grows_by_the_round_and_falls_with_noise_and_with_smaller_cohorts():
    account = spent(2.0, 1e-5, 1000, 100, 1)
    first, second, third = (next(account) for _ in range(3))
    assert first < second < third
    assert next(spent(4.0, 1e-5, 1000, 100, 1)) < first
    assert next(spent(2.0, 1e-5, 1000, 10, 1)) < first


def test_exchanges_with_one_cohort_cost_as_much_as_one_of_so_much_less_noise():
    assert next(spent(4.0, 1e-5, 1000, 100, 16)) == pytest.approx(next(spent(1.0, 1e-5, 1000, 100, 1)))


def test_a_resumed_account_goes_on_where_it_stood():
    account = spent(2.0, 1e-5, 1000, 100, 1)
    whole = [next(account) for _ in range(5)]
    later = spent(2.0, 1e-5, 1000, 100, 1, first=3)
    assert [next(later) for _ in range(2)] == pytest.approx(whole[3:])


# Runs


def run_of(method="fed-avg", engine=Engine.BATCHED, privacy=Privacy(noise=0.5), **fields):  # noqa: B008
    federation = fields.pop("federation", Federation(clients=12, participation=0.5))
    algorithm = algorithm_class(method)(steps=5, batch=8)
    common = {"density": 0.1, "rounds": 3, "seed": 11, "precision": Precision.DOUBLE, "data": DATA, "algorithm": algorithm}
    return Run(method=method, engine=engine, federation=federation, privacy=privacy, **{**common, **fields})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_in_private_alike_on_both_engines(method):
    loop, batched = (list(execute(run := run_of(method, engine), Problem(run))) for engine in (Engine.LOOP, Engine.BATCHED))
    assert torch.equal(loop[-1].theta, batched[-1].theta)
    assert int((loop[-1].theta != 0).sum()) == 4
    epsilons = [step.row["epsilon"] for step in loop]
    assert epsilons == sorted(epsilons) and epsilons[0] > 0
    assert all(step.round.rejected == [] for step in loop)


def test_a_broken_client_counts_as_one_that_did_not_move():
    run = run_of(failures=Failures(hostile=0.25, attack=Attack.NAN), privacy=Privacy(noise=1e-9, clip=1e6), rounds=1)
    plain = run_of(privacy=Privacy(noise=1e-9, clip=1e6), rounds=1)
    (broken,), (whole,) = (list(execute(r, Problem(r))) for r in (run, plain))
    assert broken.round.rejected
    assert torch.isfinite(broken.theta).all() and not torch.equal(broken.theta, whole.theta)


def test_while_polishing_the_noise_of_sieve_stays_on_the_support():
    run = run_of("sieve", rounds=10)
    steps = list(execute(run, Problem(run)))
    before, after = steps[-2].round.server.weights, steps[-1].round.server.weights
    kept = run.algorithm.remembered(steps[-1].round.server) * before
    moved = ~torch.isclose(after, kept, rtol=1e-9)
    assert int(moved.sum()) <= 4


def test_a_resumed_private_run_goes_on_to_the_same_bits_and_the_same_epsilon():
    from fedsieve.experiments.training import Standing

    run = run_of("sieve")
    whole = list(execute(run, Problem(run)))
    later = list(execute(run, Problem(run), Standing(whole[0].round.server, 1)))
    assert torch.equal(later[-1].theta, whole[-1].theta)
    assert [step.row["epsilon"] for step in later] == pytest.approx([step.row["epsilon"] for step in whole[1:]])


def test_privacy_is_off_by_default_and_delta_follows_the_number_of_clients():
    assert Run().algorithm.private is None
    assert Run().privacy.delta is None
    assert run_of().privacy.delta == pytest.approx(0.1 / 12)
    assert run_of().federation.weights is Weighting.UNIFORM


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"noise": -1.0}, "at least 0"),
        ({"noise": float("inf")}, "finite"),
        ({"clip": 1.0}, "protects nobody"),
        ({"noise": 1.0, "clip": 0.0}, "above 0"),
        ({"noise": 1.0, "delta": 1.0}, "below 1"),
    ],
)
def test_settings_that_protect_nobody_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Privacy(**fields)


@pytest.mark.parametrize(
    ("federation", "says"),
    [
        ({"weights": Weighting.EXAMPLES}, "one say"),
        ({"mean": Mean.MEDIAN}, "not bounded"),
        ({"norm_limit": 10.0}, "compares a reply"),
        ({"server_rows": 5}, "own rows"),
        ({"central": True}, "only one"),
    ],
)
def test_what_would_void_the_guarantee_is_refused(federation, says):
    with pytest.raises(ValueError, match=says):
        Run(method="fed-avg", federation=Federation(**federation), privacy=Privacy(noise=1.0))


def test_a_clip_for_gates_is_refused_where_there_are_none():
    with pytest.raises(ValueError, match="sends none"):
        run_of("fed-avg", privacy=Privacy(noise=1.0, gate_clip=1.0))
    assert run_of("sieve", privacy=Privacy(noise=1.0, gate_clip=2.0)).algorithm.private.gate_clip == 2.0


def test_without_the_accountant_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr("fedsieve.runtime.privacy.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"fedsieve\[privacy\]"):
        Privacy(noise=1.0)


def test_a_private_run_is_restored_from_its_settings():
    from fedsieve.experiments.config_io import from_config

    run = run_of()
    assert from_config(run.config).config == run.config
    assert replace(run, seed=3).algorithm.private == run.algorithm.private
