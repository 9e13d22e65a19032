"""The constraint study: does the density reach its target without log-alpha scaling, from a dense and from a sparse start?"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedsieve.algorithms.flops_pa import DualLocation
from fedsieve.algorithms.gated import GateNoise
from fedsieve.core.constraint import ConstraintScale, DualUpdate
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling
from fedsieve.studies import paper
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import (
    BISECTION,
    PAPER_DUAL,
    PAPER_RECIPE,
    PUBLISHED,
    RECOMMENDED,
    RECOMMENDED_DUAL,
    REFERENCE_ALGORITHM,
)
from fedsieve.studies.scale import Scale, ScaleName

DENSITIES = (0.5, 0.2, 0.05, 0.01, 0.005)
SHORT_DENSITIES: Mapping[str, Sequence[float]] = {"lr": (0.5, 0.05, 0.01), "lg": (0.5, 0.05, 0.01), "mc": (0.05,)}
"""Densities below scale paper, fewer on the slow task."""
LARGE_TASK = "rcv1"
"""A task with too many weights for a multiplier of each client."""
REAL_TASKS = ("mnist", LARGE_TASK)
"""Real data, at scale paper."""
INITIAL_GATE_PROBABILITIES = {"dense": 0.95, "sparse": 0.2}
"""rho_init: almost all gates open, and just above the value at which every test-time gate is 0 (P(z != 0) is .99 and .55)."""
ANNEALED = {"density_schedule": DensitySchedule.CUBIC, "initial_density": 0.98, "anneal_end": 0.8}
"""A target that falls while gates learn. With the final target from the first round, bisection closes all gates equally."""
BISECTION_OPTIONS = {"dual_update": DualUpdate.BISECTION}
ANNEALED_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "flops": (f"{BISECTION}, annealed target", BISECTION_OPTIONS | ANNEALED | {"gate_rate": 0.1}),
    "flops-pa": (f"{BISECTION}, annealed target", BISECTION_OPTIONS | ANNEALED | {"gate_rate": 1.0, "local_gate_noise": GateNoise.SAMPLED}),
}
"""Bisection on a falling target. The messages of FLoPS-PA follow the target: they are denser while it falls."""
MIRROR_VARIANT = ("mirror ascent, annealed target", {"dual_update": DualUpdate.MIRROR, **ANNEALED, "gate_rate": 0.1})
"""The best ascent we know, on the same falling target (decision B5)."""
ASCENT = {"dual_update": DualUpdate.ASCENT}
LOCATION_VARIANTS: dict[str, dict[str, Any]] = {
    "gradient ascent at the server": ASCENT | {"dual_location": DualLocation.SERVER},
    "gradient ascent at the clients": ASCENT | {"dual_location": DualLocation.CLIENT},
}
"""The two routes of the paper (L128): one constraint on the aggregated gates, or a constraint of each client (decision B6)."""


def constraint_study(scale: Scale) -> Study:
    """Return the study of the constraint."""
    densities: dict[str, Sequence[float]] = dict(SHORT_DENSITIES)
    if scale.name is ScaleName.PAPER:
        densities = {task: DENSITIES for task in (*paper.SYNTHETIC_TASKS, *REAL_TASKS)}  # noqa: C420 # the keys are any strings
    conditions = []
    for task, density, start in ((*case, start) for case in task_densities(densities, scale) for start in INITIAL_GATE_PROBABILITIES):
        for algorithm, variant, options in _variants(task):
            label = {"task": task, "algorithm": algorithm, "variant": variant, "target": density, "start": start}
            probability = {"initial_gate_probability": INITIAL_GATE_PROBABILITIES[start]}
            conditions.append(_condition(scale, label, probability | options))
    return paper.build_study("constraint", scale, conditions)


def task_densities(densities: Mapping[str, Sequence[float]], scale: Scale) -> list[tuple[str, float]]:
    """Return every task with each of its densities that keeps at least one weight."""
    return [(task, density) for task, values in densities.items() for density in values if density * scale.num_features >= 1]


def _variants(task: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return algorithm, name and options of the variants on a task. Those judged by a claim come as published and as recommended."""
    variants = [
        *([("flops", PAPER_RECIPE, {})] if task in paper.SYNTHETIC_TASKS else []),
        ("flops", PAPER_DUAL, ASCENT | {"constraint_scale": ConstraintScale.MEAN}),
        ("flops", RECOMMENDED_DUAL, {}),
        ("flops", *MIRROR_VARIANT),
        *(("flops-pa", name, options) for name, options in LOCATION_VARIANTS.items() if task != LARGE_TASK),
        *((algorithm, *annealed) for algorithm, annealed in ANNEALED_VARIANTS.items()),
    ]
    without_scaling = [(algorithm, name, {"log_alpha_scaling": LogAlphaScaling.OFF, **options}) for algorithm, name, options in variants]
    return [(REFERENCE_ALGORITHM, f"{BISECTION}, schedule of sieve", {}), *without_scaling]


def _condition(scale: Scale, label: dict[str, Any], options: dict[str, Any]) -> Condition:
    task, algorithm, density = label["task"], label["algorithm"], label["target"]
    if task in paper.SYNTHETIC_TASKS:
        setting = PUBLISHED if label["variant"] == PAPER_RECIPE else RECOMMENDED
        settings = options | paper.default_settings(scale, algorithm)
        run = paper.synthetic_run_factory(scale, task, algorithm, target_density=density, setting=setting, **settings)
    else:
        run = paper.real_run_factory(scale, task, algorithm, density, **options)
    is_judged = label["variant"] in (PAPER_RECIPE, RECOMMENDED_DUAL) and label["start"] == "dense"
    return Condition(label=label, config_for_seed=run, seeds=scale.seeds if is_judged else scale.sweep_seeds[:2])
