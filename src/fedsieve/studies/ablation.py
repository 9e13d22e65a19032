"""The ablation as data: sieve as it comes, and with one of its parts taken away or done otherwise."""

from dataclasses import replace
from typing import Any

from fedsieve.algorithms.sieve_rules import Ending, Uplink
from fedsieve.core.optimizers import Optimizer
from fedsieve.studies import equal_bytes, paper
from fedsieve.studies.results import DEFAULT_VARIANT, REFERENCE_METHOD
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale

VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULT_VARIANT: {},
    "gates not learned": {"gate_rate": 0.0},
    "no error feedback": {"residual_decay": 0.0},
    "uplink sends signs": {"uplink": Uplink.UPDATES},
    "uplink sends weights": {"uplink": Uplink.WEIGHTS},
    "signs of as many as it keeps": {"reach": 1.0},
    "eight bits": {"bits": 8},
    "no polishing": {"search": 1.0},
    "polished from half on": {"search": 0.5},
    "support frozen": {"ending": Ending.FROZEN},
    "gates start at .2": {"initial_gate_probability": 0.2},
    "momentum at the server": {"server_optimizer": Optimizer.MOMENTUM, "server_momentum": 0.3},
    "Adam at the server": {"server_optimizer": Optimizer.ADAM, "server_learning_rate": 0.01},
}
"""Variants by name: the options that depart from the defaults."""
REAL_TASKS = ("mnist", "emnist", "rcv1")
"""Real data whose runs take a minute at most."""


def ablation_study(scale: Scale) -> Study:
    """Every part on the generated tasks in the paper's setting, and on real data at the densities of the equal-bytes study."""
    places = {(task, ""): {} for task in paper.SYNTHETIC_TASKS}
    if not scale.is_smoke_test:
        places |= {(task, name): factor for task in REAL_TASKS for name, factor in equal_bytes.REAL_TASK_FACTORS[task].items()}
    cells = []
    for (task, name), factor in places.items():
        run = equal_bytes.with_factor(equal_bytes.base_run(scale, task, REFERENCE_METHOD), factor)
        seeds = scale.real_seeds if task in REAL_TASKS else scale.seeds
        for part, options in VARIANTS.items():
            changed = replace(run, algorithm=replace(run.algorithm, **options))
            label = {"task": task, "setting": name, "method": REFERENCE_METHOD, "part": part}
            cells.append(Condition(label=label, config_for_seed=lambda seed, run=changed: replace(run, seed=seed), seeds=seeds))
    return paper.build_study("ablation", scale, cells)
