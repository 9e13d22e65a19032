"""The equal-bytes study as data: every method, tuned with the same budget on other seeds, at the bytes that sieve needs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedsieve.data.partition import Partition
from fedsieve.experiments import paper, results, tune
from fedsieve.experiments.catalogue import STUDIES
from fedsieve.experiments.results import Row
from fedsieve.experiments.run import Counting, Federation, Run
from fedsieve.experiments.scale import Scale, ScaleName
from fedsieve.experiments.study import Cell, Study

METHODS = (
    "sieve",
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
TUNING_SEEDS = (100, 101)
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
REAL = {"mnist": 0.05, "mnist-cnn": 0.05, "emnist": 0.05, "rcv1": 0.005}


def varied(run: Run, factor: Mapping[str, Any]) -> Run:
    """A run with one factor changed."""
    data = replace(run.data, **factor.get("data", {}))
    federation = replace(run.federation, **factor.get("federation", {}))
    density = factor.get("density", run.density)
    return replace(run, data=data, federation=federation, density=density)


def tasks(scale: Scale) -> tuple[str, ...]:
    """Real data only at the paper's scale: it takes hours."""
    return (*paper.GENERATED, *(REAL if scale.name is ScaleName.PAPER else ()))


def base(scale: Scale, task: str, method: str) -> Run:
    """A method on a task, with its defaults there."""
    if task in paper.GENERATED:
        return paper.generated(scale, task, method)(0)
    return Run(task=task, method=method, density=REAL[task], bytes=Counting.SAMPLED, federation=Federation())


def tuning(scale: Scale) -> Study:
    """The same number of configurations for every method and task, on held-out rows of other seeds."""
    budget = 2 if scale.tiny else tune.SIZE
    found: list[Cell] = []
    for task in tasks(scale):
        for method in METHODS:
            found += tune.cells(base(scale, task, method), budget, TUNING_SEEDS, {"task": task, "method": method})
    return Study(name="tuning", about="settings on held-out rows of seeds 100 and 101", cells=found, scale=scale.name.value)


def chosen(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """What each method uses on each task, from the tuning's rows."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        place = f"{row['label']['task']} {row['label']['method']}"
        if place not in found:
            same = results.where(rows, task=row["label"]["task"], method=row["label"]["method"])
            found[place] = tune.best(same)
    return found


def equal_bytes(scale: Scale, settings: Mapping[str, Mapping[str, Any]]) -> Study:
    """All factors on the generated tasks, the tasks themselves elsewhere."""
    found: list[Cell] = []
    for task in tasks(scale):
        generated = task in paper.GENERATED
        for name, factor in FACTORS.items() if generated else [("its own setting", {})]:
            if scale.tiny and name not in ("the paper's setting", "density .2"):
                continue
            if task == "lr" and name == "label skew":
                continue  # a regression has no labels
            seeds = scale.seeds if name == "the paper's setting" else scale.sweep_seeds
            for method in METHODS:
                plain = base(scale, task, method)
                run = varied(replace(plain, algorithm=tune.restored(plain.algorithm, settings[f"{task} {method}"])), factor)
                label = {"task": task, "factor": name, "method": method, "options": json.dumps(settings[f"{task} {method}"])}
                found.append(Cell(label=label, run=lambda seed, run=run: replace(run, seed=seed), seeds=seeds if generated else range(3)))
    return Study(name="equal-bytes", about=STUDIES["equal-bytes"], cells=found, scale=scale.name.value)
