"""The tables study: other people's published experiments in their settings, their algorithms and ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.fed_ef import Downlink
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.schedules import DensitySchedule
from fedsieve.data.builtin import BuiltinFiles, FeatureScaling, HeartFiles, Source
from fedsieve.experiments.config import ByteCounting, FederationConfig, RunConfig
from fedsieve.studies import paper
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import OURS, REFERENCE_ALGORITHM, THEIRS
from fedsieve.studies.scale import Scale

HETEROFL_DENSITY = 0.14843
"""The fraction of LeNet's 44,426 weights that are as many as those of HeteroFL's smallest model, 6,594."""
GATED_ALGORITHMS = (REFERENCE_ALGORITHM, "flops-pa")
OUR_ALGORITHMS = (*GATED_ALGORITHMS, "fed-round-ht")


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """An algorithm as it was run for a published table."""

    algorithm_name: str
    local_steps: int
    learning_rate: float
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OwnRow:
    """An algorithm of ours in the setting of a published table."""

    algorithm_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    density: float | None = None
    """None: the task's"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting of a published table: task, clients, rounds, and the algorithms in it."""

    task: str
    rounds: int
    federation: FederationConfig
    batch_size: int
    local_steps: int
    """local steps of our algorithms, so that a round is the same work: those of the row with the most"""
    rows: Mapping[str, PublishedRow]
    ours: Mapping[str, OwnRow] = field(default_factory=lambda: {name: OwnRow(algorithm_name=name) for name in OUR_ALGORITHMS})
    data: BuiltinFiles = field(default_factory=BuiltinFiles)
    learning_rate: float | None = None
    """constant learning rate of our algorithms in the rows with their step size; None: the table has no such rows"""
    their_density: float | None = None
    """density of their models; None: the task's"""
    seeds: Sequence[int] | None = None
    """seeds of the published table, or one if a run is long; None: those of the scale"""


SETTINGS = {
    "Fed-HT, Simulation I": Setting(
        task="fed-ht-linear",
        rounds=100,
        federation=FederationConfig(participation=1.0),
        batch_size=20,
        local_steps=3,
        learning_rate=0.003,
        rows={
            "Distributed-IHT": PublishedRow(algorithm_name="fed-ht", local_steps=1, learning_rate=0.01),
            "Fed-HT, K = 3": PublishedRow(algorithm_name="fed-ht", local_steps=3, learning_rate=0.003),
            "FedIter-HT, K = 1": PublishedRow(algorithm_name="fed-iter-ht", local_steps=1, learning_rate=0.03),
            "FedIter-HT, K = 3": PublishedRow(algorithm_name="fed-iter-ht", local_steps=3, learning_rate=0.003),
        },
    ),
    "Fed-HT, Simulation II": Setting(
        task="fed-ht-logistic",
        rounds=200,
        federation=FederationConfig(participation=1.0),
        batch_size=20,
        local_steps=5,
        rows={
            "Distributed-IHT": PublishedRow(algorithm_name="fed-ht", local_steps=1, learning_rate=0.01),
            "Fed-HT, K = 5": PublishedRow(algorithm_name="fed-ht", local_steps=5, learning_rate=0.01),
            "FedIter-HT, K = 5": PublishedRow(algorithm_name="fed-iter-ht", local_steps=5, learning_rate=0.001),
        },
        seeds=(0,),
    ),
    "Fed-HT, MNIST": Setting(
        task="fed-ht-mnist",
        rounds=100,
        federation=FederationConfig(participation=1.0),
        batch_size=64,
        local_steps=5,
        rows={
            "Distributed-IHT": PublishedRow(algorithm_name="fed-ht", local_steps=1, learning_rate=1.0),
            "Fed-HT, K = 5": PublishedRow(algorithm_name="fed-ht", local_steps=5, learning_rate=0.3),
            "FedIter-HT, K = 5": PublishedRow(algorithm_name="fed-iter-ht", local_steps=5, learning_rate=0.1),
        },
        seeds=(0,),
    ),
    "FLamby, heart disease": Setting(
        task="heart",
        rounds=15,
        federation=FederationConfig(participation=1.0),
        batch_size=4,
        local_steps=100,
        rows={
            "FedAvg": PublishedRow(algorithm_name="fed-avg", local_steps=100, learning_rate=0.001),
            "FedAdam": PublishedRow(
                algorithm_name="fed-avg",
                local_steps=100,
                learning_rate=0.01,
                options={"server_optimizer": Optimizer.ADAM, "server_learning_rate": 0.01},
            ),
        },
        data=HeartFiles(test_scaling=FeatureScaling.POOLED),
        their_density=1.0,
        seeds=range(42, 47),
    ),
    "FedML, MNIST": Setting(
        task="fedml-mnist",
        rounds=200,
        federation=FederationConfig(participation=0.01),
        batch_size=10,
        local_steps=6,
        rows={"FedAvg": PublishedRow(algorithm_name="fed-avg", local_steps=6, learning_rate=0.03)},
        their_density=1.0,
    ),
    "HeteroFL, MNIST": Setting(
        task="heterofl-mnist",
        rounds=100,
        federation=FederationConfig(participation=0.1),
        batch_size=20,
        local_steps=30,
        rows={},
        ours={
            "sieve, 2,221 weights": OwnRow(algorithm_name="sieve"),
            "sieve, 6,594 weights": OwnRow(algorithm_name="sieve", density=HETEROFL_DENSITY),
            "fed-round-ht, 6,594 weights": OwnRow(algorithm_name="fed-round-ht", density=HETEROFL_DENSITY),
            "fed-avg, 44,426 weights": OwnRow(algorithm_name="fed-avg", density=1.0),
        },
        seeds=(0,),
    ),
    "Natasha-R, CIFAR-10": Setting(
        task="cifar10-cnn",
        rounds=40,
        federation=FederationConfig(clients=50, participation=0.3, alpha=0.3),
        batch_size=32,
        local_steps=31,
        rows={"FedAvg": PublishedRow(algorithm_name="fed-avg", local_steps=31, learning_rate=0.1)},
        ours={
            "fed-ef, top 1 %": OwnRow(
                algorithm_name="fed-ef", options={"uplink_density": 0.01, "downlink": Downlink.DENSE, "bits": 8}, density=1.0
            ),
            "eden, 1 bit": OwnRow(algorithm_name="eden", density=1.0),
            "sieve, 5 %": OwnRow(algorithm_name="sieve"),
        },
        their_density=1.0,
        seeds=(0,),
    ),
}
"""Published tables by name. Learning rates that a table leaves open (FedIter-HT with K = 3, Simulation II, MNIST) were chosen from the
authors' range on validation examples of seed 100. A client of FedML trains one epoch; here each takes 6 steps, the epoch of the mean
client. The last two tables are scaled to what two cores compute in three hours; docs/tables.md says how."""


