"""Ranks of a cluster compute the bits of a simulation, over real connections; here each rank is a thread."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fedsieve.data.partition import Partition
from fedsieve.experiments.cluster_rules import require_cluster
from fedsieve.experiments.config import ByteCounting, Engine, FederationConfig, Precision
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.topology_config import TopologyConfig
from fedsieve.experiments.training import compare_with_ranks, follow_run, run_rounds
from fedsieve.runtime.attacks import Attack
from fedsieve.runtime.evaluation import RunState
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.ranks import ClusterError, Ranks, _detect_loss
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
LONG = pytest.mark.long
NODES = FederationConfig(clients=7, partition=Partition.IID)


def connect(store, number, count, seconds):
    return Ranks(dist.ProcessGroupGloo(store, number, count, timedelta(seconds=30)), seconds)


def run_ranks(count, first, other, seconds=60.0):
    """Return what `first` returns at rank 0, while the other ranks call `other`; each gets its connections."""
    store, errors = dist.HashStore(), []

    def serve(number):
        ranks = connect(store, number, count, seconds)
        try:
            other(ranks)
        except Exception as error:
            errors.append(error)
            ranks.report(error)

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(1, count)]
    for thread in threads:
        thread.start()
    ranks = connect(store, 0, count, seconds)
    try:
        return first(ranks)
    finally:
        ranks.end()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def train_on_ranks(run, count, state=None, other=None):
    """Return all rounds of a run on a cluster."""

    def first(ranks):
        simulation = Simulation(run, ranks)
        compare_with_ranks(run, simulation)
        return list(run_rounds(run, simulation, state, bytes(32)))

    return run_ranks(count, first, other or (lambda ranks: follow_run(run, ranks)))


def assert_same(rounds, expected):
    """All bits and bytes are equal, round by round."""
    assert len(rounds) == len(expected)
    for ours, theirs in zip(rounds, expected, strict=True):
        assert torch.equal(ours.parameters, theirs.parameters)
        assert {**ours.metrics, "seconds": 0} == {**theirs.metrics, "seconds": 0}


def star_run(algorithm, **settings):
    return small_run(algorithm, **({"precision": Precision.DOUBLE, "rounds": 3} | settings))


@pytest.mark.parametrize("algorithm", ["flops", "stc", pytest.param("sieve", marks=LONG), pytest.param("fed-ef", marks=LONG)])
def test_a_star_over_ranks_gives_the_bits_and_bytes_of_the_simulation(algorithm):
    """Gradients, quantized weights, clients with memory that catch up or receive the broadcast."""
    run = star_run(algorithm)
    assert_same(train_on_ranks(run, 3), train_run(run))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"failures": Failures(dropout=0.5, malicious_fraction=0.3, attack=Attack.RANDOM)}, id="failures"),
        pytest.param({"failures": Failures(malicious_fraction=0.5, attack=Attack.LABEL_FLIP)}, id="wrong labels"),
        pytest.param({"topology": TopologyConfig(name="tree")}, id="tree", marks=LONG),
        pytest.param({"refit": True}, id="refit", marks=LONG),
        pytest.param({"federation": FederationConfig(clients=12, participation=0.5, server_examples=60)}, id="server examples", marks=LONG),
        pytest.param({"task": "mc"}, id="classes", marks=LONG),
    ],
)
def test_what_surrounds_an_exchange_works_over_ranks(settings):
    run = star_run("flops-pa", **settings)
    assert_same(train_on_ranks(run, 2), train_run(run))


def gossip_run(algorithm, failures=None, **topology):
    settings = {"federation": NODES, "topology": TopologyConfig(**topology), "failures": failures or Failures()}
    return small_run(algorithm, precision=Precision.DOUBLE, **settings)


@pytest.mark.parametrize(
    ("algorithm", "topology", "dropout"),
    [
        ("sieve", {"name": "exponential", "one_peer": True}, 0.3),
        pytest.param("flops-pa", {"name": "ring"}, 0.0, marks=LONG),
        ("fed-ef", {"name": "erdos-renyi"}, 0.0),
        pytest.param("fed-avg", {"name": "complete"}, 0.0, marks=LONG),
    ],
)
def test_nodes_on_ranks_have_the_bits_and_bytes_of_the_simulation(algorithm, topology, dropout):
    run = gossip_run(algorithm, Failures(dropout=dropout), **topology)
    assert_same(train_on_ranks(run, 3), train_run(run))


@pytest.mark.parametrize("run", [star_run("stc"), gossip_run("fed-ef", name="ring")], ids=["star", "gossip"])
def test_a_run_goes_on_with_another_number_of_ranks(run):
    whole = train_run(run)
    before = whole[0].result
    rest = train_on_ranks(run, 2, RunState(before.server, 1, 0.0, before.memories))
    assert_same(rest, whole[1:])


def test_the_error_of_a_rank_ends_the_run_with_its_text():
    def fail(ranks):
        if ranks.number == 2:
            raise ValueError("the file is missing")
        follow_run(star_run("sieve"), ranks)

    with pytest.raises(ClusterError, match="rank 2: the file is missing"):
        train_on_ranks(star_run("sieve"), 3, other=fail)


def test_a_rank_that_does_not_answer_ends_the_run_in_time():
    stop = threading.Event()

    def wait(ranks):
        try:
            return ranks.receive(1)
        finally:
            stop.set()

    with pytest.raises(ClusterError, match=r"rank 1 did not answer for 0\.5 seconds"):
        run_ranks(2, wait, lambda _: stop.wait(60) and None, seconds=0.5)


@pytest.mark.parametrize(
    ("error", "text"), [("Connection closed by peer", "rank 1 has ended"), ("Timed out waiting", "rank 1 did not answer for 9 seconds")]
)
def test_an_error_of_a_connection_names_the_rank(error, text):
    with pytest.raises(ClusterError, match=text), _detect_loss(1, 9):
        raise RuntimeError(error)


def test_a_rank_with_other_settings_is_refused():
    with pytest.raises(ClusterError, match="rank 1 has other settings than rank 0"):
        train_on_ranks(star_run("sieve"), 2, other=lambda ranks: follow_run(star_run("sieve", density=0.2), ranks))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"federation": FederationConfig(clients=12, participation=0.25)}, "4 ranks are more than the clients in a round, and there are 3"),
        (
            {"federation": FederationConfig(clients=3, partition=Partition.IID), "topology": TopologyConfig(name="ring")},
            "the nodes, and there are 3",
        ),
        ({"engine": Engine.LOOP}, "--engine loop has no effect on a cluster"),
        ({"workers": 2}, "--workers 2 has no effect on a cluster"),
        ({"byte_counting": ByteCounting.SAMPLED}, "--byte-counting sampled has no effect on a cluster"),
        ({"centralized": True}, "--centralized has no effect on a cluster"),
    ],
)
def test_settings_that_make_no_sense_on_a_cluster_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        require_cluster(small_run("sieve", **settings), 4)
