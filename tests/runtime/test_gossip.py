"""Without a server: mixing keeps the mean, and at the end all nodes have one support with exactly m weights."""

import json

import pytest
import torch

from fedsieve.algorithms.gossip import CONSENSUS_RATE, ChocoNode, node_rules
from fedsieve.cli.main import main
from fedsieve.core.topology import GRAPHS, make_topology
from fedsieve.core.types import Clock
from fedsieve.data.partition import Partition
from fedsieve.experiments.config import FederationConfig, Precision
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.topology_config import TopologyConfig
from fedsieve.experiments.training import run_rounds
from fedsieve.runtime.evaluation import RunState
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.gossip import adopt_leaders, mixing_change
from fedsieve.runtime.node_states import NodeSupports
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
NODES = FederationConfig(clients=6, partition=Partition.IID)


def gossip_run(algorithm="sieve", name="exponential", failures=None, **options):
    topology = TopologyConfig(name=name, **options)
    settings = {"federation": NODES, "topology": topology, "precision": Precision.DOUBLE, "failures": failures or Failures()}
    return small_run(algorithm, **settings)


def final_supports(run):
    measured = train_run(run)[-1]
    states = Simulation(run).make_gossip().node_states(measured.result)
    return [tuple(run.algorithm.parameters(state).nonzero()[:, 0].tolist()) for state in states], measured


@pytest.mark.parametrize(
    ("algorithm", "name", "one_peer"), [("sieve", "ring", True), ("flops-pa", "exponential", True), ("fed-iter-ht", "ring", False)]
)
def test_all_nodes_end_on_one_support_with_exactly_m_weights(algorithm, name, one_peer):
    supports, measured = final_supports(gossip_run(algorithm, name, one_peer=one_peer))
    assert len(set(supports)) == 1 and len(supports[0]) == 4
    assert measured.metrics["support_agreement"] == 1.0
    assert torch.equal(measured.parameters.nonzero()[:, 0], torch.tensor(supports[0])), "the mean model has this support too"


def test_nodes_that_are_absent_at_times_end_on_the_same_support():
    run = gossip_run(failures=Failures(dropout=0.4))
    supports, _ = final_supports(run)
    assert len(set(supports)) == 1 and len(supports[0]) == 4
    assert any(len(step.metrics["replied"]) < 6 for step in train_run(run)), "some nodes were absent"


def test_mixing_keeps_the_mean_and_moves_every_node_towards_it():
    values = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, graph in GRAPHS.items():
        step = make_topology(name, graph(8, None, 0), 8).steps[0]
        mixed = values + mixing_change(step, values, range(8))
        assert torch.allclose(mixed, torch.from_numpy(step.matrix) @ values)
        assert torch.allclose(mixed.mean(0), values.mean(0))


def test_dense_messages_over_a_complete_graph_are_federated_averaging():
    """One step over a complete graph gives every node the mean: the same weights as a star with equal client weights."""
    options = {"bits": 32, "residual_decay": 0.0}
    settings = {"precision": Precision.DOUBLE, "algorithm": options, "rounds": 3}
    gossip = small_run("fed-avg", federation=NODES, topology=TopologyConfig(name="complete"), **settings)
    star = small_run("fed-avg", federation=FederationConfig(clients=6, partition=Partition.IID, participation=1.0), **settings)
    ours, theirs = (train_run(run)[-1].result.server.theta for run in (gossip, star))
    assert torch.allclose(ours, theirs, rtol=1e-5), "messages are rounded to float32"


def test_choco_with_complete_messages_mixes_the_weights_themselves():
    """If a message holds the whole difference, public copies equal the weights: theta + gamma (W - I) theta."""
    run = small_run("fed-ef", algorithm={"uplink_density": 1.0, "bits": 32}, federation=NODES, topology=TopologyConfig(name="ring"))
    rules, draw = node_rules(run.algorithm, "fed-ef"), lambda _, size: torch.full((6, size), 0.5)
    theta = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    before = ChocoNode(theta, torch.zeros_like(theta), run.objective.layout)
    nodes, packet = rules.encode(before, Clock(0, 4), draw)
    seen = rules.decode(packet, rules.copies(before), theta.dtype)
    step = make_topology("ring", GRAPHS["ring"](6, None, 0), 6).steps[0]
    mixed = rules.mix(nodes, {"theta": mixing_change(step, seen["theta"], range(6))}, Clock(0, 4)).theta
    assert torch.allclose(mixed, theta + CONSENSUS_RATE * (torch.from_numpy(step.matrix).float() @ theta - theta), atol=1e-5)
    assert torch.equal(nodes.public, theta)


