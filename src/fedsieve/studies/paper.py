"""The tables and figures of the paper, one function per study."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import Any

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.defaults import batches_per_round
from fedsieve.algorithms.recipes import Recipe
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.optimizers import StepRule
from fedsieve.core.schedules import DensitySchedule
from fedsieve.data.synthetic import Shift, Synthetic
from fedsieve.experiments.config import ByteCounting, FederationConfig, RunConfig
from fedsieve.experiments.tasks import TASKS, default_options
from fedsieve.studies.catalog import STUDIES
from fedsieve.studies.compute import Condition, Study
from fedsieve.studies.results import (
    CENTRAL,
    IID,
    NON_IID,
    PUBLISHED,
    RECOMMENDED,
    REFERENCE_ALGORITHM,
    SWEPT_STEP_RULES,
    TUNED,
    UNCONSTRAINED,
)
from fedsieve.studies.scale import Scale, ScaleName

SYNTHETIC_TASKS = ("lr", "lg", "mc")
GRADIENT_ALGORITHMS = ("flops", "fed-sgd")
"""Algorithms that exchange gradients; one of their rounds is an epoch of the paper."""
SPARSE, DENSE = 0.05, 0.95
"""The paper's densities."""
SKEWS = {NON_IID: (0.5, Shift.SCALAR), IID: (1000.0, Shift.NONE)}
"""Dirichlet parameter and shift; homogeneous clients have neither skew (L242, L603)."""
REGIMES = {"SNR 3, correlation .2": (3.0, 0.2), "SNR 3, correlation .7": (3.0, 0.7), "SNR 20, correlation .7": (20.0, 0.7)}
"""Signal-to-noise ratio and correlation of the features."""
PUBLISHED_LEARNING_RATES = {"lr": 1e-3, "lg": 1e-1, "mc": 5e-2}
"""Constant learning rates of FedIter-HT: in the paper's range, the best mean of those that diverge on none of the seeds tried (D11)."""
PUBLISHED_DENSE_LR = {"flops": {"scaling_start": 0.8}, "fed-iter-ht": {"learning_rate": 1e-4}}
"""Options on LR if 95 % of the weights are kept and the clients' examples are shifted: those of sparse models diverge (D11)."""
RECIPES = (PUBLISHED, RECOMMENDED)
"""Settings of FLoPS and FLoPS-PA."""
COMPARED = (("flops", PUBLISHED), ("flops", RECOMMENDED), ("fed-iter-ht", PUBLISHED), ("fed-iter-ht", TUNED))
"""FLoPS and FedIter-HT, each in both settings."""


def algorithm_options(scale: Scale, task: str, algorithm_name: str, **options: Any) -> dict[str, Any]:
    """Return the options of an algorithm on a task: those of its recipe, then those of the study, then the local steps of the scale."""
    defaults = default_options(TASKS[task], algorithm_class(algorithm_name), None, options.pop("recipe", Recipe.RECOMMENDED))
    return defaults | options | ({} if scale.local_steps is None else batches_per_round(algorithm_class(algorithm_name), scale.local_steps))


def published_options(task: str, algorithm_name: str, target_density: float, skew: str) -> dict[str, Any]:
    """Return the paper's recipe of FLoPS and FLoPS-PA, or the options of FedIter-HT in the same manner.

    These are a constant learning rate from the paper's range, as many local steps as FLoPS has exchanges, and 32-bit messages.
    """
    dense = PUBLISHED_DENSE_LR.get(algorithm_name, {}) if (task, skew) == ("lr", NON_IID) and target_density > 0.5 else {}
    if algorithm_name in UNCONSTRAINED:
        return {"recipe": Recipe.PAPER} | dense
    return {
        "step_rule": StepRule.CONSTANT,
        "learning_rate": PUBLISHED_LEARNING_RATES[task],
        "final_learning_rate_fraction": 1.0,
        "batch_size": 32,
        "local_steps": 40,
        "bits": 32,
        "density_schedule": DensitySchedule.CONSTANT,
    } | dense


