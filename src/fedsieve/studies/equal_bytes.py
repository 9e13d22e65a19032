"""The equal-bytes study: algorithms tuned with the same number of trials on other seeds, compared at the bytes that sieve sends."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.data.partition import Partition
from fedsieve.experiments.config import ByteCounting, FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.studies import paper, results, tuning
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import DENSE_ALGORITHMS, REFERENCE_ALGORITHM, Row
from fedsieve.studies.scale import Scale

ALGORITHM_NAMES = (
    REFERENCE_ALGORITHM,
    "flops-pa",
    "flops",
    "fed-iter-ht",
    "fed-round-ht",
    "fed-ht",
    "fed-avg",
    "gradual",
    "fed-l1",
    "random-mask",
)
FOUR_BIT_ALGORITHMS = ("fed-iter-ht", "fed-round-ht")
"""Algorithms that also run with four bits per value, with the options tuned at eight."""
TUNING_SEEDS = (100, 101)
FAST_TASKS, MANY_SEEDS = ("lr", "lg"), range(10)
"""Tasks with runs of seconds, and their seeds."""
PAPER_SETTING = "the paper's setting"
FACTORS: dict[str, dict[str, Any]] = {
    PAPER_SETTING: {},
    "SNR 3": {"data": {"snr": 3.0}},
    "correlation .7": {"data": {"correlation": 0.7}},
    "SNR 3, correlation .7": {"data": {"snr": 3.0, "correlation": 0.7}},
    "500 examples": {"data": {"num_examples": 500}},
    "1000 examples": {"data": {"num_examples": 1000}},
    "density .5": {"density": 0.5},
    "density .2": {"density": 0.2},
    "density .01": {"density": 0.01},
    "density .005": {"density": 0.005},
    "participation 2 %": {"federation": {"participation": 0.02}},
    "participation 10 %": {"federation": {"participation": 0.1}},
    "label skew": {"federation": {"partition": Partition.LABEL}},
}
"""The settings that each factor changes, one factor at a time."""
SMOKE_FACTORS = (PAPER_SETTING, "density .2")
CLASSIFICATION_FACTORS = ("label skew",)
"""Factors that need class labels."""
REAL_TASK_FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {"density .05": {}, "density .01": {"density": 0.01}},
    "rcv1": {"density .005": {}},
    "emnist": {"density .05": {}, "density .005": {"density": 0.005}},
    "mnist-cnn": {"density .05": {}},
}
"""Real data at the densities we report. Options are tuned at the first density of each task."""
FAST_REAL_TASK = "mnist"
"""Real data with runs of seconds: they have all rounds at every scale."""
TOO_EXPENSIVE = "flops"
"""On real data one round of this algorithm, with dense messages for every batch, needs more bytes than a whole run of sieve."""
EMNIST_PARTICIPATION = 0.01
"""Ten of the thousand EMNIST clients in each round."""


def with_factor(run: RunConfig, factor: Mapping[str, Any]) -> RunConfig:
    """Return a run with one factor changed."""
    data = replace(run.data, **factor.get("data", {}))
    federation = replace(run.federation, **factor.get("federation", {}))
    return replace(run, data=data, federation=federation, density=factor.get("density", run.density))


def task_algorithm_pairs(scale: Scale) -> list[tuple[str, str]]:
    """Return tasks with the algorithms that are compared on them."""
    synthetic: list[tuple[str, str]] = list(product(paper.SYNTHETIC_TASKS, ALGORITHM_NAMES))
    real = [(task, name) for task, name in product(REAL_TASK_FACTORS, ALGORITHM_NAMES) if name != TOO_EXPENSIVE]
    return synthetic if scale.is_smoke_test else synthetic + real


def base_run(scale: Scale, task: str, algorithm_name: str) -> RunConfig:
    """Return a run of an algorithm with its defaults on a task."""
    if task in paper.SYNTHETIC_TASKS:
        return resolve(paper.synthetic_run_factory(scale, task, algorithm_name)(0)).config
    federation = FederationConfig(participation=EMNIST_PARTICIPATION) if task == "emnist" else FederationConfig()
    rounds = None if task == FAST_REAL_TASK else scale.real_rounds
    config = RunConfig(task=task, algorithm_name=algorithm_name, rounds=rounds, byte_counting=ByteCounting.SAMPLED, federation=federation)
    return resolve(config).config


def tuning_study(scale: Scale) -> Study:
    """The same number of trials for every algorithm and task, on validation examples of other seeds; slow tasks with a third of the rounds.

    sieve has one trial, its defaults: tuned on two seeds it was worse on others (docs/results.md). The trial gives the bytes it needs.
    """
    num_trials = 2 if scale.is_smoke_test else tuning.NUM_TRIALS
    conditions: list[Condition] = []
    for task, name in task_algorithm_pairs(scale):
        run, seeds = base_run(scale, task, name), TUNING_SEEDS
        if task in REAL_TASK_FACTORS:
            seeds = TUNING_SEEDS[:1]
            if task != FAST_REAL_TASK:
                assert run.rounds is not None, "`base_run` resolves it"
                run = replace(run, rounds=run.rounds // 3)
        label = {"task": task, "algorithm": name}
        assert isinstance(run.algorithm, BaseAlgorithm), "`base_run` resolves it"
        candidates = tuning.candidate_options(run.algorithm, 1 if name == REFERENCE_ALGORITHM else num_trials)
        conditions += tuning.build_conditions(run, candidates, seeds, label)
    description = f"options on validation examples of seeds {' and '.join(map(str, TUNING_SEEDS))}"
    return Study(name="tuning", description=description, conditions=conditions, scale=scale.name.value)


def seeds_for_task(scale: Scale, task: str) -> Sequence[int]:
    """Return ten seeds if a run takes seconds, else those of the scale."""
    if task in REAL_TASK_FACTORS:
        return scale.real_seeds
    return MANY_SEEDS if task in FAST_TASKS and not scale.is_smoke_test else scale.sweep_seeds


def selected_options(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the tuned options by "TASK ALGORITHM" from the rows of the tuning study.

    Each algorithm takes part with the options that are best after all rounds. If its messages are sparse, it takes part
    again, as "tuned for bytes", with the options that are best at the bytes of sieve.
    """
    selected: dict[str, dict[str, Any]] = {}
    for task, algorithm in results.label_values(rows, "task", "algorithm"):
        trials = results.filter_rows(rows, task=task, algorithm=algorithm)
        reference_trials = results.filter_rows(rows, task=task, algorithm=REFERENCE_ALGORITHM)
        max_bytes = float(np.mean([row["curves"]["bytes"][-1] for row in reference_trials]))
        name, best, best_at_bytes = f"{task} {algorithm}", tuning.best_options(trials), tuning.best_options(trials, max_bytes)
        selected[name] = best
        if best_at_bytes != best and algorithm not in DENSE_ALGORITHMS:
            selected[f"{name}, tuned for bytes"] = best_at_bytes
        if algorithm in FOUR_BIT_ALGORITHMS:
            selected[f"{name}, 4 bits"] = best | {"bits": 4}
    return selected


def equal_bytes_study(scale: Scale, options_by_name: Mapping[str, Mapping[str, Any]]) -> Study:
    """All factors on the synthetic tasks, one or two densities on real data."""
    conditions: list[Condition] = []
    for name, options in options_by_name.items():
        task, algorithm = name.split(" ", 1)
        default = base_run(scale, task, algorithm.split(",")[0])
        assert isinstance(default.algorithm, BaseAlgorithm), "`base_run` resolves it"
        tuned = replace(default, algorithm=tuning.apply_options(default.algorithm, options))
        for factor, changes in REAL_TASK_FACTORS.get(task, FACTORS).items():
            if (scale.is_smoke_test and factor not in SMOKE_FACTORS) or (task == "lr" and factor in CLASSIFICATION_FACTORS):
                continue
            run = with_factor(tuned, changes)
            label = {"task": task, "factor": factor, "algorithm": algorithm, "options": json.dumps(options)}
            seeds = seeds_for_task(scale, task)
            conditions.append(Condition(label=label, config_for_seed=lambda seed, run=run: replace(run, seed=seed), seeds=seeds))
    return paper.build_study("equal-bytes", scale, conditions)
