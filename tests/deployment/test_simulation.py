"""Flower's own simulation, three nodes in Ray: the packets and the bits of the batched engine, and every bad reply named."""

import pytest

from helpers.flower import CLIENTS, REASONS, assert_faults_named, assert_parity, complete, faults_by_round, federation, led, once

FAULTY, FAULTS = "fed-ht", faults_by_round(list(REASONS))
METHODS = {"flops-pa": 2, "fed-iter-ht": 2, "fed-avg": 2, "sieve": 2, FAULTY: len(FAULTS)}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """One run of all: four methods undisturbed, then one with every fault a client can commit."""
    return once(tmp_path_factory, "simulated", simulate)


def simulate(folder):
    with federation(folder / "logs") as made:
        made.start_superlink(("--insecure", "--simulation"))
        complete(made, led(folder, METHODS, {FAULTY: FAULTS}), CLIENTS)


@pytest.mark.parametrize("method", METHODS)
def test_a_simulation_passes_the_packets_of_the_batched_engine_and_ends_with_its_bits(simulated, tmp_path, method):
    rows = assert_parity(simulated / method, method, METHODS[method], tmp_path)
    assert method == FAULTY or all(row["replied"] == [0, 1, 2] for row in rows)


def test_every_bad_reply_is_named_and_none_is_averaged(simulated, tmp_path):
    assert_faults_named(assert_parity(simulated / FAULTY, FAULTY, len(FAULTS), tmp_path), FAULTS)