def synthetic_run_factory(
    scale: Scale,
    task: str,
    algorithm_name: str,
    *,
    target_density: float = SPARSE,
    true_density: float = SPARSE,
    skew: str = NON_IID,
    setting: str = TUNED,
    participation: float | None = None,
    rounds: int | None = None,
    snr: float = 20.0,
    correlation: float = 0.2,
    centralized: bool = False,
    **options: Any,
) -> Callable[[int], RunConfig]:
    """Return a function from a seed to a run on a synthetic task."""
    alpha, shift = SKEWS[skew]
    if setting == PUBLISHED:
        options = published_options(task, algorithm_name, target_density, skew) | options
    if participation is not None:
        participation = max(participation, 2 / scale.clients)
    return partial(
        build_run,
        task=task,
        algorithm_name=algorithm_name,
        density=target_density,
        rounds=rounds or (scale.gradient_rounds if algorithm_name in GRADIENT_ALGORITHMS else scale.rounds),
        data=Synthetic(
            num_examples=scale.num_examples,
            num_features=scale.num_features,
            true_density=true_density,
            snr=snr,
            correlation=correlation,
            shift=shift,
        ),
        federation=FederationConfig(
            clients=scale.clients,
            alpha=alpha,
            client_weighting=ClientWeighting.UNIFORM if setting == PUBLISHED else None,
            max_norm_ratio=inf if setting == PUBLISHED else None,
            participation=participation,
        ),
        centralized=centralized,
        algorithm=algorithm_class(algorithm_name)(**algorithm_options(scale, task, algorithm_name, **options)),
    )


def real_run_factory(
    scale: Scale, task: str, algorithm_name: str, density: float, *, centralized: bool = False, **options: Any
) -> Callable[[int], RunConfig]:
    """Return a function from a seed to a run on real data."""
    return partial(
        build_run,
        task=task,
        algorithm_name=algorithm_name,
        density=density,
        rounds=scale.real_rounds,
        byte_counting=ByteCounting.SAMPLED,
        centralized=centralized,
        algorithm=algorithm_class(algorithm_name)(**algorithm_options(scale, task, algorithm_name, **options)),
    )


def build_run(seed: int, **settings: Any) -> RunConfig:
    """Return a run. `functools.partial` of this function is a run for each seed."""
    return RunConfig(seed=seed, **settings)


def build_study(name: str, scale: Scale, conditions: Iterable[Condition]) -> Study:
    """Return a study of the catalog."""
    return Study(name=name, description=STUDIES[name], conditions=list(conditions), scale=scale.name.value)


def epoch_settings(scale: Scale) -> dict[str, Any]:
    """Return the settings of Tables 1 and 2 and of the gate figures: 50 epochs, 10 % of the clients (decision D3)."""
    return {"participation": 0.1, "rounds": scale.gradient_rounds}


def averaging_settings(scale: Scale) -> dict[str, Any]:
    """Return the settings of the figures on FLoPS-PA: 100 rounds, 5 % of the clients."""
    return {"participation": 0.05, "rounds": scale.rounds}


def default_settings(scale: Scale, algorithm_name: str) -> dict[str, Any]:
    """Return the paper's rounds and participation for an algorithm."""
    return epoch_settings(scale) if algorithm_name in GRADIENT_ALGORITHMS else averaging_settings(scale)


def table_1_study(scale: Scale) -> Study:
    """Table 1, with FLoPS and FedIter-HT in both settings and with sieve."""
    models = [(algorithm, setting, SPARSE) for algorithm, setting in (*COMPARED, (REFERENCE_ALGORITHM, TUNED))]
    models += [("flops", setting, DENSE) for setting in RECIPES]
    conditions = []
    for task, (algorithm, setting, target) in product(SYNTHETIC_TASKS, models):
        label = {"task": task, "algorithm": algorithm, "setting": setting, "target": target, "truth": SPARSE, "skew": NON_IID}
        run = synthetic_run_factory(scale, task, algorithm, target_density=target, setting=setting, **epoch_settings(scale))
        trace = target == SPARSE and algorithm != REFERENCE_ALGORITHM
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.seeds, trace=trace))
    return build_study("table-1", scale, conditions)


def table_2_study(scale: Scale) -> Study:
    """Table 2, with FLoPS and FedIter-HT in both settings."""
    conditions = []
    for task, density, skew, (algorithm, setting) in product(SYNTHETIC_TASKS, (DENSE, SPARSE), SKEWS, COMPARED):
        label = {"task": task, "algorithm": algorithm, "setting": setting, "target": density, "truth": density, "skew": skew}
        densities = {"target_density": density, "true_density": density}
        run = synthetic_run_factory(scale, task, algorithm, **densities, skew=skew, setting=setting, **epoch_settings(scale))
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.seeds))
    return build_study("table-2", scale, conditions)


