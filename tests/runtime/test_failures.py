"""What goes wrong in a simulation: who is away, late or hostile follows from the seed alone, for every method."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.core.aggregation import Mean
from fedsieve.core.reply_validation import screened
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import Engine, Federation, Precision, Run
from fedsieve.experiments.simulation import Problem
from fedsieve.experiments.training import DivergedError, Standing, execute
from fedsieve.runtime.failures import LATE, Attack, Failures, away, hostile_clients
from fedsieve.runtime.rounds import sample_cohort

pytestmark = pytest.mark.usefixtures("few_test_rows")
DATA = Synthetic(rows=300, features=40, true_density=0.1)


def run_of(method="fed-avg", failures=None, engine=Engine.BATCHED, rounds=4, **federation):
    parts = {"clients": 12, "participation": 0.5, **federation}
    return Run(
        method=method,
        density=0.1,
        rounds=rounds,
        seed=11,
        engine=engine,
        precision=Precision.DOUBLE,
        data=DATA,
        federation=Federation(**parts),
        failures=failures or Failures(),
        algorithm=algorithm_class(method)(steps=5, batch=8),
    )


def steps_of(run):
    return list(execute(run, Problem(run)))


@pytest.mark.parametrize("failures", [Failures(drop=0.3), Failures(drop=0.6, comeback=0.2), Failures(drop=0.4, comeback=1.0)])
def test_clients_are_away_for_their_share_of_the_time_and_come_back_at_their_rate(failures):
    clients, rounds = list(range(2000)), 30
    gone = np.array([away(failures, 5, t, clients) for t in range(rounds)])
    back = 1 - failures.drop if failures.comeback is None else failures.comeback
    error = 4 * np.sqrt(failures.drop * (1 - failures.drop) / len(clients))
    assert abs(gone[0].mean() - failures.drop) < error and abs(gone[-1].mean() - failures.drop) < error
    returned = [(before & ~now).sum() / before.sum() for before, now in pairwise(gone)]
    assert abs(np.mean(returned) - back) < 4 * np.sqrt(0.25 / (gone[:-1].sum()))


def test_who_is_away_is_what_stepping_through_all_rounds_gives():
    """The pure function against the chain itself, driven by the same numbers."""
    from fedsieve.runtime.failures import chance

    failures, clients = Failures(drop=0.6, comeback=0.5), list(range(50))
    state = chance(3, ("away", "first"), clients) < 0.6
    for t in range(40):
        number = chance(3, ("away", t), clients)
        state = np.where(state, number < 1 - 0.5, number < 0.5 * 0.6 / 0.4)
        assert away(failures, 3, t, clients) == state.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_half_of_the_clients_away_still_leaves_exactly_m_weights(method):
    steps = steps_of(run_of(method, Failures(drop=0.5)))
    assert all(int((step.theta != 0).sum()) == 4 for step in steps)
    asked, replied = (sum(len(getattr(step.round, part)) for step in steps) for part in ("cohort", "replied"))
    assert 0 < replied < asked


def test_half_of_the_clients_away_cost_little_accuracy():
    values = [
        [step.row["r2"] for step in steps_of(run_of("sieve", failures, rounds=20, clients=30, participation=0.3))][-1]
        for failures in (Failures(), Failures(drop=0.5), Failures(drop=0.5, comeback=0.1))
    ]
    assert values[0] > 0.7
    assert min(values[1:]) > values[0] - 0.05


def test_a_round_in_which_nobody_answers_changes_nothing_and_is_reported():
    run = run_of("flops", Failures(drop=0.9), rounds=8, clients=6, participation=0.17)
    steps = steps_of(run)
    silent = [i for i, step in enumerate(steps) if i and not step.round.replied]
    assert silent
    for i in silent:
        assert torch.equal(steps[i].round.server.log_alpha, steps[i - 1].round.server.log_alpha)
        assert torch.equal(steps[i].theta, steps[i - 1].theta)
        assert steps[i].row["replied"] == [] and steps[i].row["bytes_up"] == steps[i].row["bytes_down"] == 0


def test_a_late_reply_crosses_but_does_not_count():
    steps = steps_of(run_of(failures=Failures(late=0.5)))
    late = [(client, why) for step in steps for client, why in step.round.rejected]
    assert late and {why for _, why in late} == {LATE}
    undisturbed = steps_of(run_of())
    assert [s.row["bytes_up"] for s in steps][:1] == [s.row["bytes_up"] for s in undisturbed][:1]
    for step in steps:
        assert sorted([*step.round.replied, *(client for client, _ in step.round.rejected)]) == step.round.cohort


@pytest.mark.parametrize("failures", [Failures(drop=0.4, late=0.2), Failures(hostile=0.25), Failures(hostile=0.25, attack=Attack.RANDOM)])
@pytest.mark.parametrize("method", ["sieve", "flops-pa", "flops"])
def test_both_engines_fail_alike(method, failures):
    loop, batched = (steps_of(run_of(method, failures, engine)) for engine in (Engine.LOOP, Engine.BATCHED))
    assert torch.equal(loop[-1].theta, batched[-1].theta)
    assert [s.round.replied for s in loop] == [s.round.replied for s in batched]


def test_a_resumed_run_meets_the_same_failures():
    """Nothing is remembered but the server: from round two on, the same clients are away, late and hostile."""
    run = run_of(failures=Failures(drop=0.4, comeback=0.3, late=0.2, hostile=0.2, attack=Attack.RANDOM))
    whole = steps_of(run)
    later = list(execute(run, Problem(run), Standing(whole[1].round.server, 2)))
    assert [(s.round.replied, s.round.rejected) for s in later] == [(s.round.replied, s.round.rejected) for s in whole[2:]]
    assert torch.equal(later[-1].theta, whole[-1].theta)


def test_hostile_clients_are_a_fixed_share_of_those_who_hold_rows():
    present = list(range(0, 100, 2))
    found = hostile_clients(Failures(hostile=0.3), present, 1)
    assert len(found) == 15 and found <= set(present)
    assert found == hostile_clients(Failures(hostile=0.3), present, 1) != hostile_clients(Failures(hostile=0.3), present, 2)


def first_replies(attack, strength, method="fed-avg"):
    """Honest and hostile replies to the same broadcast, as differences to it."""
    captured = {}
    for failures in (Failures(), Failures(hostile=0.25, attack=attack, strength=strength)):
        run = run_of(method, failures, rounds=1)
        seen = []

        def spy(algorithm, packet, came, cohort, clock, screen, dtype, seen=seen):
            seen.append(([reply.client for reply in came.replies], algorithm.moved(packet, came.replies, dtype)))
            return screened(algorithm, packet, came, cohort, clock, screen, dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedsieve.runtime.rounds.screened", spy)
            steps = steps_of(run)
        captured[failures.hostile > 0] = (seen[0], steps[0].round.rejected)
    lied = hostile_clients(Failures(hostile=0.25), Problem(run).population.present, 11)
    return captured, lied


def test_a_flipped_or_scaled_reply_is_the_honest_difference_times_its_strength():
    for attack, factor in ((Attack.FLIP, -3.0), (Attack.SCALE, 3.0)):
        captured, lied = first_replies(attack, 3.0)
        (clients, honest), _ = captured[False]
        (_, altered), _ = captured[True]
        assert lied & set(clients)
        for i, client in enumerate(clients):
            times = factor if client in lied else 1.0
            torch.testing.assert_close(altered["theta"][i], times * honest["theta"][i], rtol=1e-5, atol=1e-5)


def test_a_random_reply_is_as_long_as_it_should_be_and_a_broken_one_is_rejected():
    captured, lied = first_replies(Attack.RANDOM, 3.0)
    (clients, honest), _ = captured[False]
    (_, altered), _ = captured[True]
    for i, client in enumerate(clients):
        if client in lied:
            assert 1.5 < altered["theta"][i].norm() / honest["theta"][i].norm() < 4.5
    captured, lied = first_replies(Attack.NAN, None)
    assert {client for client, _ in captured[True][1]} == lied & set(clients)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [kind for kind in Mean if kind is not Mean.WEIGHTED])
def test_every_method_takes_every_robust_mean_and_keeps_exactly_m(method, kind):
    steps = steps_of(run_of(method, Failures(hostile=0.2, strength=20.0), rounds=2, mean=kind, participation=0.8))
    assert int((steps[-1].theta != 0).sum()) == 4
    assert torch.isfinite(steps[-1].theta).all()


def test_where_clients_agree_a_robust_mean_is_the_plain_one():
    """Full batches of a cohort of one: every mean is that client's reply, for methods in which all of it is a difference."""
    plain = steps_of(run_of("fed-avg", clients=1, participation=1.0))[-1].theta
    for kind in Mean:
        if kind is Mean.KRUM:
            continue  # it needs three replies
        torch.testing.assert_close(steps_of(run_of("fed-avg", clients=1, participation=1.0, mean=kind))[-1].theta, plain)


