"""The topologies study: the same nodes and rounds over a star and over graphs without a server."""

from functools import partial

from fedsieve.data.partition import Partition
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import ByteCounting, FederationConfig
from fedsieve.experiments.topology_config import STAR, TopologyConfig
from fedsieve.runtime.failures import Failures
from fedsieve.studies import paper
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import REFERENCE_ALGORITHM
from fedsieve.studies.scale import Scale

ONE_PEER, CHURN = "exponential, one-peer", "exponential, one-peer, 10 % absent"
TOPOLOGIES: dict[str, tuple[TopologyConfig, Failures]] = {
    STAR: (TopologyConfig(), Failures()),
    "ring": (TopologyConfig(name="ring"), Failures()),
    "erdos-renyi": (TopologyConfig(name="erdos-renyi"), Failures()),
    "exponential": (TopologyConfig(name="exponential"), Failures()),
    "complete": (TopologyConfig(name="complete"), Failures()),
    ONE_PEER: (TopologyConfig(name="exponential", one_peer=True), Failures()),
    CHURN: (TopologyConfig(name="exponential", one_peer=True), Failures(dropout=0.1)),
}
COMPARED = (STAR, ONE_PEER)
"""The topologies with all seeds; the others have the first one."""
BASELINES = ("flops-pa", "fed-iter-ht", "fed-ef", "fed-avg")
"""Over the exponential graph; the last three are DIHT, CHOCO-SGD and dense DFedAvg there."""


def topologies_study(scale: Scale) -> Study:
    """The default algorithm over every topology, the others over one; all nodes have equally many examples and take part in every round."""
    cells = [("lr", REFERENCE_ALGORITHM, name) for name in TOPOLOGIES] + [("lr", name, "exponential") for name in BASELINES]
    if not scale.is_smoke_test:
        cells += [("lg", REFERENCE_ALGORITHM, name) for name in (STAR, "ring", "exponential", ONE_PEER)]
    conditions = []
    for task, algorithm_name, name in cells:
        topology, failures = TOPOLOGIES[name]
        gap = 1.0 if name == STAR else round(topology.make_graph(scale.clients).spectral_gap, 5)
        run = partial(
            paper.build_run,
            task=task,
            algorithm_name=algorithm_name,
            rounds=scale.rounds,
            byte_counting=ByteCounting.SAMPLED,
            data=Synthetic(num_examples=scale.num_examples, num_features=scale.num_features),
            federation=FederationConfig(clients=scale.clients, participation=1.0, partition=Partition.IID),
            topology=topology,
            failures=failures,
            algorithm={} if scale.local_steps is None else {"local_steps": scale.local_steps},
        )
        label = {"task": task, "algorithm": algorithm_name, "topology": name, "gap": gap}
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.sweep_seeds[: None if name in COMPARED else 1]))
    return paper.build_study("topologies", scale, conditions)
