"""What goes wrong in a simulation: who is away, late or hostile follows from the seed alone, for every method."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fedsieve.algorithms import ALGORITHMS
from fedsieve.core.aggregation import Aggregator
from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.reply_validation import validate_replies
from fedsieve.experiments.config import Engine, FederationConfig, Precision, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import run_rounds
from fedsieve.runtime.attacks import Attack, attack_weights
from fedsieve.runtime.evaluation import DivergedError, RunState
from fedsieve.runtime.failures import LATE_REASON, Failures, find_offline, sample_malicious_clients
from fedsieve.runtime.rounds import cohort_size, sample_cohort
from helpers.algorithms import SOME_ALGORITHMS
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")


def run_with(method="fed-avg", failures=None, engine=Engine.BATCHED, rounds=4, **federation):
    settings = {"federation": FederationConfig(**{"clients": 12, "participation": 0.5, **federation}), "failures": failures or Failures()}
    return small_run(method, engine=engine, rounds=rounds, precision=Precision.DOUBLE, **settings)


@pytest.mark.parametrize(
    "failures", [Failures(dropout=0.3), Failures(dropout=0.6, return_probability=0.2), Failures(dropout=0.4, return_probability=1.0)]
)
def test_clients_are_unavailable_and_return_at_the_set_rates(failures):
    clients, rounds = list(range(2000)), 30
    gone = np.array([find_offline(failures, 5, t, clients) for t in range(rounds)])
    back = 1 - failures.dropout if failures.return_probability is None else failures.return_probability
    error = 4 * np.sqrt(failures.dropout * (1 - failures.dropout) / len(clients))
    assert abs(gone[0].mean() - failures.dropout) < error and abs(gone[-1].mean() - failures.dropout) < error
    returned = [(before & ~now).sum() / before.sum() for before, now in pairwise(gone)]
    assert abs(np.mean(returned) - back) < 4 * np.sqrt(0.25 / (gone[:-1].sum()))


def test_who_is_away_is_what_stepping_through_all_rounds_gives():
    """The pure function against the chain itself, driven by the same numbers."""
    from fedsieve.runtime.failures import client_uniforms

    failures, clients = Failures(dropout=0.6, return_probability=0.5), list(range(50))
    state = client_uniforms(3, ("away", "first"), clients) < 0.6
    for t in range(40):
        number = client_uniforms(3, ("away", t), clients)
        state = np.where(state, number < 1 - 0.5, number < 0.5 * 0.6 / 0.4)
        assert find_offline(failures, 3, t, clients) == state.tolist()


@pytest.mark.parametrize("method", ALGORITHMS)
def test_half_of_the_clients_away_still_leaves_exactly_m_weights(method):
    steps = train_run(run_with(method, Failures(dropout=0.5)))
    assert all(int((step.parameters != 0).sum()) == 4 for step in steps)
    asked, replied = (sum(len(getattr(step.result, part)) for step in steps) for part in ("cohort", "replied"))
    assert 0 < replied < asked


def test_half_of_the_clients_away_cost_little_accuracy():
    values = [
        [step.metrics["r2"] for step in train_run(run_with("sieve", failures, rounds=20, clients=30, participation=0.3))][-1]
        for failures in (Failures(), Failures(dropout=0.5), Failures(dropout=0.5, return_probability=0.1))
    ]
    assert values[0] > 0.7
    assert min(values[1:]) > values[0] - 0.05


def test_a_round_without_replies_changes_nothing_and_is_reported():
    run = run_with("flops", Failures(dropout=0.9), rounds=8, clients=6, participation=0.17)
    steps = train_run(run)
    silent = [i for i, step in enumerate(steps) if i and not step.result.replied]
    assert silent
    for i in silent:
        assert torch.equal(steps[i].result.server.log_alpha, steps[i - 1].result.server.log_alpha)
        assert torch.equal(steps[i].parameters, steps[i - 1].parameters)
        assert steps[i].metrics["replied"] == [] and steps[i].metrics["bytes_up"] == steps[i].metrics["bytes_down"] == 0


def test_a_late_reply_is_counted_in_bytes_but_not_aggregated():
    steps = train_run(run_with(failures=Failures(straggler_fraction=0.5)))
    late = [(client, why) for step in steps for client, why in step.result.rejected]
    assert late and {why for _, why in late} == {LATE_REASON}
    undisturbed = train_run(run_with())
    assert [s.metrics["bytes_up"] for s in steps][:1] == [s.metrics["bytes_up"] for s in undisturbed][:1]
    for step in steps:
        assert sorted([*step.result.replied, *(client for client, _ in step.result.rejected)]) == step.result.cohort


@pytest.mark.parametrize(
    "failures",
    [
        Failures(dropout=0.4, straggler_fraction=0.2),
        Failures(malicious_fraction=0.25),
        Failures(malicious_fraction=0.25, attack=Attack.RANDOM),
    ],
)
@pytest.mark.parametrize("method", ["sieve", "flops-pa", "flops"])
def test_both_engines_simulate_the_same_failures(method, failures):
    loop, batched = (train_run(run_with(method, failures, engine)) for engine in (Engine.LOOP, Engine.BATCHED))
    assert torch.equal(loop[-1].parameters, batched[-1].parameters)
    assert [s.result.replied for s in loop] == [s.result.replied for s in batched]


@pytest.mark.parametrize("attack", [attack for attack in Attack if attack not in (Attack.FLIP, Attack.RANDOM, Attack.NAN)])
@pytest.mark.parametrize("method", ["sieve", "flops-pa"])
def test_both_engines_see_the_same_lies(method, attack):
    failures = Failures(malicious_fraction=0.25, attack=attack)
    loop, batched = (train_run(run_with(method, failures, engine, rounds=2))[-1] for engine in (Engine.LOOP, Engine.BATCHED))
    assert torch.equal(loop.parameters, batched.parameters)


def test_a_resumed_run_meets_the_same_failures():
    """Nothing is remembered but the server: from round two on, the same clients are away, late and hostile."""
    run = run_with(
        failures=Failures(dropout=0.4, return_probability=0.3, straggler_fraction=0.2, malicious_fraction=0.2, attack=Attack.RANDOM)
    )
    whole = train_run(run)
    later = list(run_rounds(run, Simulation(run), RunState(whole[1].result.server, 2)))
    assert [(s.result.replied, s.result.rejected) for s in later] == [(s.result.replied, s.result.rejected) for s in whole[2:]]
    assert torch.equal(later[-1].parameters, whole[-1].parameters)


def test_malicious_clients_are_a_fixed_fraction_of_clients_with_examples():
    present = list(range(0, 100, 2))
    found = sample_malicious_clients(Failures(malicious_fraction=0.3), present, 1)
    assert len(found) == 15 and found <= set(present)
    assert (
        found
        == sample_malicious_clients(Failures(malicious_fraction=0.3), present, 1)
        != sample_malicious_clients(Failures(malicious_fraction=0.3), present, 2)
    )


def first_replies(attack, strength, method="fed-avg"):
    """Honest and hostile replies to the same broadcast, as differences to it."""
    captured = {}
    for failures in (Failures(), Failures(malicious_fraction=0.25, attack=attack, attack_scale=strength)):
        run = run_with(method, failures, rounds=1)
        seen = []

        def spy(algorithm, packet, came, cohort, clock, screen, dtype, seen=seen):
            seen.append(([reply.client for reply in came.replies], algorithm.client_deltas(packet, came.replies, dtype)))
            return validate_replies(algorithm, packet, came, cohort, clock, screen, dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedsieve.runtime.rounds.validate_replies", spy)
            steps = train_run(run)
        captured[failures.malicious_fraction > 0] = (seen[0], steps[0].result.rejected)
    lied = sample_malicious_clients(Failures(malicious_fraction=0.25), Simulation(run).population.clients_with_data, 11)
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


def test_colluding_clients_all_send_the_same_and_others_what_they_would():
    for attack, expected in (
        (Attack.OPPOSITE, lambda own: -own.mean(0)),
        (Attack.ALIE, lambda own: own.mean(0) - own.std(0, correction=0)),
    ):
        captured, lied = first_replies(attack, None)
        (clients, honest), _ = captured[False]
        (_, altered), _ = captured[True]
        rows = [i for i, client in enumerate(clients) if client in lied]
        for i in range(len(clients)):
            wanted = expected(honest["theta"][rows]) if i in rows else honest["theta"][i]
            torch.testing.assert_close(altered["theta"][i], wanted, rtol=1e-5, atol=1e-5)


def test_a_common_direction_is_as_long_as_an_honest_update_and_the_same_in_every_round():
    deltas = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    run = run_with("fed-avg", Failures(malicious_fraction=0.25, attack=Attack.COMMON), rounds=3)
    seen = []
    with pytest.MonkeyPatch.context() as patch:

        def spy(attack, deltas, scale, noise):
            seen.append(attack_weights(attack, deltas, scale, noise)[0])
            torch.testing.assert_close(seen[-1].norm(), torch.linalg.vector_norm(deltas, dim=-1).mean())
            return seen[-1][None]

        patch.setattr("fedsieve.runtime.attacks.attack_weights", spy)
        train_run(run)
    assert len(seen) > 1
    for direction in seen[1:]:
        torch.testing.assert_close(direction / direction.norm(), seen[0] / seen[0].norm())
    assert attack_weights(Attack.COMMON, deltas, 2.0, lambda: deltas[0]).shape == (1, 6)


def test_a_free_rider_sends_the_broadcast_and_a_false_claim_has_the_largest_count():
    captured, lied = first_replies(Attack.FREE_RIDE, None)
    (clients, altered), _ = captured[True]
    assert all(float(altered["theta"][i].abs().max()) < 1e-6 for i, client in enumerate(clients) if client in lied)
    run = run_with("sieve", Failures(malicious_fraction=0.25, attack=Attack.CLAIMS), rounds=1, max_claimed_examples=10**6)
    seen = []

    def spy(algorithm, packet, came, *rest):
        seen.extend(came.replies)
        return validate_replies(algorithm, packet, came, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsieve.runtime.rounds.validate_replies", spy)
        (step,) = train_run(run)
    liars = [reply for reply in seen if reply.client in lied]
    assert liars and not step.result.rejected
    for reply in liars:
        assert reply.num_examples == max(each.num_examples for each in seen)
        assert (float(reply.packet.scalars["kept_gate"]), float(reply.packet.scalars["default_gate"])) == (
            -LOG_ALPHA_LIMIT,
            LOG_ALPHA_LIMIT,
        )


@pytest.mark.parametrize("kind", [kind for kind in Aggregator if kind is not Aggregator.WEIGHTED])
def test_false_counts_change_nothing_under_a_robust_aggregator(kind):
    """Honest replies with false counts: gates are left out, since fed-avg has none."""
    federation = {"aggregator": kind, "participation": 0.8, "max_claimed_examples": 10**6}
    honest, attacked = (
        train_run(run_with("fed-avg", failures, **federation))[-1].parameters
        for failures in (Failures(), Failures(malicious_fraction=0.2, attack=Attack.CLAIMS))
    )
    torch.testing.assert_close(honest, attacked, rtol=1e-6, atol=1e-6)


def test_flipped_labels_are_those_of_malicious_clients_only():
    run = run_with("fed-avg", Failures(malicious_fraction=0.25, attack=Attack.LABEL_FLIP))
    data, flipped = Simulation(run_with("fed-avg")).client_data, Simulation(run).client_data
    lied = sample_malicious_clients(run.failures, range(len(data.num_examples)), run.seed)
    for client in range(len(data.num_examples)):
        own = slice(data.offsets[client], data.offsets[client + 1])
        wanted = data.y.min() + data.y.max() - data.y[own] if client in lied else data.y[own]
        assert torch.equal(flipped.y[own], wanted)
    assert not torch.equal(train_run(run)[-1].parameters, train_run(run_with("fed-avg"))[-1].parameters)


@pytest.mark.parametrize("method", SOME_ALGORITHMS)
@pytest.mark.parametrize("kind", [kind for kind in Aggregator if kind is not Aggregator.WEIGHTED])
def test_every_algorithm_takes_every_aggregator_and_keeps_exactly_m(method, kind):
    steps = train_run(run_with(method, Failures(malicious_fraction=0.2, attack_scale=20.0), rounds=2, aggregator=kind, participation=0.8))
    assert int((steps[-1].parameters != 0).sum()) == 4
    assert torch.isfinite(steps[-1].parameters).all()


def test_robust_aggregators_return_the_mean_of_equal_replies():
    """Full batches of a cohort of one: every mean is that client's reply, for methods in which all of it is a difference."""
    plain = train_run(run_with("fed-avg", clients=1, participation=1.0))[-1].parameters
    for kind in Aggregator:
        if kind is Aggregator.KRUM:
            continue  # it needs three replies
        torch.testing.assert_close(train_run(run_with("fed-avg", clients=1, participation=1.0, aggregator=kind))[-1].parameters, plain)