@pytest.mark.parametrize("kind", [Mean.GEOMETRIC, Mean.KRUM, Mean.TRIMMED, Mean.MEDIAN])
def test_a_robust_mean_learns_where_the_plain_one_is_carried_away(kind):
    """Three in ten clients send minus five times their difference."""
    hostile = Failures(hostile=0.3)
    common = {"clients": 20, "participation": 1.0, "rounds": 15}
    plain = steps_of(run_of("fed-avg", hostile, **common))[-1].row["r2"]
    kept = steps_of(run_of("fed-avg", hostile, mean=kind, **common))[-1].row["r2"]
    assert plain < 0 and kept > 0.25


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"drop": 1.0}, "below 1"),
        ({"late": -0.1}, "at least 0"),
        ({"hostile": float("nan")}, "share"),
        ({"comeback": 0.5}, "nobody is"),
        ({"drop": 0.9, "comeback": 0.5}, "at most 0.111"),
        ({"attack": Attack.NAN}, "there are none"),
        ({"strength": 2.0}, "there are none"),
        ({"hostile": 0.1, "attack": Attack.NAN, "strength": 2.0}, "no meaning"),
        ({"hostile": 0.1, "strength": 0.0}, "above 0"),
    ],
)
def test_failures_that_cannot_be_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Failures(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mean": Mean.MEDIAN, "tolerate": 0.2}, "leave it out"),
        ({"mean": Mean.TRIMMED, "tolerate": 0.5}, "below 0.5"),
        ({"mean": Mean.MEDIAN, "weights": "riemannian"}, "mean itself"),
        ({"mean": Mean.KRUM, "clients": 10, "participation": 0.4, "tolerate": 0.25}, "needs 5 replies"),
        ({"norm_limit": 0.5}, "at least 1"),
        ({"most_examples": 0}, "at least 1"),
    ],
)
def test_federations_that_defend_nothing_are_refused(fields, says):
    from fedsieve.core.aggregation import Weighting

    fields = {**fields, **({"weights": Weighting(fields["weights"])} if "weights" in fields else {})}
    with pytest.raises(ValueError, match=says):
        Run(federation=Federation(**fields))


def test_a_robust_mean_gives_each_client_one_say_unless_told_otherwise():
    from fedsieve.core.aggregation import Weighting

    assert Run(federation=Federation(mean=Mean.MEDIAN)).federation.weights is Weighting.UNIFORM
    assert Run(federation=Federation(mean=Mean.MEDIAN, weights=Weighting.SQRT)).federation.weights is Weighting.SQRT
    assert Run().federation.weights is Weighting.SQRT


def test_a_bound_on_examples_that_nobody_meets_is_said():
    run = run_of(most_examples=1, alpha=1000.0)
    with pytest.raises(DivergedError, match="every reply was rejected"):
        steps_of(run)


def test_failures_do_not_decide_who_is_asked():
    run = run_of(failures=Failures(drop=0.5))
    population = Problem(run).population
    assert [step.round.cohort for step in steps_of(run)] == [sample_cohort(population, 0.5, 11, t) for t in range(4)]
