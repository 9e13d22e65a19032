"""The equal-bytes study as data: every rival, tuned with the same budget on other seeds, at the bytes that sieve needs as it comes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedsieve.data.partition import Partition
from fedsieve.experiments.config import ByteCounting, FederationConfig, RunConfig
from fedsieve.studies import paper, results
from fedsieve.studies import tuning as search
from fedsieve.studies.catalog import STUDIES
from fedsieve.studies.results import DENSE_METHODS, REFERENCE_METHOD, Row
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale

ALGORITHM_NAMES = (
    REFERENCE_METHOD,
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
"""FedAvg is there twice: cut to the density, and before the cut, in a column of its own."""
FOUR_BIT_ALGORITHMS = ("fed-iter-ht", "fed-round-ht")
"""Also run with four bits a value, in the settings tuned at eight."""
TUNING_SEEDS = (100, 101)
FAST_TASKS, MANY_SEEDS = ("lr", "lg"), range(10)
"""Tasks whose runs take seconds, and their seeds."""
FACTORS: dict[str, dict[str, Any]] = {
    "the paper's setting": {},
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
"""One factor at a time; a run's parts, replaced."""
REAL_TASK_FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {"density .05": {}, "density .01": {"density": 0.01}},
    "rcv1": {"density .005": {}},
    "emnist": {"density .05": {}, "density .005": {"density": 0.005}},
    "mnist-cnn": {"density .05": {}},
}
"""Real data at the densities we report, each task tuned at its first."""
FAST_REAL_TASK = "mnist"
"""Its runs take seconds: it has all its rounds at every scale."""
TOO_EXPENSIVE = "flops"
"""On real data one of its rounds, dense messages for every batch, costs more bytes than the whole run of sieve."""
EMNIST_PARTICIPATION = 0.01
"""Participation on EMNIST: ten of its thousand clients a round."""


def with_factor(run: RunConfig, factor: Mapping[str, Any]) -> RunConfig:
    """A run with one factor changed."""
    data = replace(run.data, **factor.get("data", {}))
    federation = replace(run.federation, **factor.get("federation", {}))
    density = factor.get("density", run.density)
    return replace(run, data=data, federation=federation, density=density)


def task_method_pairs(scale: Scale) -> list[tuple[str, str]]:
    """Tasks with the methods that are compared on them."""
    generated = [(task, method) for task in paper.SYNTHETIC_TASKS for method in ALGORITHM_NAMES]
    real = [(task, method) for task in REAL_TASK_FACTORS for method in ALGORITHM_NAMES if method != TOO_EXPENSIVE]
    return generated if scale.is_smoke_test else generated + real


def base_run(scale: Scale, task: str, algorithm_name: str) -> RunConfig:
    """A method on a task, with its defaults there; on real data the rounds of the scale."""
    if task in paper.SYNTHETIC_TASKS:
        return paper.synthetic_run_factory(scale, task, algorithm_name)(0)
    federation = FederationConfig(participation=EMNIST_PARTICIPATION) if task == "emnist" else FederationConfig()
    rounds = None if task == FAST_REAL_TASK else scale.real_rounds
    return RunConfig(task=task, algorithm_name=algorithm_name, rounds=rounds, byte_counting=ByteCounting.SAMPLED, federation=federation)


def tuning_study(scale: Scale) -> Study:
    """The same number of configurations for every rival and task, on held-out rows of other seeds, slow tasks in a third of the rounds.

    sieve runs as it comes: tuned on two seeds it did worse on others than untuned (docs/results.md). Here it shows what bytes it takes.
    """
    budget = 2 if scale.is_smoke_test else search.NUM_TRIALS
    found: list[Condition] = []
    for task, method in task_method_pairs(scale):
        run, seeds = base_run(scale, task, method), TUNING_SEEDS
        if task in REAL_TASK_FACTORS:
            run, seeds = run if task == FAST_REAL_TASK else replace(run, rounds=run.rounds // 3), TUNING_SEEDS[:1]
        found += search.build_conditions(run, 1 if method == REFERENCE_METHOD else budget, seeds, {"task": task, "method": method})
    return Study(name="tuning", description="settings on held-out rows of seeds 100 and 101", conditions=found, scale=scale.name.value)


def seeds_for_task(scale: Scale, task: str) -> Sequence[int]:
    """Ten where a run takes seconds, three elsewhere."""
    if task in REAL_TASK_FACTORS:
        return scale.real_seeds
    return MANY_SEEDS if task in FAST_TASKS and not scale.is_smoke_test else scale.sweep_seeds


def selected_options(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """What runs on each task and in which settings, from the tuning's rows.

    A method takes part with what was best after all rounds, and, if its messages are sparse, again, as thrifty, with what was best at
    the bytes of sieve.
    """
    found: dict[str, dict[str, Any]] = {}
    for task, method in dict.fromkeys((row["label"]["task"], row["label"]["method"]) for row in rows):
        trials, base_trials = (
            results.filter_rows(rows, task=task, method=method),
            results.filter_rows(rows, task=task, method=REFERENCE_METHOD),
        )
        limit = np.mean([row["curves"]["bytes"][-1] for row in base_trials])
        name, best, thrifty = f"{task} {method}", search.best_options(trials), search.best_options(trials, float(limit))
        found[name] = best
        if thrifty != best and method not in DENSE_METHODS:
            found[f"{name}, thrifty"] = thrifty
        if method in FOUR_BIT_ALGORITHMS:
            found[f"{name}, 4 bits"] = best | {"bits": 4}
    return found


def equal_bytes_study(scale: Scale, options_by_name: Mapping[str, Mapping[str, Any]]) -> Study:
    """All factors on the generated tasks, a density or two elsewhere."""
    found: list[Condition] = []
    for place, options in options_by_name.items():
        task, entrant = place.split(" ", 1)
        plain = base_run(scale, task, entrant.split(",")[0])
        tuned = replace(plain, algorithm=search.apply_options(plain.algorithm, options))
        for name, factor in REAL_TASK_FACTORS.get(task, FACTORS).items():
            if scale.is_smoke_test and name not in ("the paper's setting", "density .2"):
                continue
            if task == "lr" and name == "label skew":
                continue  # a regression has no labels
            label = {"task": task, "factor": name, "method": entrant, "options": json.dumps(options)}
            run = with_factor(tuned, factor)
            found.append(
                Condition(label=label, config_for_seed=lambda seed, run=run: replace(run, seed=seed), seeds=seeds_for_task(scale, task))
            )
    return Study(name="equal-bytes", description=STUDIES["equal-bytes"], conditions=found, scale=scale.name.value)
