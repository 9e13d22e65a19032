"""A superlink and three nodes as processes on loopback, over TLS with node authentication."""

import pytest

from helpers.flower import (
    CLIENTS,
    assert_faults_named,
    assert_parity,
    faults_by_round,
    node_key,
    run_once_across_workers,
    run_to_completion,
    secure_cluster,
    server_settings,
)

ROUNDS = {"flops-pa": 2}
"""Rounds per algorithm; few, because every message starts a process that imports flwr and torch. Others are in test_crashes.py."""
FAULTY, FAULTS = "flops-pa", faults_by_round(["raises", "not a number"], first=2)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A run with bad replies in its last round, and two nodes that must be rejected."""
    return run_once_across_workers(tmp_path_factory, "deployed", deploy)


def deploy(folder):
    with secure_cluster(folder) as cluster:
        for client in range(CLIENTS):
            cluster.start_node(client, CLIENTS, cluster.keys[client])
        private, _ = node_key(folder, "unregistered")
        cluster.start_node(0, CLIENTS, (*cluster.keys[0][:2], "--auth-supernode-private-key", str(private)), name="unregistered")
        cluster.start_node(0, CLIENTS, ("--insecure",), name="plaintext")
        run_to_completion(cluster, server_settings(folder, ROUNDS, {FAULTY: FAULTS}))


@pytest.mark.parametrize("algorithm", ROUNDS)
def test_a_deployment_has_packets_and_model_of_the_batched_engine(deployed, tmp_path, algorithm):
    assert_parity(deployed / algorithm, algorithm, ROUNDS[algorithm], tmp_path)


def test_a_deployment_continues_without_faulty_clients(deployed, tmp_path):
    assert_faults_named(assert_parity(deployed / FAULTY, FAULTY, ROUNDS[FAULTY], tmp_path), FAULTS)


@pytest.mark.parametrize(("name", "message"), [("unregistered", "Failed to activate"), ("plaintext", "Connection attempt failed")])
def test_a_node_without_registered_key_or_tls_is_rejected(deployed, name, message):
    log = (deployed / "logs" / f"{name}.log").read_text()
    assert message in log and "SuperNode ID" not in log
    assert (deployed / "logs" / "superlink.log").read_text().count("Activated node_id") == CLIENTS