def gates_study(scale: Scale) -> Study:
    """Expected gates per epoch."""
    return build_study("gates", scale, (_traced_condition(scale, *case) for case in product(SYNTHETIC_TASKS, ("flops",), RECIPES)))


def iou_study(scale: Scale) -> Study:
    """Overlaps between epochs."""
    return build_study("iou", scale, (_traced_condition(scale, "lr", algorithm, setting) for algorithm, setting in COMPARED))


def test_time_gates_study(scale: Scale) -> Study:
    """Individual test-time gates, and their overlaps."""
    return build_study("test-time-gates", scale, [_traced_condition(scale, "lr", "flops", setting) for setting in RECIPES])


def _traced_condition(scale: Scale, task: str, algorithm_name: str, setting: str) -> Condition:
    label = {"task": task, "algorithm": algorithm_name, "setting": setting, "target": SPARSE}
    run = synthetic_run_factory(scale, task, algorithm_name, setting=setting, **epoch_settings(scale))
    return Condition(label=label, config_for_seed=run, seeds=scale.seeds, trace=True)


def learning_rates_study(scale: Scale) -> Study:
    """Sweeps of learning rates on LR.

    FLoPS-PA: the paper's recipe with constant rates, and the recommended one with rates capped at 1/L and with factors of Polyak's
    step (its default). sieve: its own units.
    """
    constant, gate_rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (1e-5, 1e-4, 8e-4, 1e-2, 1e-1, 1.0)
    sweeps: list[tuple[str, StepRule, str, Sequence[float], dict[str, Any]]] = [
        ("flops-pa", StepRule.CONSTANT, PUBLISHED, constant, {"learning_rate": 8e-2, "gate_rate": 8e-4}),
        ("flops-pa", StepRule.CAPPED, RECOMMENDED, (*constant, 0.3, 1.0), {"step_rule": StepRule.CAPPED, "learning_rate": 8e-2}),
        ("flops-pa", StepRule.POLYAK, RECOMMENDED, (0.03, 0.1, 0.3, 1.0, 1.5, 2.0, 3.0, 4.0), {}),
    ]
    cases = [(*sweep[:3], "weights", rate, sweep[4] | {"learning_rate": rate}) for sweep in sweeps for rate in sweep[3]]
    cases += [(*sweep[:3], "gates", rate, sweep[4] | {"gate_rate": rate}) for sweep in sweeps for rate in gate_rates]
    own = [("weights", {"learning_rate": rate}) for rate in (0.02, 0.08, 0.25, 0.8, 2.0, 8.0, 25.0)]
    own += [("gates", {"gate_rate": rate}) for rate in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)]
    cases += [(REFERENCE_ALGORITHM, StepRule.POLYAK, TUNED, sweep, *options.values(), options) for sweep, options in own]
    conditions = []
    for algorithm, rule, setting, sweep, rate, options in cases:
        label = {"task": "lr", "algorithm": algorithm, "setting": rule.value, "sweep": sweep, "rate": rate}
        run = synthetic_run_factory(scale, "lr", algorithm, setting=setting, **options, **averaging_settings(scale))
        is_judged = algorithm == "flops-pa" and rule in SWEPT_STEP_RULES.values()
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.seeds if is_judged else scale.sweep_seeds))
    return build_study("learning-rates", scale, conditions)


def convergence_study(scale: Scale) -> Study:
    """Curves on LR and LG, and LR over many random instances, IID and non-IID."""
    instances = (("flops-pa", PUBLISHED), ("flops-pa", RECOMMENDED), ("fed-iter-ht", PUBLISHED), ("fed-iter-ht", TUNED))
    curves = (*instances, ("fed-avg", TUNED), (REFERENCE_ALGORITHM, TUNED), ("flops-pa", CENTRAL))
    cases = [(task, NON_IID, "curves", line, scale.seeds) for task in ("lr", "lg") for line in curves]
    cases += [("lr", skew, "instances", line, scale.instance_seeds) for skew in SKEWS for line in instances]
    conditions = []
    for task, skew, part, (algorithm, setting), seeds in cases:
        label = {"task": task, "algorithm": algorithm, "setting": setting, "skew": skew, "part": part}
        settings = averaging_settings(scale) | {"setting": setting, "skew": skew, "centralized": setting == CENTRAL}
        run = synthetic_run_factory(scale, task, algorithm, **settings)
        conditions.append(Condition(label=label, config_for_seed=run, seeds=seeds))
    return build_study("convergence", scale, conditions)


