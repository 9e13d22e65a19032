"""A tree of aggregators gives the model of a star, and counts the bytes of every link."""

import pytest
import torch

from fedsieve.experiments.config import FederationConfig, Precision
from fedsieve.experiments.topology_config import TopologyConfig
from fedsieve.runtime.hierarchy import BUNDLE_ENTRY_BYTES
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
ALL_OF_NINE = FederationConfig(clients=9, participation=1.0)


@pytest.mark.parametrize("algorithm", ["sieve", "flops-pa", "fed-ef"])
def test_a_tree_gives_the_same_bits_as_a_star(algorithm):
    settings = {"federation": ALL_OF_NINE, "precision": Precision.DOUBLE, "rounds": 2}
    star, tree = (train_run(small_run(algorithm, topology=TopologyConfig(name=name), **settings)) for name in ("star", "tree"))
    for ours, theirs in zip(tree, star, strict=True):
        assert torch.equal(ours.parameters, theirs.parameters)
        assert ours.metrics["bytes_up"] == theirs.metrics["bytes_up"]


def test_a_link_carries_one_broadcast_and_the_replies_below_it():
    """Nine clients, three aggregators: one broadcast instead of three, the bytes of all replies, and an entry for each."""
    run = small_run("fed-avg", federation=ALL_OF_NINE, topology=TopologyConfig(name="tree"))
    row = train_run(run)[1].metrics
    assert len(row["link_bytes"]) == 3
    replied = len(row["replied"])
    assert row["level_1_bytes"] == 3 * row["bytes_down"] // replied + row["bytes_up"] + BUNDLE_ENTRY_BYTES * replied
    assert sum(row["link_bytes"].values()) == row["level_1_bytes"]


def test_each_level_has_its_own_links():
    run = small_run("sieve", federation=FederationConfig(clients=8, participation=1.0), topology=TopologyConfig(name="tree", levels=2))
    names = train_run(run)[0].metrics["link_bytes"]
    assert {name for name in names if name.startswith("1.")} == {"1.0", "1.1"}
    assert {name for name in names if name.startswith("2.")} == {"2.0", "2.1", "2.2", "2.3"}
