"""Tuning of an algorithm's options on validation examples: a small search space, equal for all algorithms."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product
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
Changes = tuple[dict[str, Any], ...]
SCHEDULE_ENDS: Changes = tuple({"density_schedule": DensitySchedule.CUBIC, "anneal_end": end} for end in (0.8, 0.5))
"""Messages that reach the density after 80 % or half of the rounds."""
NUM_ENTRIES: Changes = ({"reply_entries": 4.0}, {"uplink_density": 0.1}, {"adjust_interval": 5})
"""How many entries replies have, or how often a fixed number of them changes."""
START_DENSITIES: Changes = tuple({**SCHEDULE_ENDS[0], "initial_density": start} for start in (None, 1.0))
"""Annealed messages from a multiple of the density (H8), or from all weights."""
BITS: Changes = ({"bits": 4}, {"bits": 8}, {"reply_bits": 1}, {"update_bits": 2})
FIRST_CHANGES = (SCHEDULE_ENDS, NUM_ENTRIES + START_DENSITIES, BITS)
"""After the defaults and two learning rates, each algorithm tries one change of each kind that it has an option for: six trials."""
OTHER_CHANGES: Changes = (
    *({"local_gate_noise": noise} for noise in GateNoise),
    {"density_schedule": DensitySchedule.CONSTANT},
    {"saliency": Saliency.WEIGHT_TIMES_GRADIENT},
    {"scoring_clients": "cohort"},
    {"adjust_fraction": 0.5},
    {"compressor": Compressor.SIGN},
    {"downlink_density": 0.02},
    {"batch_size": 64},
    {"batch_size": 32},
)
NUM_TRIALS = 12


def candidate_options(algorithm: BaseAlgorithm, num_trials: int, fixed_options: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Return the options to try, except fixed ones: the defaults, then one change at a time, then other learning rates with each."""
    rate = "server_learning_rate" if algorithm.workload.exchanges > 1 else "learning_rate"
    if fixed_options & START_DENSITIES[0].keys():
        fixed_options |= START_DENSITIES[0].keys()
    tunable, defaults = algorithm.option_names() - fixed_options, vars(algorithm)
    candidates: list[dict[str, Any]] = [{}]

    def try_changes(changes: Iterable[dict[str, Any]], limit: int | None = None) -> None:
        """Add the changes, or the first `limit` of them, that the algorithm has options for and that were not tried."""
        changed = ({name: value for name, value in options.items() if name in tunable and value != defaults[name]} for options in changes)
        for options in islice((new for new in changed if new not in candidates), limit):
            candidates.append(options)

    rates = [{rate: factor * getattr(algorithm, rate)} for factor in LEARNING_RATE_FACTORS]
    try_changes(rates[:2])
    for kind in FIRST_CHANGES:
        try_changes(kind, 1)
    others = (*OTHER_CHANGES, *chain(*FIRST_CHANGES))
    try_changes((*others, *rates, *(one | other for one, other in product(rates, others))))
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