def test_the_lowest_leader_wins_and_brings_its_support():
    support = torch.eye(4, dtype=torch.bool)
    node_supports, step = NodeSupports(support, torch.arange(4)), make_topology("ring", GRAPHS["ring"](4, None, 0), 4).steps[0]
    once = adopt_leaders(node_supports, support, step, range(4))
    assert once.leader.tolist() == [0, 0, 1, 0]
    assert torch.equal(adopt_leaders(once, once.support, step, range(4)).support, support[[0, 0, 0, 0]])


@pytest.mark.parametrize("algorithm", ["sieve", "fed-ef"])
def test_a_resumed_run_has_the_same_bits(algorithm):
    faults = {} if algorithm == "fed-ef" else {"one_peer": True, "failures": Failures(dropout=0.2)}
    run = gossip_run(algorithm, **faults)
    whole = train_run(run)
    for done in (1, 3):
        before = whole[done - 1].result
        state = RunState(before.server, done, 0.0, before.memories)
        rest = list(run_rounds(run, Simulation(run), state))
        assert torch.equal(rest[-1].parameters, whole[-1].parameters)
        assert rest[-1].metrics["worst_node"] == whole[-1].metrics["worst_node"]


def test_what_nodes_send_is_what_nodes_receive():
    for step in train_run(gossip_run(name="erdos-renyi")):
        row = step.metrics
        assert row["bytes_up"] == row["bytes_down"] > 0
        assert row["node_bytes"] * 6 == row["bytes_up"] + row["bytes_down"]
        assert row["busiest_node_bytes"] >= row["node_bytes"]


def test_one_peer_sends_one_message_per_mixing_step():
    """Against all links of the exponential graph of six nodes: three messages per node and step."""
    one, all_links = (train_run(gossip_run("fed-avg", one_peer=o, mixing_steps=1))[0].metrics["bytes_up"] for o in (True, False))
    assert all_links == 3 * one


BASE = {"--rounds": "3", "--algorithm.local-steps": "2", "--data.num-examples": "120", "--data.num-features": "20"}
BASE |= {"--federation.clients": "4", "--federation.partition": "iid"}
COMMAND = ["train", *(word for pair in BASE.items() for word in pair), "--quiet"]


def test_the_command_writes_what_nodes_reached_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "square.txt").write_text("0 1\n1 2\n2 3\n3 0\n")
    assert main([*COMMAND, "--topology", "square.txt", "--out", "run"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["worst_node"] <= result["mean_node"] and result["support_agreement"] == 1.0
    assert "MEAN OF ALL NODES" in (tmp_path / "run" / "report.html").read_text().upper()
    assert main(["train", "--resume", "run", "--rounds", "4", "--quiet"]) == 0
    (tmp_path / "square.txt").write_text("0 1\n1 2\n2 3\n")
    assert main(["train", "--resume", "run", "--rounds", "5", "--quiet"]) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--topology", "circle"], "there is no file circle"),
        (["--topology", "split.txt"], "not connected"),
        (["--topology", "ring", "--federation.clients", "1"], "at least 2 nodes"),
        (["--topology", "ring", "--federation.partition", "quantity", "--federation.alpha", "0.001"], "has no examples"),
        (["--topology", "ring", "--algorithm", "stc"], "algorithm stc needs a server"),
        (["--topology", "ring", "--federation.participation", "0.5"], "federation.participation has no effect without a server"),
        (["--topology", "ring", "--failures.malicious-fraction", "0.1"], "has no effect without a server"),
        (["--topology", "ring", "--privacy.noise-multiplier", "1"], "has no effect without a server"),
        (["--topology", "ring", "--algorithm", "fed-ef", "--topology.one-peer"], "every neighbour must receive every message"),
        (["--topology.one-peer"], "applies to topologies without a server"),
        (["--topology", "ring", "--topology.degree", "3"], "applies to --topology erdos-renyi"),
        (["--topology", "ring", "--topology.levels", "2"], "applies to --topology tree"),
        (["--topology", "ring", "--centralized"], "--centralized trains on one"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "split.txt").write_text("0 1\n2 3\n")
    rest = [word for name, value in BASE.items() if name not in words for word in (name, value)]
    assert main(["train", *rest, *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert reason in error and "Traceback" not in error
    assert not (tmp_path / "runs").exists()
