"""The hostile study as data: how much of the model is left when some clients lie, under the plain and the robust means."""

from functools import partial
from typing import Any

from fedsieve.algorithms import algorithm_class
from fedsieve.core.aggregation import Mean
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import Counting, Federation, Run
from fedsieve.runtime.failures import Attack, Failures
from fedsieve.studies import paper
from fedsieve.studies.runner import Cell, Study
from fedsieve.studies.scale import Scale, ScaleName

METHODS = ("sieve", "flops-pa", "fed-iter-ht", "fed-avg")
SHARES = (0.1, 0.2, 0.3)
STRENGTHS = {Attack.FLIP: 5.0, Attack.SCALE: 50.0, Attack.RANDOM: 5.0, Attack.NAN: None}
"""Of the first three nothing is long enough to be rejected for its norm: the mean has to bear it."""
SIZES = {"rows": 4000, "features": 200}
STEPS, ROUNDS = 10, 30
PLACE = {"clients": 50, "participation": 0.4}
"""Cohorts of 20: one of five could have a hostile majority by chance."""
TOLERATE = 0.4
"""More than the share of all clients, since a cohort may have more than its share; the most for which krum is safe with 20 replies."""


def hostile(scale: Scale) -> Study:
    """Every attack and share under every mean; without hostile clients once a mean."""
    tiny = scale.tiny
    cells = []
    for task in paper.GENERATED if scale.name is ScaleName.PAPER else ("lr",):
        for method in METHODS[:2] if tiny else METHODS:
            for mean in (Mean.WEIGHTED, Mean.GEOMETRIC) if tiny else Mean:
                cells.append(_cell(scale, task, method, mean, None, 0.0))
                for attack in (Attack.FLIP, Attack.NAN) if tiny else STRENGTHS:
                    cells += [_cell(scale, task, method, mean, attack, share) for share in (SHARES[-1:] if tiny else SHARES)]
    return paper.study("hostile", scale, cells)


def _cell(scale: Scale, task: str, method: str, mean: Mean, attack: Attack | None, share: float) -> Cell:
    label = {"task": task, "method": method, "attack": "none" if attack is None else attack.value, "hostile": share, "mean": mean.value}
    sizes = {"rows": scale.rows, "features": scale.features} if scale.tiny else SIZES
    fields: dict[str, Any] = {
        "task": task,
        "method": method,
        "rounds": scale.rounds if scale.tiny else ROUNDS,
        "bytes": Counting.SAMPLED,
        "data": Synthetic(**sizes),
        "federation": Federation(**PLACE, mean=mean, tolerate=TOLERATE if mean in (Mean.TRIMMED, Mean.KRUM) else None),
        "failures": Failures() if attack is None else Failures(hostile=share, attack=attack, strength=STRENGTHS[attack]),
        "algorithm": algorithm_class(method)(**{"steps": STEPS, **paper.settings(scale, task, method)}),
    }
    return Cell(label=label, run=partial(_run, **fields), seeds=scale.sweep_seeds)


def _run(seed: int, **fields: Any) -> Run:
    return Run(seed=seed, **fields)
