"""Studies of our own as data, beside the paper's; and the way from a name to a study."""

from collections.abc import Callable

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.flops_pa import GateNoise
from fedsieve.core.constraint import Dual, Form
from fedsieve.core.selection import Schedule
from fedsieve.experiments.config import Counting, Run
from fedsieve.studies import ablation, equal_bytes, paper, robustness
from fedsieve.studies.catalog import PAPER, STUDIES
from fedsieve.studies.runner import Cell, Study
from fedsieve.studies.scale import Scale, ScaleName

FALLING = {"dual": Dual.EXACT, "schedule": Schedule.CUBIC, "start_density": 0.98, "schedule_end": 0.8}
"""The exact dual on a target that falls while gates learn, fast enough to part: at once on its target it closes all gates alike."""
FALLING_FLOPS = FALLING | {"gate_rate": 0.1}
NATURAL_FLOPS = FALLING_FLOPS | {"dual": Dual.NATURAL}
"""The best ascent found, on the same falling target (decision B5)."""
FALLING_PA = FALLING | {"gate_rate": 1.0, "step_gates": GateNoise.SAMPLED}
"""Its messages follow the target: they are denser while it falls."""
DENSITIES = (0.5, 0.2, 0.05, 0.01, 0.005)
LARGE = "rcv1"
REAL = ("mnist", LARGE)
"""Real data: sieve and the best ascent alone but at the paper's scale, and without it where a message of every weight has megabytes."""
STARTS = {"dense": 0.95, "sparse": 0.2}
"""rho_init of gates that begin almost all open, and just above where every test-time gate would be 0 (P(z != 0) is .99 and .55)."""


def constraint(scale: Scale) -> Study:
    """Whether density reaches its target by the constraint alone, from a dense and from a sparse start."""
    cells = []
    for task in (*paper.GENERATED, *(() if scale.tiny else REAL)):
        for target in DENSITIES:
            if target * scale.features < 1:
                continue
            for start, logit in STARTS.items():
                begin = {"initial_logit_density": logit}
                cells.append(_cell(scale, task, "sieve", "exact dual, its own schedule", target, start, begin))
                gates, whole = begin | {"scaling_rate": 0.0}, scale.name is ScaleName.PAPER
                if task != LARGE or whole:
                    cells.append(_cell(scale, task, "flops", "natural ascent, falling target", target, start, gates | NATURAL_FLOPS))
                if task in REAL and not whole:
                    continue
                exchanges = paper.settings(scale, task, "flops").get("steps", algorithm_class("flops").steps)
                inert = {"constraint": Form.PAPER, "dual_rate": exchanges / scale.features}
                cells.append(_cell(scale, task, "flops", "the paper's dual", target, start, gates | inert))
                cells.append(_cell(scale, task, "flops", "ascent in counts", target, start, gates))
                cells.append(_cell(scale, task, "flops", "exact dual", target, start, gates | {"dual": Dual.EXACT}))
                cells.append(_cell(scale, task, "flops", "exact dual, falling target", target, start, gates | FALLING_FLOPS))
                cells.append(_cell(scale, task, "flops-pa", "exact dual", target, start, gates | {"dual": Dual.EXACT}))
                cells.append(_cell(scale, task, "flops-pa", "exact dual, falling target", target, start, gates | FALLING_PA))
    return paper.study("constraint", scale, cells)


def _cell(scale: Scale, task: str, method: str, variant: str, target: float, start: str, options: dict) -> Cell:
    label = {"task": task, "method": method, "variant": variant, "target": target, "start": start}
    if task in paper.GENERATED:
        share = paper.epochs(scale) if method == "flops" else paper.averaging(scale)
        run: Callable[[int], Run] = paper.generated(scale, task, method, target=target, **options, **share)
    else:
        algorithm = algorithm_class(method)(**paper.settings(scale, task, method, **options))

        def run(seed: int) -> Run:
            return Run(
                task=task, method=method, density=target, seed=seed, rounds=scale.real_rounds, bytes=Counting.SAMPLED, algorithm=algorithm
            )

    return Cell(label=label, run=run, seeds=scale.sweep_seeds[:2])


BUILDERS: dict[str, Callable[[Scale], Study]] = {
    **{name: getattr(paper, name.replace("-", "_")) for name in PAPER},
    "constraint": constraint,
    "hostile": robustness.hostile,
    "ablation": ablation.ablation,
}
TUNED = {"equal-bytes": (equal_bytes.tuning, equal_bytes.chosen, equal_bytes.equal_bytes)}
"""Studies whose settings are tuned first: the trials, what is chosen of them, and the study with it."""
assert {*BUILDERS, *TUNED} == STUDIES.keys()
