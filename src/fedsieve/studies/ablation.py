"""The ablation study: sieve with its defaults, and with one part changed at a time."""

from dataclasses import replace
from itertools import product
from typing import Any

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.constraint import DualUpdate
from fedsieve.studies import equal_bytes, paper
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import DEFAULT_VARIANT, REFERENCE_ALGORITHM
from fedsieve.studies.scale import Scale

VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT_VARIANT: {},
    "gates not learned": {"gate_rate": 0.0},
    "gates neither learned nor sampled": {"learn_gates": False},
    "no error feedback": {"residual_decay": 0.0},
    "signs only": {"reply_bits": 1},
    "numbers only": {"reply_bits": 8},
    "no dual": {"dual_update": DualUpdate.OFF},
    "no annealing": {"initial_gate_probability": 0.001},
    "no refinement": {"search_fraction": 1.0},
}
"""The options of each variant that differ from the defaults."""
CELLS: dict[str, tuple[str, ...]] = {
    "lr": (equal_bytes.PAPER_SETTING, "500 examples", "SNR 3"),
    "lg": (equal_bytes.PAPER_SETTING, "500 examples", "label skew"),
    "mc": (equal_bytes.PAPER_SETTING, "density .01"),
    "mnist": ("density .05", "density .01"),
}
"""Ten settings of tasks with runs of seconds, named as in the equal-bytes study."""


def ablation_study(scale: Scale) -> Study:
    """Every variant in every setting; a smoke test has the synthetic tasks in the paper's setting only."""
    conditions = []
    for task, settings in CELLS.items():
        factors = equal_bytes.REAL_TASK_FACTORS.get(task, equal_bytes.FACTORS)
        if scale.is_smoke_test:
            settings = () if task in equal_bytes.REAL_TASK_FACTORS else settings[:1]
        for setting, (variant, options) in product(settings, VARIANTS.items()):
            default = equal_bytes.with_factor(equal_bytes.base_run(scale, task, REFERENCE_ALGORITHM), factors[setting])
            assert isinstance(default.algorithm, BaseAlgorithm), "`base_run` resolves it"
            run = replace(default, algorithm=replace(default.algorithm, **options))
            label = {"task": task, "setting": setting, "algorithm": REFERENCE_ALGORITHM, "part": variant}
            conditions.append(Condition(label=label, config_for_seed=lambda seed, run=run: replace(run, seed=seed), seeds=scale.seeds))
    return paper.build_study("ablation", scale, conditions)
