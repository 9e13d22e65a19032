"""The topologies study: the same nodes and rounds over a star and over graphs without a server."""

from functools import partial

from fedsieve.data.partition import Partition
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import ByteCounting, FederationConfig
from fedsieve.experiments.topology import STAR, TopologyConfig
from fedsieve.runtime.failures import Failures
from fedsieve.studies import paper
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale

ONE_PEER, CHURN = "one-peer", "one-peer, 10 % absent"
TOPOLOGIES: dict[str, tuple[TopologyConfig, Failures]] = {
    STAR: (TopologyConfig(), Failures()),
    "ring": (TopologyConfig(name="ring"), Failures()),
    "erdos-renyi": (TopologyConfig(name="erdos-renyi"), Failures()),
    "exponential": (TopologyConfig(name="exponential"), Failures()),
    f"exponential, {ONE_PEER}": (TopologyConfig(name="exponential", one_peer=True), Failures()),
    f"exponential, {CHURN}": (TopologyConfig(name="exponential", one_peer=True), Failures(dropout=0.1)),
}
ALGORITHMS = ("sieve", "flops-pa", "fed-iter-ht", "fed-ef", "fed-avg")
"""The first one runs over every topology, the others over the star and the exponential graph: DIHT, CHOCO-SGD and dense DFedAvg."""
FOR_ALL_ALGORITHMS = (STAR, "exponential")


def topologies_study(scale: Scale) -> Study:
    """Every algorithm over its topologies; all nodes have equally many examples and take part in every round."""
    conditions = []
    for task in ("lr",) if scale.is_smoke_test else ("lr", "lg"):
        for algorithm_name in ALGORITHMS:
            for name in TOPOLOGIES if algorithm_name == ALGORITHMS[0] else FOR_ALL_ALGORITHMS:
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
                conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.sweep_seeds))
    return paper.build_study("topologies", scale, conditions)
