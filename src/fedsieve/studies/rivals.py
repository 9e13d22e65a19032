"""The rivals study: every algorithm tuned with the same six trials, compared at the bytes of sieve and at the same density.

Dense compressors have two lines: their model cut to the density, and their dense model, each with its own choice of options.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.experiments.config import RunConfig
from fedsieve.studies import equal_bytes, paper, results, tuning
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import DENSE_MODEL, REFERENCE_ALGORITHM, SPARSE_MODEL, Row
from fedsieve.studies.scale import Scale, ScaleName

ALGORITHM_NAMES = (
    REFERENCE_ALGORITHM,
    "sign-ht",
    "stc",
    "fed-ef",
    "eden",
    "fed-dst",
    "ssfl",
    "flops-pa",
    "fed-round-ht",
    "fed-iter-ht",
    "gradual",
    "fed-avg",
)
DENSE_COMPRESSORS = ("stc", "eden", "fed-avg")
"""Algorithms that train a dense model, which has a line of its own."""
NUM_TRIALS = 6
TUNING_SEED = 100
TUNING_TASKS = {"lr": ("lr",), "mc": ("lg", "mc"), "mnist": ("mnist", "mnist-writers", "emnist", "rcv1", "mnist-cnn")}
"""The task on which options are chosen, and the tasks that run with them: regression, synthetic classes, real data."""
LEARNING_RATES = ("learning_rate", "server_learning_rate")
PARTICIPATION_FACTORS: dict[str, dict[str, Any]] = {
    f"participation {percent} %": {"federation": {"participation": percent / 100}} for percent in (20, 10, 2)
}
"""Residuals of clients go stale if clients are rare. The first factor of each task has 5 %."""
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "lr": {"density .05": {}, **PARTICIPATION_FACTORS},
    "lg": {"density .05": {}},
    "mc": {"density .05": {}},
    "mnist": {"density .05": {}, "density .01": {"density": 0.01}, **PARTICIPATION_FACTORS},
    "mnist-writers": {"density .05": {}},
    "emnist": {"density .05": {}},
    "rcv1": {"density .005": {}},
    "mnist-cnn": {"density .05": {}},
}
"""The cells of the study: tasks, and what each factor changes."""
SMOKE_TASKS, SMOKE_FACTORS = ("lr",), ("density .05", "participation 20 %")
SLOW_TASKS = ("mnist-writers", "emnist", "rcv1", "mnist-cnn")
"""Tasks with fewer rounds and one seed at scale short."""


def transfer_options(options: Mapping[str, Any], tuned: BaseAlgorithm, other: BaseAlgorithm) -> dict[str, Any]:
    """Return the options for another task: a learning rate keeps its ratio to the task's default, since step rules differ."""
    return {name: value / vars(tuned)[name] * vars(other)[name] if name in LEARNING_RATES else value for name, value in options.items()}


def default_run(scale: Scale, task: str, algorithm_name: str) -> tuple[RunConfig, BaseAlgorithm]:
    """Return a run of an algorithm on a task, and its options."""
    run = equal_bytes.base_run(scale, task, algorithm_name)
    assert isinstance(run.algorithm, BaseAlgorithm), "`base_run` resolves it"
    return run, run.algorithm


def tuning_study(scale: Scale) -> Study:
    """The same number of trials for every algorithm on validation examples of one seed; on real data with a third of the rounds."""
    num_trials = 2 if scale.is_smoke_test else NUM_TRIALS
    conditions: list[Condition] = []
    for task, name in product(SMOKE_TASKS if scale.is_smoke_test else TUNING_TASKS, ALGORITHM_NAMES):
        run, algorithm = default_run(scale, task, name)
        if task not in paper.SYNTHETIC_TASKS:
            assert run.rounds is not None, "`base_run` resolves it"
            run = replace(run, rounds=run.rounds // 3)
        candidates = tuning.candidate_options(algorithm, num_trials)
        conditions += tuning.build_conditions(run, candidates, [TUNING_SEED], {"task": task, "algorithm": name})
    return Study(
        name="tuning",
        description=f"{num_trials} settings of each algorithm on validation examples of seed {TUNING_SEED}",
        conditions=conditions,
        scale=scale.name.value,
    )


def selected_options(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the tuned options by "TASK ALGORITHM" and, for dense models, by "TASK ALGORITHM, dense model".

    Options are the best at the bytes that sieve sends with its defaults: the same limit for sieve as for all others.
    """
    selected: dict[str, dict[str, Any]] = {}
    for task, algorithm in results.label_values(rows, "task", "algorithm"):
        trials = results.filter_rows(rows, task=task, algorithm=algorithm)
        default = results.filter_rows(rows, task=task, algorithm=REFERENCE_ALGORITHM, options="{}")
        max_bytes = float(np.mean([row["curves"]["bytes"][-1] for row in default]))
        selected[f"{task} {algorithm}"] = tuning.best_options(trials, max_bytes)
        if algorithm in DENSE_COMPRESSORS:
            selected[f"{task} {algorithm}, {DENSE_MODEL}"] = tuning.best_options(trials, max_bytes, "dense_value")
    return selected


def seeds_for_task(scale: Scale, task: str) -> Sequence[int]:
    """Return the seeds of the scale; at scale short one seed on slow tasks."""
    return scale.seeds[:1] if task in SLOW_TASKS and scale.name is ScaleName.SHORT else scale.seeds


def rivals_study(scale: Scale, options_by_name: Mapping[str, Mapping[str, Any]]) -> Study:
    """Every cell with every algorithm. The options chosen on one task serve all tasks of its kind."""
    conditions: list[Condition] = []
    for name, options in options_by_name.items():
        tuned_on, algorithm = name.split(" ", 1)
        algorithm_name, _, model = algorithm.partition(", ")
        _, tuned_algorithm = default_run(scale, tuned_on, algorithm_name)
        for task in TUNING_TASKS[tuned_on]:
            if scale.is_smoke_test and task not in SMOKE_TASKS:
                continue
            default, default_algorithm = default_run(scale, task, algorithm_name)
            task_options = transfer_options(options, tuned_algorithm, default_algorithm)
            tuned = replace(default, algorithm=tuning.apply_options(default_algorithm, task_options))
            for factor, changes in FACTORS[task].items():
                if scale.is_smoke_test and factor not in SMOKE_FACTORS:
                    continue
                run = equal_bytes.with_factor(tuned, changes)
                label = {"task": task, "factor": factor, "algorithm": algorithm_name, "model": model or SPARSE_MODEL}
                label["options"] = json.dumps(task_options)
                seeds = seeds_for_task(scale, task)
                conditions.append(Condition(label=label, config_for_seed=lambda seed, run=run: replace(run, seed=seed), seeds=seeds))
    return paper.build_study("rivals", scale, conditions)
