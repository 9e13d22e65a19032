"""Server, superlink and nodes are killed with SIGKILL. One superlink, TLS and node authentication."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from fedsieve.deployment.flower_messages import FLOWER_ERRORS
from fedsieve.deployment.local_cluster import parse_json
from helpers.flower import (
    APP,
    CLIENTS,
    COMPLETED,
    CONNECTION,
    REASONS,
    assert_faults_named,
    assert_parity,
    build_deployment,
    faults_by_round,
    read_server_output,
    run_batched,
    run_to_completion,
    secure_cluster,
    server_settings,
    wait_for_run,
)

pytestmark = pytest.mark.long
ROUNDS = 4


@pytest.fixture(scope="module")
def cluster_and_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    with secure_cluster(folder) as cluster:
        for client in range(CLIENTS):
            cluster.start_node(client, CLIENTS, cluster.keys[client])
        yield cluster, folder


def submit_run(cluster, folder, faults=None, **settings):
    """Start a run of FLoPS-PA that continues without the clients that do not reply."""
    algorithms = {"flops-pa": {"rounds": ROUNDS, **settings}}
    return cluster.submit(
        APP, {"run-dir": str(folder), "test.algorithms": json.dumps(algorithms), "test.faults": json.dumps({"flops-pa": faults or {}})}
    )


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def rounds_done(folder):
    path = folder / "flops-pa" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def find_processes(cluster, word):
    """Process ids of the cluster whose command contains a word."""
    return [pid for pid in cluster.leftover_processes() if word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")]


def num_online_nodes(cluster):
    nodes = parse_json(cluster.run_flwr("supernode", "list", CONNECTION, "--format", "json"))["nodes"]
    return sum(node["status"] == "online" for node in nodes)


def restart_node(cluster, client):
    """Start a node until it stays: the superlink rejects a registered key until it notices that the previous node is gone."""

    def start_and_check():
        log, process = cluster.logs / f"node-{client}.log", cluster.start_node(client, CLIENTS, cluster.keys[client])
        known = log.read_text(errors="replace").count("SuperNode ID")
        wait_until(lambda: process.poll() is not None or log.read_text(errors="replace").count("SuperNode ID") > known)
        return process.poll() is None

    wait_until(start_and_check)


def assert_undisturbed(folder, tmp_path):
    """The run has the model of the batched engine with all replies, and one row of metrics per round."""
    model, _, rows, _ = read_server_output(folder / "flops-pa")
    assert model == run_batched(build_deployment("flops-pa", ROUNDS), tmp_path / "packets.json")[0]
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    assert all(row["replied"] == [0, 1, 2] for row in rows)


def test_a_run_whose_server_was_killed_resumes_to_the_same_bits(cluster_and_folder, tmp_path):
    cluster, folder = cluster_and_folder
    run_dir = folder / "server"
    run = submit_run(cluster, run_dir)
    wait_until(lambda: rounds_done(run_dir) >= 2)
    for pid in find_processes(cluster, "flwr-serverapp"):
        os.kill(pid, signal.SIGKILL)
    assert wait_for_run(cluster, run)[0] == "finished:failed"
    assert rounds_done(run_dir) < ROUNDS
    run = submit_run(cluster, run_dir)
    assert wait_for_run(cluster, run)[0] == COMPLETED, cluster.log_tail(f"server-{run}")
    assert "rounds are done; resuming" in (cluster.logs / f"server-{run}.log").read_text()
    assert_undisturbed(run_dir, tmp_path)


def test_a_run_whose_superlink_was_killed_resumes_to_the_same_bits(cluster_and_folder, tmp_path):
    cluster, folder = cluster_and_folder
    run_dir = folder / "superlink"
    submit_run(cluster, run_dir)
    wait_until(lambda: rounds_done(run_dir) >= 1)
    cluster.kill("superlink")
    wait_until(lambda: not find_processes(cluster, "flwr-serverapp"), 60)
    assert rounds_done(run_dir) < ROUNDS
    cluster.start_superlink((*cluster.tls, "--enable-supernode-auth", "--database", str(folder / "superlink.db")))
    wait_until(lambda: num_online_nodes(cluster) == CLIENTS)
    run = submit_run(cluster, run_dir)
    assert wait_for_run(cluster, run)[0] == COMPLETED, cluster.log_tail(f"server-{run}")
    assert_undisturbed(run_dir, tmp_path)


def test_a_run_continues_without_a_killed_node_until_it_returns(cluster_and_folder):
    cluster, folder = cluster_and_folder
    run_dir = folder / "node"
    slow = {"2": {"1": "slow"}, "3": {"0": "slow"}}  # time to kill it, and time for it to return
    run = submit_run(cluster, run_dir, slow, **{"round-seconds": 120.0, "grace-seconds": 120.0})
    log = cluster.logs / "node-1.log"
    before = log.read_text(errors="replace").count("ROUND 2]")
    wait_until(lambda: rounds_done(run_dir) == 1)
    wait_until(lambda: log.read_text(errors="replace").count("ROUND 2]") > before)
    cluster.kill("node-1")
    restart_node(cluster, 1)
    assert wait_for_run(cluster, run)[0] == COMPLETED, cluster.log_tail(f"server-{run}")
    _, _, rows, result = read_server_output(run_dir / "flops-pa")
    assert [rows[i]["replied"] for i in (0, 1, 3)] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    ((client, reason),) = rows[1]["rejected"]
    assert client == 1 and reason in FLOWER_ERRORS.values()  # Flower may notice its return before its absence
    assert result["rejected_by_client"].keys() == {"1"}


def test_every_bad_reply_of_a_node_is_reported_and_not_aggregated(cluster_and_folder, tmp_path):
    cluster, folder = cluster_and_folder
    faults = faults_by_round(list(REASONS))
    run_to_completion(cluster, server_settings(folder / "faulty", {"flops-pa": len(faults)}, {"flops-pa": faults}))
    assert_faults_named(assert_parity(folder / "faulty" / "flops-pa", "flops-pa", len(faults), tmp_path), faults)


def test_other_algorithms_have_packets_and_model_of_the_batched_engine(cluster_and_folder, tmp_path):
    cluster, folder = cluster_and_folder
    rounds_by_algorithm = dict.fromkeys(("sieve", "fed-iter-ht", "fed-avg"), 2)
    run_to_completion(cluster, server_settings(folder / "algorithms", rounds_by_algorithm, {}))
    for algorithm, rounds in rounds_by_algorithm.items():
        rows = assert_parity(folder / "algorithms" / algorithm, algorithm, rounds, tmp_path)
        assert all(row["replied"] == [0, 1, 2] for row in rows)


def test_a_node_without_a_key_is_rejected(cluster_and_folder):
    cluster, folder = cluster_and_folder
    node = cluster.start_node(0, CLIENTS, cluster.keys[0][:2], name="without a key")
    wait_until(lambda: node.poll() is not None, 60)
    assert "must be registered" in (folder / "logs" / "without a key.log").read_text()


def test_a_round_below_the_quorum_fails_the_run_with_the_reasons(cluster_and_folder):
    cluster, folder = cluster_and_folder
    faults = {"1": {"0": "raises", "1": "raises"}}
    run = submit_run(cluster, folder / "quorum", faults, quorum=0.9)
    assert wait_for_run(cluster, run)[0] == "finished:failed"
    log = (cluster.logs / f"server-{run}.log").read_text()
    assert "1 of 3 clients sent a valid reply in 2 tries, 3 are needed" in log and "the disk is on fire" in log
    assert rounds_done(folder / "quorum") == 0
