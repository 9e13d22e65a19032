"""The ablation as data: sieve as it comes, and with one of its parts taken away or done otherwise."""

from dataclasses import replace
from typing import Any

from fedsieve.algorithms.sieve_rules import Ending, Uplink
from fedsieve.core.optimizers import Optimizer
from fedsieve.studies import equal_bytes, paper
from fedsieve.studies.results import BASE, WHOLE
from fedsieve.studies.runner import Cell, Study
from fedsieve.studies.scale import Scale

PARTS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    "gates not learned": {"gate_rate": 0.0},
    "nothing remembered": {"memory": 0.0},
    "signs travel": {"uplink": Uplink.UPDATES},
    "weights travel": {"uplink": Uplink.WEIGHTS},
    "signs of as many as it keeps": {"reach": 1.0},
    "eight bits": {"bits": 8},
    "no polishing": {"search": 1.0},
    "polished from half on": {"search": 0.5},
    "support frozen": {"ending": Ending.FROZEN},
    "gates start at .2": {"initial_logit_density": 0.2},
    "momentum at the server": {"server": Optimizer.MOMENTUM, "server_momentum": 0.3},
    "Adam at the server": {"server": Optimizer.ADAM, "server_rate": 0.01},
}
"""Variants by name: the options that depart from the defaults."""
REAL = ("mnist", "emnist", "rcv1")
"""Real data whose runs take a minute at most."""


def ablation(scale: Scale) -> Study:
    """Every part on the generated tasks in the paper's setting, and on real data at the densities of the equal-bytes study."""
    places = {(task, ""): {} for task in paper.GENERATED}
    if not scale.tiny:
        places |= {(task, name): factor for task in REAL for name, factor in equal_bytes.REAL[task].items()}
    cells = []
    for (task, name), factor in places.items():
        run = equal_bytes.varied(equal_bytes.base(scale, task, BASE), factor)
        seeds = scale.real_seeds if task in REAL else scale.seeds
        for part, options in PARTS.items():
            changed = replace(run, algorithm=replace(run.algorithm, **options))
            label = {"task": task, "setting": name, "method": BASE, "part": part}
            cells.append(Cell(label=label, run=lambda seed, run=changed: replace(run, seed=seed), seeds=seeds))
    return paper.study("ablation", scale, cells)
