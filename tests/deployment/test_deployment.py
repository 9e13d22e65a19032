"""Real processes on loopback: a superlink and three nodes, over TLS with node authentication."""

import pytest

from helpers.flower import CLIENTS, assert_faults_named, assert_parity, complete, faults_by_round, led, node_key, once, secured

METHODS = {"flops-pa": 2, "fed-iter-ht": 1, "fed-avg": 1}
"""Rounds are few: every message starts a process that imports flwr and torch."""
FAULTY, FAULTS = "flops-pa", faults_by_round(["raises", "not a number"], first=2)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """One run of the three methods, bad replies in the last round of one; beside its nodes others that must be refused."""
    return once(tmp_path_factory, "deployed", deploy)


def deploy(folder):
    with secured(folder) as made:
        for client in range(CLIENTS):
            made.start_node(client, CLIENTS, made.keys[client])
        private, _ = node_key(folder, "stranger")
        alone = ("--isolation", "process")  # what is refused needs nothing to start clients with
        made.start_node(0, CLIENTS, (*made.keys[0][:2], "--auth-supernode-private-key", str(private), *alone), name="unregistered")
        made.start_node(0, CLIENTS, ("--insecure", *alone), name="plaintext")
        complete(made, led(folder, METHODS, {FAULTY: FAULTS}))


@pytest.mark.parametrize("method", METHODS)
def test_a_deployment_passes_the_packets_of_the_batched_engine_and_ends_with_its_bits(deployed, tmp_path, method):
    assert_parity(deployed / method, method, METHODS[method], tmp_path)


def test_a_deployment_goes_on_without_clients_that_raise_or_send_no_numbers(deployed, tmp_path):
    assert_faults_named(assert_parity(deployed / FAULTY, FAULTY, METHODS[FAULTY], tmp_path), FAULTS)


@pytest.mark.parametrize(("name", "said"), [("unregistered", "Failed to activate"), ("plaintext", "Connection attempt failed")])
def test_a_node_without_its_registered_key_or_without_tls_is_refused(deployed, name, said):
    log = (deployed / "logs" / f"{name}.log").read_text()
    assert said in log and "SuperNode ID" not in log
    assert (deployed / "logs" / "superlink.log").read_text().count("Activated node_id") == CLIENTS
