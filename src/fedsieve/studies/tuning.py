"""Tuning of an algorithm's options on validation examples: a small search space, equal for all algorithms."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.fed_ef import Compressor
from fedsieve.algorithms.gated import GateNoise
from fedsieve.algorithms.ssfl import Saliency
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.settings import field_types, parse_settings
from fedsieve.experiments.config import EvaluationSplit, RunConfig
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.storage import run_directory
from fedsieve.studies import results
from fedsieve.studies.compute import Condition, Study, compute_study
from fedsieve.studies.results import Row

CHOSEN_OPTIONS_FILE = "chosen.json"
LEARNING_RATE_FACTORS = (0.5, 2.0, 0.25, 4.0, 0.125)
BATCH_SIZES = (64, 32)
SCHEDULES = (
    {"density_schedule": DensitySchedule.CONSTANT},
    *(
        {"density_schedule": DensitySchedule.CUBIC, "initial_density": start, "anneal_end": end}
        for start, end in ((None, 0.5), (None, 0.8), (1.0, 0.8))
    ),
)
"""Messages of one density, or from a multiple of the density (H8) or all weights until half or 80 % of the rounds."""
GATE_NOISE = tuple({"local_gate_noise": noise} for noise in GateNoise)
OWN_OPTIONS = (
    {"reply_entries": 4.0},
    {"saliency": Saliency.WEIGHT_TIMES_GRADIENT},
    {"scoring_clients": "cohort"},
    {"adjust_fraction": 0.5},
    {"adjust_interval": 5},
    {"update_bits": 2},
    {"compressor": Compressor.SIGN},
    {"downlink_density": 0.02},
    {"uplink_density": 0.1},
)
"""Options of single algorithms."""
NUM_TRIALS = 12


def candidate_options(algorithm: BaseAlgorithm, num_trials: int, fixed_options: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Return the options to try, except fixed ones: the defaults, then one change at a time, then other learning rates with each."""
    rate = "server_learning_rate" if algorithm.workload.exchanges > 1 else "learning_rate"
    if fixed_options & {"density_schedule", "initial_density", "anneal_end"}:
        fixed_options |= {*SCHEDULES[1]}
    tunable, defaults = algorithm.option_names() - fixed_options, vars(algorithm)
    rates: list[dict[str, Any]] = [{rate: factor * getattr(algorithm, rate)} for factor in LEARNING_RATE_FACTORS]
    others: list[dict[str, Any]] = [*({"batch_size": size} for size in BATCH_SIZES), *SCHEDULES, *GATE_NOISE, *OWN_OPTIONS]
    candidates: list[dict[str, Any]] = []
    for options in ({}, *rates[:2], *others, *rates[2:], *(one | other for one, other in product(rates, others))):
        changed = {name: value for name, value in options.items() if name in tunable and value != defaults[name]}
        if changed not in candidates:
            candidates.append(changed)
    return candidates[:num_trials]


def with_options(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Return the run with other options, evaluated on validation examples: a tenth of each client's, not used for training."""
    return replace(config, evaluate_on=EvaluationSplit.VALIDATION, algorithm=replace(resolve(config).algorithm, **options))


def best_options(rows: Sequence[Row], max_bytes: float = np.inf, curve: str | None = None) -> dict[str, Any]:
    """Return the options with the highest mean on validation examples within `max_bytes`; trials that diverged do not count.

    `curve` is the stored curve to compare (default: the metric of the sparse model).
    """
    scores: dict[str, list[float]] = {}
    for row in rows:
        value = results.value_at_bytes(row, max_bytes, curve) if row["state"] == results.DONE else None
        scores.setdefault(row["label"]["options"], []).append(-np.inf if value is None else value)
    return json.loads(max(scores, key=lambda options: float(np.mean(scores[options]))))


def apply_options(algorithm: BaseAlgorithm, options: Mapping[str, Any]) -> BaseAlgorithm:
    """Return the algorithm with options that were stored as plain values."""
    return replace(algorithm, **parse_settings(field_types(type(algorithm)), options))


def build_conditions(
    config: RunConfig, candidates: Sequence[Mapping[str, Any]], seeds: Sequence[int], label: Mapping[str, Any]
) -> list[Condition]:
    """Return one condition per candidate."""
    return [
        Condition(
            label={**label, "options": json.dumps(options)},
            config_for_seed=lambda seed, options=options: replace(with_options(config, options), seed=seed),
            seeds=seeds,
        )
        for options in candidates
    ]


def tune_run(
    run: ResolvedRun, num_trials: int, folder: Path, *, fixed_options: frozenset[str] = frozenset(), quiet: bool = False
) -> ResolvedRun:
    """Return the run with the best of `num_trials` candidates. Trials are stored in the folder and never computed twice."""
    if num_trials < 1:
        raise ValueError(f"--tune-trials is a number of trials and must be at least 1; got {num_trials}")
    if run.evaluate_on is EvaluationSplit.VALIDATION:
        raise ValueError("--tune-trials needs the validation examples, so that the run cannot be evaluated on them; use --evaluate-on test")
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(
        name="tuning",
        description="options on validation examples",
        conditions=build_conditions(run.config, candidate_options(run.algorithm, num_trials, fixed_options), [run.seed], {"run": run.id}),
    )
    rows = compute_study(study, folder, workers=run.workers, quiet=quiet)
    chosen = best_options(rows)
    tried = [{"options": json.loads(row["label"]["options"]), "value": row["values"].get("value")} for row in rows]
    run_directory.atomic_write(folder / CHOSEN_OPTIONS_FILE, json.dumps({"chosen": chosen, "tried": tried}, indent=1).encode())
    return resolve(replace(run.config, algorithm=apply_options(run.algorithm, chosen)))
