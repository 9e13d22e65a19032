"""The hostile study as data: how much of the model is left when some clients lie, under the plain and the robust means."""

from functools import partial
from typing import Any

from fedsieve.algorithms import algorithm_class
from fedsieve.core.aggregation import Aggregator
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import ByteCounting, FederationConfig, RunConfig
from fedsieve.runtime.failures import Attack, Failures
from fedsieve.studies import paper
from fedsieve.studies.runner import Condition, Study
from fedsieve.studies.scale import Scale, ScaleName

ALGORITHM_NAMES = ("sieve", "flops-pa", "fed-iter-ht", "fed-avg")
MALICIOUS_FRACTIONS = (0.1, 0.2, 0.3)
ATTACK_SCALES = {Attack.FLIP: 5.0, Attack.SCALE: 50.0, Attack.RANDOM: 5.0, Attack.NAN: None}
"""Of the first three nothing is long enough to be rejected for its norm: the mean has to bear it."""
DATA_SIZES = {"num_examples": 4000, "num_features": 200}
LOCAL_STEPS, NUM_ROUNDS = 10, 30
COHORT_SETTINGS = {"clients": 50, "participation": 0.4}
"""Cohorts of 20: one of five could have a hostile majority by chance."""
MAX_MALICIOUS_FRACTION = 0.4
"""More than the share of all clients, since a cohort may have more than its share; the most for which krum is safe with 20 replies."""


def robustness_study(scale: Scale) -> Study:
    """Every attack and share under every mean; without hostile clients once a mean."""
    tiny = scale.is_smoke_test
    cells = []
    for task in paper.SYNTHETIC_TASKS if scale.name is ScaleName.PAPER else ("lr",):
        for method in ALGORITHM_NAMES[:2] if tiny else ALGORITHM_NAMES:
            for mean in (Aggregator.WEIGHTED, Aggregator.GEOMETRIC_MEDIAN) if tiny else Aggregator:
                cells.append(_make_condition(scale, task, method, mean, None, 0.0))
                for attack in (Attack.FLIP, Attack.NAN) if tiny else ATTACK_SCALES:
                    cells += [
                        _make_condition(scale, task, method, mean, attack, share)
                        for share in (MALICIOUS_FRACTIONS[-1:] if tiny else MALICIOUS_FRACTIONS)
                    ]
    return paper.build_study("robustness", scale, cells)


def _make_condition(
    scale: Scale, task: str, algorithm_name: str, aggregator: Aggregator, attack: Attack | None, malicious_fraction: float
) -> Condition:
    label = {
        "task": task,
        "method": algorithm_name,
        "attack": "none" if attack is None else attack.value,
        "malicious": malicious_fraction,
        "aggregator": aggregator.value,
    }
    sizes = {"num_examples": scale.num_examples, "num_features": scale.num_features} if scale.is_smoke_test else DATA_SIZES
    fields: dict[str, Any] = {
        "task": task,
        "algorithm_name": algorithm_name,
        "rounds": scale.rounds if scale.is_smoke_test else NUM_ROUNDS,
        "byte_counting": ByteCounting.SAMPLED,
        "data": Synthetic(**sizes),
        "federation": FederationConfig(
            **COHORT_SETTINGS,
            aggregator=aggregator,
            max_malicious_fraction=MAX_MALICIOUS_FRACTION if aggregator in (Aggregator.TRIMMED, Aggregator.KRUM) else None,
        ),
        "failures": Failures()
        if attack is None
        else Failures(malicious_fraction=malicious_fraction, attack=attack, attack_scale=ATTACK_SCALES[attack]),
        "algorithm": algorithm_class(algorithm_name)(
            **{"local_steps": LOCAL_STEPS, **paper.algorithm_options(scale, task, algorithm_name)}
        ),
    }
    return Condition(label=label, config_for_seed=partial(_build_run, **fields), seeds=scale.sweep_seeds)


def _build_run(seed: int, **fields: Any) -> RunConfig:
    return RunConfig(seed=seed, **fields)
