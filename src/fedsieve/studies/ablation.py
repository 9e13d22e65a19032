"""The ablation study: sieve with its defaults, and with one part changed at a time."""

from dataclasses import replace
from typing import Any

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.constraint import DualUpdate
from fedsieve.studies import equal_bytes, paper
from fedsieve.studies.results import DEFAULT_VARIANT, REFERENCE_ALGORITHM
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale

VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT_VARIANT: {},
    "gates not learned": {"gate_rate": 0.0},
    "no error feedback": {"residual_decay": 0.0},
    "signs only": {"reply_bits": 1},
    "numbers only": {"reply_bits": 8},
    "no dual": {"dual_update": DualUpdate.OFF},
    "no annealing": {"initial_gate_probability": 0.001},
    "no refinement": {"search_fraction": 1.0},
}
"""The options of each variant that differ from the defaults."""
FAST_REAL_TASKS = ("mnist", "emnist", "rcv1")
"""Real data with runs of a minute at most."""


def ablation_study(scale: Scale) -> Study:
    """Every variant on the synthetic tasks in the paper's setting, and on real data at the densities of the equal-bytes study."""
    cases: dict[tuple[str, str], dict[str, Any]] = {(task, ""): {} for task in paper.SYNTHETIC_TASKS}
    if not scale.is_smoke_test:
        cases |= {(task, name): factor for task in FAST_REAL_TASKS for name, factor in equal_bytes.REAL_TASK_FACTORS[task].items()}
    conditions = []
    for (task, setting), factor in cases.items():
        default = equal_bytes.with_factor(equal_bytes.base_run(scale, task, REFERENCE_ALGORITHM), factor)
        assert isinstance(default.algorithm, BaseAlgorithm), "`base_run` resolves it"
        seeds = scale.real_seeds if task in FAST_REAL_TASKS else scale.seeds
        for variant, options in VARIANTS.items():
            run = replace(default, algorithm=replace(default.algorithm, **options))
            label = {"task": task, "setting": setting, "algorithm": REFERENCE_ALGORITHM, "part": variant}
            conditions.append(Condition(label=label, config_for_seed=lambda seed, run=run: replace(run, seed=seed), seeds=seeds))
    return paper.build_study("ablation", scale, conditions)