def tables_study(scale: Scale) -> Study:
    """Their algorithms with their options and 32-bit values, ours with their defaults, in the same rounds on the same clients."""
    conditions = []
    for table, setting in SETTINGS.items():
        seeds = scale.sweep_seeds if setting.seeds is None or scale.is_smoke_test else setting.seeds
        base = partial(build_run, scale, setting)
        for row, published in setting.rows.items():
            label = {"task": setting.task, "table": table, "row": row, "algorithm": published.algorithm_name, "role": THEIRS}
            run = partial(base, published.algorithm_name, their_options(scale, setting, published), setting.their_density)
            conditions.append(Condition(label=label, config_for_seed=run, seeds=seeds))
        for row, own in setting.ours.items():
            name = own.algorithm_name
            label = {"task": setting.task, "table": table, "row": row, "algorithm": name, "role": OURS}
            options = {"local_steps": _limit_steps(scale, setting.local_steps), "batch_size": setting.batch_size, **own.options}
            conditions.append(Condition(label=label, config_for_seed=partial(base, name, options, own.density), seeds=seeds))
            if name in GATED_ALGORITHMS and setting.learning_rate is not None:
                constant = options | {"step_rule": StepRule.CONSTANT, "learning_rate": setting.learning_rate}
                label = label | {"row": f"{row}, their step size"}
                conditions.append(Condition(label=label, config_for_seed=partial(base, name, constant, own.density), seeds=seeds))
    return paper.build_study("tables", scale, conditions)


def _limit_steps(scale: Scale, local_steps: int) -> int:
    return local_steps if scale.local_steps is None else min(local_steps, scale.local_steps)


def their_options(scale: Scale, setting: Setting, row: PublishedRow) -> dict[str, Any]:
    """Return the options of a published row: a constant learning rate, 32-bit values, one density in all rounds."""
    options = {
        "step_rule": StepRule.CONSTANT,
        "learning_rate": row.learning_rate,
        "final_learning_rate_fraction": 1.0,
        "batch_size": setting.batch_size,
        "local_steps": _limit_steps(scale, row.local_steps),
        "bits": 32,
        "density_schedule": DensitySchedule.CONSTANT,
        **row.options,
    }
    supported = algorithm_class(row.algorithm_name).option_names()
    return {name: value for name, value in options.items() if name in supported}


def build_run(
    scale: Scale, setting: Setting, algorithm_name: str, options: Mapping[str, Any], density: float | None, seed: int
) -> RunConfig:
    """Return one run in the setting of a table. At scale smoke its data are generated."""
    return RunConfig(
        task=setting.task,
        algorithm_name=algorithm_name,
        algorithm=options,
        density=density,
        rounds=scale.rounds if scale.is_smoke_test else setting.rounds,
        seed=seed,
        byte_counting=ByteCounting.SAMPLED,
        data=replace(setting.data, source=Source.SYNTHETIC) if scale.is_smoke_test else setting.data,
        federation=setting.federation,
    )
