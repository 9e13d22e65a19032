"""Flower's own simulation, three nodes in Ray: the packets and the bits of the batched engine, and every bad reply named."""

import json

import pytest

from federations import APP, CLIENTS, COMPLETED, METHODS, PATIENT, REASONS, assert_faults_named, assert_parity, federation, finished, once


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """The three methods in Flower's simulation, and every fault a client can commit."""
    return once(tmp_path_factory, "simulated", simulate)


def simulate(folder):
    bad = list(REASONS)
    faults = {str(i + 1): {"1": bad[2 * i], "2": bad[2 * i + 1]} for i in range(len(bad) // 2)}
    with federation(folder / "logs") as made:
        made.superlink(("--insecure", "--simulation"))
        complete(made, {"run-dir": str(folder), **PATIENT})
        settings = {"run-dir": str(folder / "faulty"), "rounds": len(faults), "test.methods": "flops-pa", "test.faults": json.dumps(faults)}
        complete(made, settings)
    return [faults]


def complete(made, settings, tries=3):
    """A run to its end. Ray gives its daemon 30 seconds to start, which a busy machine may not have: then once more."""
    run = made.submit(APP, settings, CLIENTS)
    if finished(made, run)[0] != COMPLETED:
        assert tries > 1 and "timed out during startup" in (made.logs / f"server-{run}.log").read_text(), made.last_words(f"server-{run}")
        complete(made, settings, tries - 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_simulation_passes_the_packets_of_the_batched_engine_and_ends_with_its_bits(simulated, tmp_path, method):
    assert_parity(simulated[0] / method, method, tmp_path)


def test_every_bad_reply_is_named_and_none_is_averaged(simulated, tmp_path):
    folder, faults = simulated
    assert_faults_named(folder / "faulty", faults, tmp_path)
