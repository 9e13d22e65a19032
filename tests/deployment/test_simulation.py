"""Flower's simulation of three nodes in Ray: same packets and bits as the batched engine."""

import pytest

from helpers.flower import (
    CLIENTS,
    REASONS,
    assert_faults_named,
    assert_parity,
    faults_by_round,
    local_cluster,
    run_once_across_workers,
    run_to_completion,
    server_settings,
)

FAULTY, FAULTS = "fed-ht", faults_by_round(list(REASONS))
ROUNDS = {"flops-pa": 2, "sieve": 2, FAULTY: len(FAULTS)}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """One run: two algorithms with honest clients, then one with every fault a client can commit."""
    return run_once_across_workers(tmp_path_factory, "simulated", simulate)


def simulate(folder):
    with local_cluster(folder / "logs") as cluster:
        cluster.start_superlink(("--insecure", "--simulation"))
        run_to_completion(cluster, server_settings(folder, ROUNDS, {FAULTY: FAULTS}), CLIENTS)


@pytest.mark.parametrize("algorithm", ROUNDS)
def test_a_simulation_has_packets_and_model_of_the_batched_engine(simulated, tmp_path, algorithm):
    rows = assert_parity(simulated / algorithm, algorithm, ROUNDS[algorithm], tmp_path)
    assert algorithm == FAULTY or all(row["replied"] == [0, 1, 2] for row in rows)


def test_every_bad_reply_is_reported_and_not_aggregated(simulated, tmp_path):
    assert_faults_named(assert_parity(simulated / FAULTY, FAULTY, len(FAULTS), tmp_path), FAULTS)
