"""The equal-bytes study as data: every rival, tuned with the same budget on other seeds, at the bytes that sieve needs as it comes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedsieve.data.partition import Partition
from fedsieve.experiments import tuning as search
from fedsieve.experiments.config import Counting, Federation, Run
from fedsieve.studies import paper, results
from fedsieve.studies.catalog import STUDIES
from fedsieve.studies.results import BASE, DENSE, Row
from fedsieve.studies.runner import Cell, Study
from fedsieve.studies.scale import Scale

METHODS = (
    BASE,
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
COARSE = ("fed-iter-ht", "fed-round-ht")
"""Also run with four bits a value, in the settings tuned at eight."""
TUNING_SEEDS = (100, 101)
SECONDS, MANY = ("lr", "lg"), range(10)
"""Tasks whose runs take seconds, and their seeds."""
FACTORS: dict[str, dict[str, Any]] = {
    "the paper's setting": {},
    "SNR 3": {"data": {"snr": 3.0}},
    "correlation .7": {"data": {"correlation": 0.7}},
    "SNR 3, correlation .7": {"data": {"snr": 3.0, "correlation": 0.7}},
    "500 rows": {"data": {"rows": 500}},
    "1000 rows": {"data": {"rows": 1000}},
    "density .5": {"density": 0.5},
    "density .2": {"density": 0.2},
    "density .01": {"density": 0.01},
    "density .005": {"density": 0.005},
    "participation 2 %": {"federation": {"participation": 0.02}},
    "participation 10 %": {"federation": {"participation": 0.1}},
    "label skew": {"federation": {"partition": Partition.LABEL}},
}
"""One factor at a time; a run's parts, replaced."""
REAL: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {"density .05": {}, "density .01": {"density": 0.01}},
    "rcv1": {"density .005": {}},
    "emnist": {"density .05": {}, "density .005": {"density": 0.005}},
    "mnist-cnn": {"density .05": {}},
}
"""Real data at the densities we report, each task tuned at its first."""
QUICK = "mnist"
"""Its runs take seconds: it has all its rounds at every scale."""
OUTGROWN = "flops"
"""On real data one of its rounds, dense messages for every batch, costs more bytes than the whole run of sieve."""
SAMPLE = 0.01
"""Participation on EMNIST: ten of its thousand clients a round."""


def varied(run: Run, factor: Mapping[str, Any]) -> Run:
    """A run with one factor changed."""
    data = replace(run.data, **factor.get("data", {}))
    federation = replace(run.federation, **factor.get("federation", {}))
    density = factor.get("density", run.density)
    return replace(run, data=data, federation=federation, density=density)


def pairs(scale: Scale) -> list[tuple[str, str]]:
    """Tasks with the methods that are compared on them."""
    generated = [(task, method) for task in paper.GENERATED for method in METHODS]
    real = [(task, method) for task in REAL for method in METHODS if method != OUTGROWN]
    return generated if scale.tiny else generated + real


def base(scale: Scale, task: str, method: str) -> Run:
    """A method on a task, with its defaults there; on real data the rounds of the scale."""
    if task in paper.GENERATED:
        return paper.generated(scale, task, method)(0)
    federation = Federation(participation=SAMPLE) if task == "emnist" else Federation()
    rounds = None if task == QUICK else scale.real_rounds
    return Run(task=task, method=method, rounds=rounds, bytes=Counting.SAMPLED, federation=federation)


def tuning(scale: Scale) -> Study:
    """The same number of configurations for every rival and task, on held-out rows of other seeds, slow tasks in a third of the rounds.

    sieve runs as it comes: tuned on two seeds it did worse on others than untuned (docs/results.md). Here it shows what bytes it takes.
    """
    budget = 2 if scale.tiny else search.SIZE
    found: list[Cell] = []
    for task, method in pairs(scale):
        run, seeds = base(scale, task, method), TUNING_SEEDS
        if task in REAL:
            run, seeds = run if task == QUICK else replace(run, rounds=run.rounds // 3), TUNING_SEEDS[:1]
        found += search.cells(run, 1 if method == BASE else budget, seeds, {"task": task, "method": method})
    return Study(name="tuning", about="settings on held-out rows of seeds 100 and 101", cells=found, scale=scale.name.value)


def seeds_of(scale: Scale, task: str) -> Sequence[int]:
    """Ten where a run takes seconds, three elsewhere."""
    if task in REAL:
        return scale.real_seeds
    return MANY if task in SECONDS and not scale.tiny else scale.sweep_seeds


def chosen(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """What runs on each task and in which settings, from the tuning's rows.

    A method takes part with what was best after all rounds, and, if its messages are sparse, again, as thrifty, with what was best at
    the bytes of sieve.
    """
    found: dict[str, dict[str, Any]] = {}
    for task, method in dict.fromkeys((row["label"]["task"], row["label"]["method"]) for row in rows):
        trials, base_trials = results.where(rows, task=task, method=method), results.where(rows, task=task, method=BASE)
        limit = np.mean([row["curves"]["bytes"][-1] for row in base_trials])
        name, best, thrifty = f"{task} {method}", search.best(trials), search.best(trials, float(limit))
        found[name] = best
        if thrifty != best and method not in DENSE:
            found[f"{name}, thrifty"] = thrifty
        if method in COARSE:
            found[f"{name}, 4 bits"] = best | {"bits": 4}
    return found


def equal_bytes(scale: Scale, settings: Mapping[str, Mapping[str, Any]]) -> Study:
    """All factors on the generated tasks, a density or two elsewhere."""
    found: list[Cell] = []
    for place, options in settings.items():
        task, entrant = place.split(" ", 1)
        plain = base(scale, task, entrant.split(",")[0])
        tuned = replace(plain, algorithm=search.restored(plain.algorithm, options))
        for name, factor in REAL.get(task, FACTORS).items():
            if scale.tiny and name not in ("the paper's setting", "density .2"):
                continue
            if task == "lr" and name == "label skew":
                continue  # a regression has no labels
            label = {"task": task, "factor": name, "method": entrant, "options": json.dumps(options)}
            run = varied(tuned, factor)
            found.append(Cell(label=label, run=lambda seed, run=run: replace(run, seed=seed), seeds=seeds_of(scale, task)))
    return Study(name="equal-bytes", about=STUDIES["equal-bytes"], cells=found, scale=scale.name.value)
