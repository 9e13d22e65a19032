"""The robustness study: quality with malicious clients, under every aggregator."""

from functools import partial
from itertools import product
from typing import Any

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.defaults import batches_per_round
from fedsieve.core.aggregation import Aggregator
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import ByteCounting, FederationConfig
from fedsieve.runtime.attacks import Attack
from fedsieve.runtime.failures import Failures
from fedsieve.studies import paper
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import NO_ATTACK
from fedsieve.studies.scale import Scale, ScaleName

ALGORITHM_NAMES = ("sieve", "flops-pa", "fed-iter-ht", "fed-avg")
MALICIOUS_FRACTIONS = (0.1, 0.2, 0.3)
ATTACK_SCALES = dict.fromkeys(Attack) | {Attack.SCALE: 50.0}
"""Scales of attacks, None: the default. Norms stay below the limit at which replies are rejected: the aggregator has to handle them."""
DATA_SIZES = {"num_examples": 4000, "num_features": 200}
LOCAL_STEPS, NUM_ROUNDS = 10, 30
NUM_CLIENTS, PARTICIPATION = 50, 0.4
"""Cohorts of 20 clients: a cohort of five could have a malicious majority by chance."""
MAX_MALICIOUS_FRACTION = 0.4
"""Above the fraction of all clients, because a cohort may have more than its share; the maximum for which krum is safe with 20 replies."""


def robustness_study(scale: Scale) -> Study:
    """Every attack and fraction under every aggregator, and each aggregator without malicious clients."""
    is_tiny = scale.is_smoke_test
    tasks = paper.SYNTHETIC_TASKS if scale.name is ScaleName.PAPER else ("lr",)
    algorithms = ALGORITHM_NAMES[:2] if is_tiny else ALGORITHM_NAMES
    aggregators = (Aggregator.WEIGHTED, Aggregator.SIMILARITY) if is_tiny else tuple(Aggregator)
    attacks = (Attack.OPPOSITE, Attack.NAN) if is_tiny else tuple(ATTACK_SCALES)
    fractions = MALICIOUS_FRACTIONS[-1:] if is_tiny else MALICIOUS_FRACTIONS
    cases = [(None, 0.0), *product(attacks, fractions)]
    conditions = (_condition(scale, *combination, *case) for combination in product(tasks, algorithms, aggregators) for case in cases)
    return paper.build_study("robustness", scale, conditions)


def _condition(
    scale: Scale, task: str, algorithm_name: str, aggregator: Aggregator, attack: Attack | None, malicious_fraction: float
) -> Condition:
    label = {
        "task": task,
        "algorithm": algorithm_name,
        "attack": NO_ATTACK if attack is None else attack.value,
        "malicious": malicious_fraction,
        "aggregator": aggregator.value,
    }
    sizes: dict[str, Any] = {"num_examples": scale.num_examples, "num_features": scale.num_features} if scale.is_smoke_test else DATA_SIZES
    failures = Failures()
    if attack is not None:
        failures = Failures(malicious_fraction=malicious_fraction, attack=attack, attack_scale=ATTACK_SCALES[attack])
    options: dict[str, Any] = batches_per_round(algorithm_class(algorithm_name), LOCAL_STEPS) | paper.algorithm_options(
        scale, task, algorithm_name
    )
    run = partial(
        paper.build_run,
        task=task,
        algorithm_name=algorithm_name,
        rounds=scale.rounds if scale.is_smoke_test else NUM_ROUNDS,
        byte_counting=ByteCounting.SAMPLED,
        data=Synthetic(**sizes),
        federation=FederationConfig(
            clients=NUM_CLIENTS,
            participation=PARTICIPATION,
            aggregator=aggregator,
            max_malicious_fraction=MAX_MALICIOUS_FRACTION if aggregator in (Aggregator.TRIMMED, Aggregator.KRUM) else None,
        ),
        failures=failures,
        algorithm=algorithm_class(algorithm_name)(**options),
    )
    return Condition(label=label, config_for_seed=run, seeds=scale.sweep_seeds)
