"""Studies of our own as data, beside the paper's; and the way from a name to a study."""

from collections.abc import Callable

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.flops_pa import GateNoise
from fedsieve.core.constraint import ConstraintScale, DualUpdate
from fedsieve.core.schedules import DensitySchedule
from fedsieve.experiments.config import ByteCounting, RunConfig
from fedsieve.studies import ablation, equal_bytes, paper, robustness
from fedsieve.studies.catalog import PAPER_STUDIES, STUDIES
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale, ScaleName

BISECTION_ANNEALED = {
    "dual_update": DualUpdate.BISECTION,
    "density_schedule": DensitySchedule.CUBIC,
    "initial_density": 0.98,
    "anneal_end": 0.8,
}
"""The exact dual on a target that falls while gates learn, fast enough to part: at once on its target it closes all gates alike."""
BISECTION_ANNEALED_FLOPS = BISECTION_ANNEALED | {"gate_rate": 0.1}
MIRROR_ANNEALED_FLOPS = BISECTION_ANNEALED_FLOPS | {"dual_update": DualUpdate.MIRROR}
"""The best ascent found, on the same falling target (decision B5)."""
BISECTION_ANNEALED_PA = BISECTION_ANNEALED | {"gate_rate": 1.0, "local_gate_noise": GateNoise.SAMPLED}
"""Its messages follow the target: they are denser while it falls."""
DENSITIES = (0.5, 0.2, 0.05, 0.01, 0.005)
LARGE_TASK = "rcv1"
REAL_TASKS = ("mnist", LARGE_TASK)
"""Real data: sieve and the best ascent alone but at the paper's scale, and without it where a message of every weight has megabytes."""
INITIAL_GATE_PROBABILITIES = {"dense": 0.95, "sparse": 0.2}
"""rho_init of gates that begin almost all open, and just above where every test-time gate would be 0 (P(z != 0) is .99 and .55)."""


def constraint_study(scale: Scale) -> Study:
    """Whether density reaches its target by the constraint alone, from a dense and from a sparse start."""
    cells = []
    for task in (*paper.SYNTHETIC_TASKS, *(() if scale.is_smoke_test else REAL_TASKS)):
        for target in DENSITIES:
            if target * scale.num_features < 1:
                continue
            for start, logit in INITIAL_GATE_PROBABILITIES.items():
                begin = {"initial_gate_probability": logit}
                cells.append(_make_condition(scale, task, "sieve", "exact dual, its own schedule", target, start, begin))
                gates, whole = begin | {"log_alpha_scaling_rate": 0.0}, scale.name is ScaleName.PAPER
                if task != LARGE_TASK or whole:
                    cells.append(
                        _make_condition(
                            scale, task, "flops", "natural ascent, falling target", target, start, gates | MIRROR_ANNEALED_FLOPS
                        )
                    )
                if task in REAL_TASKS and not whole:
                    continue
                exchanges = paper.algorithm_options(scale, task, "flops").get("local_steps", algorithm_class("flops").local_steps)
                inert = {"constraint_scale": ConstraintScale.MEAN, "dual_rate": exchanges / scale.num_features}
                cells.append(_make_condition(scale, task, "flops", "the paper's dual", target, start, gates | inert))
                cells.append(_make_condition(scale, task, "flops", "ascent in counts", target, start, gates))
                cells.append(
                    _make_condition(scale, task, "flops", "exact dual", target, start, gates | {"dual_update": DualUpdate.BISECTION})
                )
                cells.append(
                    _make_condition(scale, task, "flops", "exact dual, falling target", target, start, gates | BISECTION_ANNEALED_FLOPS)
                )
                cells.append(
                    _make_condition(scale, task, "flops-pa", "exact dual", target, start, gates | {"dual_update": DualUpdate.BISECTION})
                )
                cells.append(
                    _make_condition(scale, task, "flops-pa", "exact dual, falling target", target, start, gates | BISECTION_ANNEALED_PA)
                )
    return paper.build_study("constraint", scale, cells)


def _make_condition(
    scale: Scale, task: str, algorithm_name: str, variant: str, target_density: float, start: str, options: dict
) -> Condition:
    label = {"task": task, "method": algorithm_name, "variant": variant, "target": target_density, "start": start}
    if task in paper.SYNTHETIC_TASKS:
        share = paper.epoch_settings(scale) if algorithm_name == "flops" else paper.averaging_settings(scale)
        run: Callable[[int], RunConfig] = paper.synthetic_run_factory(
            scale, task, algorithm_name, target_density=target_density, **options, **share
        )
    else:
        algorithm = algorithm_class(algorithm_name)(**paper.algorithm_options(scale, task, algorithm_name, **options))

        def run(seed: int) -> RunConfig:
            return RunConfig(
                task=task,
                algorithm_name=algorithm_name,
                density=target_density,
                seed=seed,
                rounds=scale.real_rounds,
                byte_counting=ByteCounting.SAMPLED,
                algorithm=algorithm,
            )

    return Condition(label=label, config_for_seed=run, seeds=scale.sweep_seeds[:2])


BUILDERS: dict[str, Callable[[Scale], Study]] = {
    **{name: getattr(paper, name.replace("-", "_")) for name in PAPER_STUDIES},
    "constraint": constraint_study,
    "robustness": robustness.robustness_study,
    "ablation": ablation.ablation_study,
}
TUNED_STUDIES = {"equal-bytes": (equal_bytes.tuning_study, equal_bytes.selected_options, equal_bytes.equal_bytes_study)}
"""Studies whose settings are tuned first: the trials, what is chosen of them, and the study with it."""
assert {*BUILDERS, *TUNED_STUDIES} == STUDIES.keys()
