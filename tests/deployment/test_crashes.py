"""Real processes killed without warning: the server, the superlink, a node. Over TLS with node authentication, on one superlink."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from fedsieve.deployment.flower import FLOWER_ERRORS
from fedsieve.deployment.local_cluster import parse_json
from helpers.flower import (
    APP,
    CLIENTS,
    COMPLETED,
    CONNECTION,
    REASONS,
    assert_faults_named,
    assert_parity,
    batched,
    complete,
    faults_by_round,
    finished,
    led,
    left,
    plan_of,
    secured,
)

pytestmark = pytest.mark.long
ROUNDS = 4


@pytest.fixture(scope="module")
def federated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    with secured(folder) as made:
        for client in range(CLIENTS):
            made.start_node(client, CLIENTS, made.keys[client])
        yield made, folder


def submitted(made, folder, faults=None, **settings):
    """A run of one method that goes on with those who reply."""
    plans = {"flops-pa": {"rounds": ROUNDS, **settings}}
    return made.submit(
        APP, {"run-dir": str(folder), "test.plans": json.dumps(plans), "test.faults": json.dumps({"flops-pa": faults or {}})}
    )


def until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def rounds_done(folder):
    path = folder / "flops-pa" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def commands(made, word):
    """Processes of the federation whose command holds a word."""
    return [pid for pid in made.leftover_processes() if word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")]


def online(made):
    nodes = parse_json(made.run_flwr("supernode", "list", CONNECTION, "--format", "json"))["nodes"]
    return sum(node["status"] == "online" for node in nodes)


def supervised(made, client):
    """Start a node until it stays: the superlink refuses a registered key until the last node that had it is known to be gone."""

    def stays():
        log, process = made.logs / f"node-{client}.log", made.start_node(client, CLIENTS, made.keys[client])
        known = log.read_text(errors="replace").count("SuperNode ID")
        until(lambda: process.poll() is not None or log.read_text(errors="replace").count("SuperNode ID") > known)
        return process.poll() is None

    until(stays)


def assert_whole(folder, tmp_path):
    """As if nothing had happened: the model of the batched engine with all replies, one line a round."""
    model, _, rows, _ = left(folder / "flops-pa")
    assert model == batched(plan_of("flops-pa", ROUNDS), tmp_path / "packets.json")[0]
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    assert all(row["replied"] == [0, 1, 2] for row in rows)


def test_a_run_whose_server_was_killed_goes_on_to_the_same_bits(federated, tmp_path):
    made, folder = federated
    place = folder / "server"
    run = submitted(made, place)
    until(lambda: rounds_done(place) >= 2)
    for pid in commands(made, "flwr-serverapp"):
        os.kill(pid, signal.SIGKILL)
    assert finished(made, run)[0] == "finished:failed"
    assert rounds_done(place) < ROUNDS
    run = submitted(made, place)
    assert finished(made, run)[0] == COMPLETED, made.log_tail(f"server-{run}")
    assert "rounds are done, going on" in (made.logs / f"server-{run}.log").read_text()
    assert_whole(place, tmp_path)


def test_a_run_whose_superlink_was_killed_goes_on_to_the_same_bits(federated, tmp_path):
    made, folder = federated
    place = folder / "superlink"
    submitted(made, place)
    until(lambda: rounds_done(place) >= 1)
    made.kill("superlink")
    until(lambda: not commands(made, "flwr-serverapp"), 60)
    assert rounds_done(place) < ROUNDS
    made.start_superlink((*made.tls, "--enable-supernode-auth", "--database", str(folder / "superlink.db")))
    until(lambda: online(made) == CLIENTS)
    run = submitted(made, place)
    assert finished(made, run)[0] == COMPLETED, made.log_tail(f"server-{run}")
    assert_whole(place, tmp_path)


def test_a_run_goes_on_without_a_killed_node_names_it_and_takes_it_back(federated):
    made, folder = federated
    place = folder / "node"
    slow = {"2": {"1": "slow"}, "3": {"0": "slow"}}  # time to kill it, and time for it to come back
    run = submitted(made, place, slow, **{"round-seconds": 120.0})
    log = made.logs / "node-1.log"
    before = log.read_text(errors="replace").count("ROUND 2]")
    until(lambda: rounds_done(place) == 1)
    until(lambda: log.read_text(errors="replace").count("ROUND 2]") > before)
    made.kill("node-1")
    supervised(made, 1)
    assert finished(made, run)[0] == COMPLETED, made.log_tail(f"server-{run}")
    _, _, rows, result = left(place / "flops-pa")
    assert [rows[i]["replied"] for i in (0, 1, 3)] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    ((client, reason),) = rows[1]["rejected"]
    assert client == 1 and reason in FLOWER_ERRORS.values()  # it went away; where it is back before that is seen, it did not answer
    assert result["rejected"].keys() == {"1"}


def test_every_bad_reply_of_a_real_node_is_named_and_none_is_averaged(federated, tmp_path):
    made, folder = federated
    faults = faults_by_round(list(REASONS))
    complete(made, led(folder / "faulty", {"flops-pa": len(faults)}, {"flops-pa": faults}))
    assert_faults_named(assert_parity(folder / "faulty" / "flops-pa", "flops-pa", len(faults), tmp_path), faults)


def test_the_default_method_and_the_averages_pass_the_packets_of_the_batched_engine(federated, tmp_path):
    made, folder = federated
    methods = dict.fromkeys(("sieve", "fed-iter-ht", "fed-avg"), 2)
    complete(made, led(folder / "methods", methods, {}))
    for method, rounds in methods.items():
        rows = assert_parity(folder / "methods" / method, method, rounds, tmp_path)
        assert all(row["replied"] == [0, 1, 2] for row in rows)


def test_a_node_with_no_key_at_all_is_refused(federated):
    made, folder = federated
    node = made.start_node(0, CLIENTS, (*made.keys[0][:2], "--isolation", "process"), name="without a key")
    until(lambda: node.poll() is not None, 60)
    assert "must be registered" in (folder / "logs" / "without a key.log").read_text()


def test_a_round_that_stays_below_the_quorum_fails_the_run_with_the_reasons(federated):
    made, folder = federated
    faults = {"1": {"0": "raises", "1": "raises"}}
    run = submitted(made, folder / "quorum", faults, quorum=0.9)
    assert finished(made, run)[0] == "finished:failed"
    log = (made.logs / f"server-{run}.log").read_text()
    assert "1 of 3 clients gave a good reply in 2 tries, 3 are needed" in log and "the disk is on fire" in log
    assert rounds_done(folder / "quorum") == 0
