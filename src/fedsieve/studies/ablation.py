"""The ablation study: sieve with its defaults, and with one part changed at a time."""

from dataclasses import replace
from typing import Any

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.sieve_rules import Ending, Uplink
from fedsieve.core.optimizers import Optimizer
from fedsieve.studies import equal_bytes, paper
from fedsieve.studies.results import DEFAULT_VARIANT, REFERENCE_ALGORITHM
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale

VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT_VARIANT: {},
    "gates not learned": {"gate_rate": 0.0},
    "no error feedback": {"residual_decay": 0.0},
    "uplink sends signs": {"uplink": Uplink.UPDATES},
    "uplink sends weights": {"uplink": Uplink.WEIGHTS},
    "as many signs as kept weights": {"reach": 1.0},
    "eight bits": {"bits": 8},
    "no polishing": {"search": 1.0},
    "polishing from half of the rounds": {"search": 0.5},
    "support frozen": {"ending": Ending.FROZEN},
    "gates start at .2": {"initial_gate_probability": 0.2},
    "momentum at the server": {"server_optimizer": Optimizer.MOMENTUM, "server_momentum": 0.3},
    "Adam at the server": {"server_optimizer": Optimizer.ADAM, "server_learning_rate": 0.01},
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
