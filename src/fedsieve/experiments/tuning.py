"""Tuning on rows clients hold out: a small space that is the same for every method, a budget, and what was chosen, stored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.algorithms.base import Method
from fedsieve.core.selection import Schedule
from fedsieve.experiments.config import Judge, Run
from fedsieve.storage import run_directory
from fedsieve.studies import results
from fedsieve.studies.results import Row
from fedsieve.studies.runner import Cell, Study, compute

CHOSEN = "chosen.json"
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.125)
BATCHES = (64, 32)
FALLING = {"schedule": Schedule.CUBIC, "start_density": None}
SIZE = 12
"""Step sizes 1, 1/2 and 2 with two batches, with and without a schedule; methods without one try more step sizes."""


def configurations(method: Method, budget: int, fixed: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Settings to try in the place of the method's own, which come first: step size, batch, schedule; never what is fixed."""
    rate = "server_rate" if method.exchanges > 1 else "rate"
    fixed |= {"schedule"} if "start_density" in fixed else set()  # where a schedule begins was typed: there is to be one
    own = vars(method) | {"schedule": method.course}
    found: list[dict[str, Any]] = [{}]
    for factor, batch, falling in product(FACTORS, (method.batch, *BATCHES), (False, True)):
        options = {rate: factor * getattr(method, rate), "batch": batch}
        options |= FALLING if falling else {"schedule": Schedule.CONSTANT}
        changed = {name: value for name, value in options.items() if name in method.offered() - fixed and value != own[name]}
        if changed not in found:
            found.append(changed)
    return found[:budget]


def trial(run: Run, options: Mapping[str, Any]) -> Run:
    """The same run with other options, judged on a tenth of each client's rows, which it does not train on."""
    return replace(run, judge=Judge.VALIDATION, algorithm=replace(run.algorithm, **options))


def best(rows: Sequence[Row], limit: float = np.inf) -> dict[str, Any]:
    """Of the trials of one run, the options with the highest mean on held-out rows at so many bytes; one that diverged is no candidate."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        value = results.at_bytes(row, limit) if row["state"] == results.DONE else None
        scores.setdefault(row["label"]["options"], []).append(-np.inf if value is None else value)
    return json.loads(max(scores, key=lambda options: float(np.mean(scores[options]))))


def restored(method: Method, options: Mapping[str, Any]) -> Method:
    """A method with options that were stored as plain values."""
    return replace(method, **{name: Schedule(value) if name == "schedule" else value for name, value in options.items()})


def cells(run: Run, budget: int, seeds: Sequence[int], label: Mapping[str, Any], fixed: frozenset[str] = frozenset()) -> list[Cell]:
    """One cell a configuration."""
    return [
        Cell(
            label={**label, "options": json.dumps(options)},
            run=lambda seed, options=options: replace(trial(run, options), seed=seed),
            seeds=seeds,
        )
        for options in configurations(run.algorithm, budget, fixed)
    ]


def tuned(run: Run, budget: int, folder: Path, *, fixed: frozenset[str] = frozenset(), quiet: bool = False) -> Run:
    """The run with the best of `budget` configurations; trials are kept in the folder and never computed twice."""
    if budget < 1:
        raise ValueError(f"--tune is a number of configurations and must be at least 1; got {budget}")
    if run.judge is Judge.VALIDATION:
        raise ValueError("--tune looks at the held-out rows that --judge validation would measure on; use --judge test")
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(name="tuning", about="settings on held-out rows", cells=cells(run, budget, [run.seed], {"run": run.id}, fixed))
    rows = compute(study, folder, quiet=quiet)
    chosen = best(rows)
    tried = [{"options": json.loads(row["label"]["options"]), "value": row["values"].get("value")} for row in rows]
    run_directory.replace(folder / CHOSEN, json.dumps({"chosen": chosen, "tried": tried}, indent=1).encode())
    return replace(run, algorithm=restored(run.algorithm, chosen))