def real_data_study(scale: Scale) -> Study:
    """Real data at 5 % participation: FLoPS-PA, central FLoPS-PA and FedIter-HT as in the paper, and sieve; at scale paper also FedAvg."""
    tasks = (("rcv1", 0.005), ("mnist", 0.05), ("mnist-cnn", 0.05), ("emnist", 0.05), ("emnist", 0.005))
    lines = [("flops-pa", RECOMMENDED), ("flops-pa", CENTRAL), ("fed-iter-ht", TUNED), (REFERENCE_ALGORITHM, TUNED)]
    if scale.name is ScaleName.PAPER:
        lines.append(("fed-avg", TUNED))
    conditions = []
    for (task, target), (algorithm, setting) in product((("digits", 0.1),) if scale.use_digits_only else tasks, lines):
        label = {"task": task, "algorithm": algorithm, "setting": setting, "target": target}
        if scale.use_digits_only:
            label["stand-in"] = "digits, shipped with scikit-learn"
        run = real_run_factory(scale, task, algorithm, target, centralized=setting == CENTRAL)
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.real_seeds))
    return build_study("real-data", scale, conditions)


def regimes_study(scale: Scale) -> Study:
    """The other three regimes of noise and correlation."""
    conditions = []
    for (regime, (snr, correlation)), task, (algorithm, setting) in product(REGIMES.items(), SYNTHETIC_TASKS, COMPARED):
        label = {"task": task, "algorithm": algorithm, "setting": setting, "regime": regime}
        run = synthetic_run_factory(scale, task, algorithm, setting=setting, snr=snr, correlation=correlation, **epoch_settings(scale))
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.seeds))
    return build_study("regimes", scale, conditions)


def heterogeneity_study(scale: Scale) -> Study:
    """FLoPS and FLoPS-PA in both settings beside the dense models of the same messages, on heterogeneous clients."""
    gated = [(algorithm, setting) for algorithm in UNCONSTRAINED for setting in RECIPES]
    conditions = []
    for task, (algorithm, setting) in product(SYNTHETIC_TASKS, (*gated, *((dense, TUNED) for dense in UNCONSTRAINED.values()))):
        label = {"task": task, "algorithm": algorithm, "setting": setting, "skew": NON_IID, "target": SPARSE}
        run = synthetic_run_factory(scale, task, algorithm, setting=setting, **default_settings(scale, algorithm))
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.seeds))
    return build_study("heterogeneity", scale, conditions)


def communication_study(scale: Scale) -> Study:
    """Bytes by three counts, each algorithm with its own rounds and participation."""
    lines = [*product(UNCONSTRAINED, RECIPES), (REFERENCE_ALGORITHM, TUNED), ("fed-iter-ht", PUBLISHED)]
    lines += [(name, TUNED) for name in ("fed-iter-ht", "fed-round-ht", "fed-ht", "gradual", "fed-avg")]
    conditions = []
    for task, (algorithm, setting) in product(SYNTHETIC_TASKS, lines):
        label = {"task": task, "algorithm": algorithm, "setting": setting}
        run = synthetic_run_factory(scale, task, algorithm, setting=setting, **default_settings(scale, algorithm))
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.seeds))
    return build_study("communication", scale, conditions)


def starts_study(scale: Scale) -> Study:
    """rho_init x prune start on LR, FLoPS and FLoPS-PA in both settings."""
    conditions = []
    for algorithm, setting, start, prune_start in product(UNCONSTRAINED, RECIPES, (0.05, 0.2, 0.5, 0.95), (0.0, 0.5)):
        label = {"task": "lr", "algorithm": algorithm, "setting": setting, "start": start, "prune start": prune_start}
        options = {"initial_gate_probability": start, "scaling_start": prune_start}
        run = synthetic_run_factory(scale, "lr", algorithm, setting=setting, **options, **default_settings(scale, algorithm))
        conditions.append(Condition(label=label, config_for_seed=run, seeds=scale.seeds))
    return build_study("starts", scale, conditions)