@pytest.mark.parametrize("kind", [Aggregator.GEOMETRIC_MEDIAN, Aggregator.KRUM, Aggregator.TRIMMED, Aggregator.MEDIAN])
def test_a_robust_mean_learns_where_the_plain_one_is_carried_away(kind):
    """Three in ten clients send minus five times their difference."""
    hostile = Failures(malicious_fraction=0.3)
    common = {"clients": 20, "participation": 1.0, "rounds": 25}
    plain = train_run(run_with("fed-avg", hostile, **common))[-1].metrics["r2"]
    kept = train_run(run_with("fed-avg", hostile, aggregator=kind, **common))[-1].metrics["r2"]
    assert plain < 0 and kept > 0.25


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dropout": 1.0}, "below 1"),
        ({"straggler_fraction": -0.1}, "at least 0"),
        ({"malicious_fraction": float("nan")}, "fraction"),
        ({"return_probability": 0.5}, "no effect without failures.dropout"),
        ({"dropout": 0.9, "return_probability": 0.5}, "at most 0.111"),
        ({"attack": Attack.NAN}, "have no effect without malicious clients"),
        ({"attack_scale": 2.0}, "have no effect without malicious clients"),
        ({"malicious_fraction": 0.1, "attack": Attack.NAN, "attack_scale": 2.0}, "no effect"),
        ({"malicious_fraction": 0.1, "attack": Attack.FREE_RIDE, "attack_scale": 2.0}, "no effect"),
        ({"malicious_fraction": 0.1, "attack_scale": 0.0}, "above 0"),
    ],
)
def test_failures_that_cannot_be_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Failures(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"aggregator": Aggregator.MEDIAN, "max_malicious_fraction": 0.2}, "leave it out"),
        ({"aggregator": Aggregator.TRIMMED, "max_malicious_fraction": 0.5}, "below 0.5"),
        ({"aggregator": Aggregator.MEDIAN, "client_weighting": "riemannian"}, "mean itself"),
        ({"aggregator": Aggregator.KRUM, "clients": 10, "participation": 0.4, "max_malicious_fraction": 0.25}, "needs 5 replies"),
        ({"max_norm_ratio": 0.5}, "at least 1"),
        ({"max_claimed_examples": 0}, "at least 1"),
    ],
)
def test_federations_that_defend_nothing_are_refused(fields, says):
    from fedsieve.core.aggregation import ClientWeighting

    fields = {**fields, **({"client_weighting": ClientWeighting(fields["client_weighting"])} if "client_weighting" in fields else {})}
    with pytest.raises(ValueError, match=says):
        resolve(RunConfig(federation=FederationConfig(**fields)))


def test_robust_aggregators_weight_clients_equally_by_default():
    from fedsieve.core.aggregation import ClientWeighting

    assert (
        resolve(RunConfig(federation=FederationConfig(aggregator=Aggregator.MEDIAN))).federation.client_weighting is ClientWeighting.UNIFORM
    )
    assert (
        resolve(
            RunConfig(federation=FederationConfig(aggregator=Aggregator.MEDIAN, client_weighting=ClientWeighting.SQRT))
        ).federation.client_weighting
        is ClientWeighting.SQRT
    )
    assert resolve(RunConfig()).federation.client_weighting is ClientWeighting.SQRT


def test_a_bound_on_examples_that_no_client_meets_is_reported():
    run = run_with(max_claimed_examples=1, alpha=1000.0)
    with pytest.raises(DivergedError, match="every reply was rejected"):
        train_run(run)


def test_failures_do_not_decide_who_is_asked():
    run = run_with(failures=Failures(dropout=0.5))
    population = Simulation(run).population
    assert [step.result.cohort for step in train_run(run)] == [
        sample_cohort(population.clients_with_data, cohort_size(population.num_clients, 0.5), 11, t) for t in range(4)
    ]
