"""The constraint study: does the density reach its target without log-alpha scaling, from a dense and from a sparse start?"""

from typing import Any

from fedsieve.algorithms.flops_pa import DualLocation, GateNoise
from fedsieve.core.constraint import ConstraintScale, DualUpdate
from fedsieve.core.schedules import DensitySchedule
from fedsieve.studies import paper
from fedsieve.studies.results import BISECTION, PAPER_DUAL, REFERENCE_ALGORITHM
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale, ScaleName

DENSITIES = (0.5, 0.2, 0.05, 0.01, 0.005)
LARGE_TASK = "rcv1"
"""A task with megabytes per dense message: below scale paper without the mirror ascent of FLoPS."""
REAL_TASKS = ("mnist", LARGE_TASK)
"""Real data: below scale paper only sieve and the mirror ascent of FLoPS."""
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
    conditions = []
    for task in (*paper.SYNTHETIC_TASKS, *(() if scale.is_smoke_test else REAL_TASKS)):
        for density in DENSITIES:
            if density * scale.num_features >= 1:
                for start, probability in INITIAL_GATE_PROBABILITIES.items():
                    for algorithm, variant, options in _variants(scale, task):
                        label = {"task": task, "algorithm": algorithm, "variant": variant, "target": density, "start": start}
                        conditions.append(_condition(scale, label, {"initial_gate_probability": probability, **options}))
    return paper.build_study("constraint", scale, conditions)


def _variants(scale: Scale, task: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return algorithm, name and options of the variants on a task."""
    is_full = scale.name is ScaleName.PAPER
    variants: list[tuple[str, str, dict[str, Any]]] = []
    if task != LARGE_TASK or is_full:
        variants.append(("flops", *MIRROR_VARIANT))
    if task not in REAL_TASKS or is_full:
        paper_dual = ASCENT | {"constraint_scale": ConstraintScale.MEAN}
        variants += [("flops", PAPER_DUAL, paper_dual), ("flops", "gradient ascent, sum scale", ASCENT)]
        variants += [("flops-pa", name, options) for name, options in LOCATION_VARIANTS.items()] if task != LARGE_TASK else []
        for algorithm, annealed in ANNEALED_VARIANTS.items():
            variants += [(algorithm, BISECTION, BISECTION_OPTIONS), (algorithm, *annealed)]
    without_scaling = [(algorithm, name, {"log_alpha_scaling_rate": 0.0, **options}) for algorithm, name, options in variants]
    return [(REFERENCE_ALGORITHM, f"{BISECTION}, schedule of sieve", {}), *without_scaling]


def _condition(scale: Scale, label: dict[str, Any], options: dict[str, Any]) -> Condition:
    task, algorithm, density = label["task"], label["algorithm"], label["target"]
    if task in paper.SYNTHETIC_TASKS:
        settings = options | paper.default_settings(scale, algorithm)
        run = paper.synthetic_run_factory(scale, task, algorithm, target_density=density, **settings)
    else:
        run = paper.real_run_factory(scale, task, algorithm, density, **options)
    return Condition(label=label, config_for_seed=run, seeds=scale.sweep_seeds[:2])
