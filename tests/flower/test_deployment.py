"""Real processes on loopback: a superlink and three nodes, over TLS with node authentication."""

import json

import pytest

from federations import (
    APP,
    CLIENTS,
    COMPLETED,
    METHODS,
    NAME,
    PATIENT,
    assert_faults_named,
    assert_parity,
    finished,
    node_key,
    once,
    secured,
)
from fedsieve.federation import answer


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """The three methods over TLS with node authentication, then a round with bad replies; beside them nodes that must be refused."""
    return once(tmp_path_factory, "deployed", deploy)


def deploy(folder):
    faults = {"1": {"1": "raises", "2": "not a number"}}
    with secured(folder) as made:
        for client in range(CLIENTS):
            made.node(client, CLIENTS, made.keys[client])
        private, _ = node_key(folder, "stranger")
        made.node(0, CLIENTS, (*made.keys[0][:2], "--auth-supernode-private-key", str(private)), name="unregistered")
        made.node(0, CLIENTS, made.keys[0][:2], name="without a key")
        made.node(0, CLIENTS, ("--insecure",), name="plaintext")
        run = made.submit(APP, {"run-dir": str(folder), **PATIENT})
        assert finished(made, run)[0] == COMPLETED, made.last_words(f"server-{run}")
        nodes = answer(made.flwr("supernode", "list", NAME, "--format", "json"))
        settings = {"run-dir": str(folder / "faulty"), "rounds": len(faults), "test.methods": "flops-pa", "test.faults": json.dumps(faults)}
        run = made.submit(APP, settings)
        assert finished(made, run)[0] == COMPLETED, made.last_words(f"server-{run}")
    return [faults, nodes]


@pytest.mark.parametrize("method", METHODS)
def test_a_deployment_passes_the_packets_of_the_batched_engine_and_ends_with_its_bits(deployed, tmp_path, method):
    assert_parity(deployed[0] / method, method, tmp_path)


def test_a_deployment_goes_on_without_clients_that_raise_or_send_no_numbers(deployed, tmp_path):
    folder, faults, _ = deployed
    assert_faults_named(folder / "faulty", faults, tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("unregistered", "Failed to activate"), ("without a key", "must be registered"), ("plaintext", "Connection attempt failed")],
)
def test_a_node_without_its_registered_key_or_without_tls_is_refused(deployed, name, said):
    folder, _, nodes = deployed
    log = (folder / "logs" / f"{name}.log").read_text()
    assert said in log and "SuperNode ID" not in log
    assert [node["status"] for node in nodes["nodes"]] == ["online"] * CLIENTS
