"""Tuning on rows clients hold out: a small space that is the same for every method, a budget, and what was chosen, stored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.schedules import DensitySchedule
from fedsieve.experiments.config import EvaluationSplit, RunConfig
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.storage import run_directory
from fedsieve.studies import results
from fedsieve.studies.results import Row
from fedsieve.studies.runner import Condition, Study, compute_study

CHOSEN_OPTIONS_FILE = "chosen.json"
LEARNING_RATE_FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.125)
BATCH_SIZES = (64, 32)
DENSITY_ANNEALING = {"density_schedule": DensitySchedule.CUBIC, "initial_density": None}
NUM_TRIALS = 12
"""Step sizes 1, 1/2 and 2 with two batches, with and without a schedule; methods without one try more step sizes."""


def candidate_options(algorithm: BaseAlgorithm, num_trials: int, fixed_options: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Settings to try in the place of the method's own, which come first: step size, batch, schedule; never what is fixed."""
    rate = "server_learning_rate" if algorithm.workload.exchanges > 1 else "learning_rate"
    fixed_options |= (
        {"density_schedule"} if "initial_density" in fixed_options else set()
    )  # where a schedule begins was typed: there is to be one
    own = vars(algorithm) | {"density_schedule": algorithm.resolved_schedule}
    found: list[dict[str, Any]] = [{}]
    for factor, batch, falling in product(LEARNING_RATE_FACTORS, (algorithm.batch_size, *BATCH_SIZES), (False, True)):
        options = {rate: factor * getattr(algorithm, rate), "batch_size": batch}
        options |= DENSITY_ANNEALING if falling else {"density_schedule": DensitySchedule.CONSTANT}
        changed = {
            name: value for name, value in options.items() if name in algorithm.option_names() - fixed_options and value != own[name]
        }
        if changed not in found:
            found.append(changed)
    return found[:num_trials]


def with_options(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """The same run with other options, judged on a tenth of each client's rows, which it does not train on."""
    return replace(config, evaluate_on=EvaluationSplit.VALIDATION, algorithm=replace(resolve(config).algorithm, **options))


def best_options(rows: Sequence[Row], max_bytes: float = np.inf) -> dict[str, Any]:
    """Of the trials of one run, the options with the highest mean on held-out rows at so many bytes; one that diverged is no candidate."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        value = results.value_at_bytes(row, max_bytes) if row["state"] == results.DONE else None
        scores.setdefault(row["label"]["options"], []).append(-np.inf if value is None else value)
    return json.loads(max(scores, key=lambda options: float(np.mean(scores[options]))))


def apply_options(algorithm: BaseAlgorithm, options: Mapping[str, Any]) -> BaseAlgorithm:
    """A method with options that were stored as plain values."""
    return replace(algorithm, **{name: DensitySchedule(value) if name == "density_schedule" else value for name, value in options.items()})


def build_conditions(
    config: RunConfig, num_trials: int, seeds: Sequence[int], label: Mapping[str, Any], fixed_options: frozenset[str] = frozenset()
) -> list[Condition]:
    """One cell a configuration."""
    return [
        Condition(
            label={**label, "options": json.dumps(options)},
            config_for_seed=lambda seed, options=options: replace(with_options(config, options), seed=seed),
            seeds=seeds,
        )
        for options in candidate_options(resolve(config).algorithm, num_trials, fixed_options)
    ]


def tune_run(
    run: ResolvedRun, num_trials: int, folder: Path, *, fixed_options: frozenset[str] = frozenset(), quiet: bool = False
) -> ResolvedRun:
    """The run with the best of `budget` configurations; trials are kept in the folder and never computed twice."""
    if num_trials < 1:
        raise ValueError(f"--tune-trials is a number of configurations and must be at least 1; got {num_trials}")
    if run.evaluate_on is EvaluationSplit.VALIDATION:
        raise ValueError("--tune-trials looks at the held-out rows that --evaluate-on validation would measure on; use --evaluate-on test")
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(
        name="tuning",
        description="settings on held-out rows",
        conditions=build_conditions(run.config, num_trials, [run.seed], {"run": run.id}, fixed_options),
    )
    rows = compute_study(study, folder, quiet=quiet)
    chosen = best_options(rows)
    tried = [{"options": json.loads(row["label"]["options"]), "value": row["values"].get("value")} for row in rows]
    run_directory.atomic_write(folder / CHOSEN_OPTIONS_FILE, json.dumps({"chosen": chosen, "tried": tried}, indent=1).encode())
    return resolve(replace(run.config, algorithm=apply_options(run.algorithm, chosen)))
