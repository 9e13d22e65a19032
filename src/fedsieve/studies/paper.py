"""The paper's tables and figures as data: one function a study. `fedsieve reproduce` computes them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.flops_pa import GateNoise
from fedsieve.core.aggregation import Weighting
from fedsieve.core.optimizers import StepRule
from fedsieve.data.synthetic import Shift, Synthetic
from fedsieve.experiments.config import Counting, Federation, Run
from fedsieve.experiments.tasks import TASKS, settings_of
from fedsieve.studies.catalog import STUDIES
from fedsieve.studies.runner import Cell, Study
from fedsieve.studies.scale import Scale, ScaleName

GENERATED = ("lr", "lg", "mc")
TUNED, PUBLISHED = "tuned", "as published"
NON_IID, IID = "non-iid", "iid"
SKEWS = {NON_IID: (0.5, Shift.SCALAR), IID: (1000.0, Shift.NONE)}
"""Dirichlet parameter and shift: homogeneous clients have neither skew (L242, L603)."""
REGIMES = {"SNR 3, correlation .2": (3.0, 0.2), "SNR 3, correlation .7": (3.0, 0.7), "SNR 20, correlation .7": (20.0, 0.7)}
PUBLISHED_RATE = {"lr": 1e-3, "lg": 1e-2, "mc": 3e-2}
"""Constant rates with which FedIter-HT has about the paper's figures (searched on seed 100, docs/results.md)."""
PUBLISHED_RATE_DENSE_TRUTH = {**PUBLISHED_RATE, "lr": 1e-4}
"""Where 95 % of the weights are true, LR's loss is nineteen times larger and 3e-4 already diverges under the shift."""


def settings(scale: Scale, task: str, method: str, **options: Any) -> dict[str, Any]:
    """A method's options on a task: its defaults there, what a study sets, and fewer steps where everything is tiny."""
    found = settings_of(TASKS[task], algorithm_class(method), None) | options
    if scale.steps is not None:
        found["steps"] = scale.steps
    return found


def published_baseline(task: str, truth: float, skew: str) -> dict[str, Any]:
    """FedIter-HT as the paper seems to have run it: a small constant rate, 1/K weights, plain floats."""
    rates = PUBLISHED_RATE_DENSE_TRUTH if truth > 0.5 and skew == NON_IID else PUBLISHED_RATE
    return {"step_rule": StepRule.CONSTANT, "rate": rates[task], "final_rate": 1.0, "batch": 32, "steps": 20, "bits": 32}


def generated(
    scale: Scale,
    task: str,
    method: str,
    *,
    target: float = 0.05,
    truth: float = 0.05,
    skew: str = NON_IID,
    setting: str = TUNED,
    participation: float | None = None,
    rounds: int | None = None,
    snr: float = 20.0,
    correlation: float = 0.2,
    central: bool = False,
    **options: Any,
) -> Callable[[int], Run]:
    """A run on one of the generated tasks, for each seed."""
    alpha, shift = SKEWS[skew]
    if setting == PUBLISHED:
        options = published_baseline(task, truth, skew) | options
    place = {} if central or participation is None else {"participation": max(participation, 2 / scale.clients)}
    weights = Weighting.UNIFORM if setting == PUBLISHED else None
    return partial(
        _run,
        task=task,
        method=method,
        density=target,
        rounds=rounds or (scale.gradient_rounds if method in ("flops", "fed-sgd") else scale.rounds),
        data=Synthetic(rows=scale.rows, features=scale.features, true_density=truth, snr=snr, correlation=correlation, shift=shift),
        federation=Federation(clients=scale.clients, alpha=alpha, weights=weights, central=central, **place),
        algorithm=algorithm_class(method)(**settings(scale, task, method, **options)),
    )


def _run(seed: int, **fields: Any) -> Run:
    return Run(seed=seed, **fields)


def study(name: str, scale: Scale, cells: Iterable[Cell]) -> Study:
    """A study of the catalogue."""
    return Study(name=name, about=STUDIES[name], cells=list(cells), scale=scale.name.value)


def epochs(scale: Scale) -> dict[str, Any]:
    """What Tables 1 and 2 and the gate figures share: 50 epochs, 10 % of the clients (decision D3)."""
    return {"participation": 0.1, "rounds": scale.gradient_rounds}


def averaging(scale: Scale) -> dict[str, Any]:
    """What the figures on FLoPS-PA share: 100 rounds, 5 % of the clients."""
    return {"participation": 0.05, "rounds": scale.rounds}


def table_1(scale: Scale) -> Study:
    """Table 1; FedIter-HT in both settings, and our own method beside them."""
    models = (("flops", TUNED, 0.05), ("flops", TUNED, 0.95), ("fed-iter-ht", PUBLISHED, 0.05), ("fed-iter-ht", TUNED, 0.05))
    cells = []
    for task in GENERATED:
        for method, setting, target in (*models, ("sieve", TUNED, 0.05)):
            label = {"task": task, "method": method, "setting": setting, "target": target, "truth": 0.05, "skew": NON_IID}
            run = generated(scale, task, method, target=target, setting=setting, **epochs(scale))
            cells.append(Cell(label=label, run=run, seeds=scale.seeds, trace=target == 0.05 and method != "sieve"))
    return study("table-1", scale, cells)


def table_2(scale: Scale) -> Study:
    """Table 2; FedIter-HT in both settings."""
    cells = []
    for task in GENERATED:
        for density in (0.95, 0.05):
            for skew in SKEWS:
                for method, setting in (("flops", TUNED), ("fed-iter-ht", PUBLISHED), ("fed-iter-ht", TUNED)):
                    label = {"task": task, "method": method, "setting": setting, "target": density, "truth": density, "skew": skew}
                    run = generated(scale, task, method, target=density, truth=density, skew=skew, setting=setting, **epochs(scale))
                    cells.append(Cell(label=label, run=run, seeds=scale.seeds))
    return study("table-2", scale, cells)


def gates(scale: Scale) -> Study:
    """Expected gates per epoch."""
    return study("gates", scale, (_followed(scale, task, "flops", TUNED) for task in GENERATED))


def iou(scale: Scale) -> Study:
    """Overlaps between epochs."""
    shown = (("flops", TUNED), ("fed-iter-ht", PUBLISHED), ("fed-iter-ht", TUNED))
    return study("iou", scale, (_followed(scale, "lr", method, setting) for method, setting in shown))


def test_time_gates(scale: Scale) -> Study:
    """Test-time gates one by one, and their overlaps."""
    return study("test-time-gates", scale, [_followed(scale, "lr", "flops", TUNED)])


def _followed(scale: Scale, task: str, method: str, setting: str) -> Cell:
    label = {"task": task, "method": method, "setting": setting, "target": 0.05}
    return Cell(label=label, run=generated(scale, task, method, setting=setting, **epochs(scale)), seeds=scale.seeds, trace=True)


def learning_rates(scale: Scale) -> Study:
    """Sweeps on LR. FLoPS-PA: the paper's constant rates, the same capped at 1/L, factors of Polyak's step (the default); sieve's units."""
    weights = {"constant": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
    weights |= {"capped": (*weights["constant"], 0.3, 1.0), "polyak": (0.03, 0.1, 0.3, 1.0, 1.5, 2.0, 3.0, 4.0)}
    fixed = {"constant": 8e-2, "capped": 8e-2, "polyak": 1.5}
    gate_rates = (1e-5, 1e-4, 8e-4, 1e-2, 1e-1, 1.0)
    cells = []
    for rule, rates in weights.items():
        sweep = [("weights", rate, {"rate": rate, "gate_rate": 8e-4}) for rate in rates]
        sweep += [("gates", rate, {"rate": fixed[rule], "gate_rate": rate}) for rate in gate_rates]
        for what, rate, options in sweep:
            label = {"task": "lr", "method": "flops-pa", "setting": rule, "sweep": what, "rate": rate}
            run = generated(scale, "lr", "flops-pa", step_rule=StepRule(rule), **options, **averaging(scale))
            cells.append(Cell(label=label, run=run, seeds=scale.seeds))
    own = {"weights": ("rate", (0.02, 0.08, 0.25, 0.8, 2.0, 8.0, 25.0)), "gates": ("gate_rate", (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))}
    for what, (option, rates) in own.items():
        for rate in rates:
            label = {"task": "lr", "method": "sieve", "setting": "polyak", "sweep": what, "rate": rate}
            run = generated(scale, "lr", "sieve", **{option: rate}, **averaging(scale))
            cells.append(Cell(label=label, run=run, seeds=scale.seeds))
    return study("learning-rates", scale, cells)


def convergence(scale: Scale) -> Study:
    """Curves on LR and LG, and LR over many random instances, IID and non-IID."""
    lines = (("flops-pa", TUNED), ("fed-iter-ht", PUBLISHED), ("fed-iter-ht", TUNED), ("fed-avg", TUNED), ("sieve", TUNED))
    cells = []
    for task in ("lr", "lg"):
        for method, setting in (*lines, ("flops-pa", "central")):
            label = {"task": task, "method": method, "setting": setting, "skew": NON_IID, "part": "curves"}
            run = generated(scale, task, method, setting=setting, central=setting == "central", **averaging(scale))
            cells.append(Cell(label=label, run=run, seeds=scale.seeds))
    for skew in SKEWS:
        for method, setting in lines[:3]:
            label = {"task": "lr", "method": method, "setting": setting, "skew": skew, "part": "instances"}
            run = generated(scale, "lr", method, setting=setting, skew=skew, **averaging(scale))
            cells.append(Cell(label=label, run=run, seeds=scale.instances))
    return study("convergence", scale, cells)


def real_data(scale: Scale) -> Study:
    """Real data at 5 % participation: FLoPS-PA, FedIter-HT and Central FLoPS-PA as in the paper, sieve; at its own scale FedAvg too."""
    tasks = (
        (("digits", 0.1),)
        if scale.stand_in
        else (("rcv1", 0.005), ("mnist", 0.05), ("mnist-cnn", 0.05), ("emnist", 0.05), ("emnist", 0.005))
    )
    lines = (("flops-pa", TUNED), ("flops-pa", "central"), ("fed-iter-ht", TUNED), ("sieve", TUNED))
    if scale.name is ScaleName.PAPER:
        lines = (*lines, ("fed-avg", TUNED))
    cells = []
    for task, target in tasks:
        for method, setting in lines:
            label = {"task": task, "method": method, "setting": setting, "target": target}
            run = partial(
                _run,
                task=task,
                method=method,
                density=target,
                rounds=scale.real_rounds,
                bytes=Counting.SAMPLED,
                federation=Federation(central=setting == "central"),
                algorithm=algorithm_class(method)(**settings(scale, task, method)),
            )
            cells.append(
                Cell(
                    label=label | ({"stand-in": "digits, shipped with scikit-learn"} if scale.stand_in else {}),
                    run=run,
                    seeds=scale.real_seeds,
                )
            )
    return study("real-data", scale, cells)


def regimes(scale: Scale) -> Study:
    """The other three regimes of noise and correlation."""
    cells = []
    for regime, (snr, correlation) in REGIMES.items():
        for task in GENERATED:
            for method, setting in (("flops", TUNED), ("fed-iter-ht", PUBLISHED), ("fed-iter-ht", TUNED)):
                label = {"task": task, "method": method, "setting": setting, "regime": regime}
                run = generated(scale, task, method, setting=setting, snr=snr, correlation=correlation, **epochs(scale))
                cells.append(Cell(label=label, run=run, seeds=scale.seeds))
    return study("regimes", scale, cells)


def communication(scale: Scale) -> Study:
    """What crosses, by three counts, with each method at its own rounds and participation."""
    methods = ("sieve", "flops-pa", "fed-iter-ht", "fed-round-ht", "fed-ht", "gradual", "fed-avg", "flops")
    cells = []
    for task in ("lr", "mc"):
        for method in methods:
            share = epochs(scale) if method == "flops" else averaging(scale)
            label = {"task": task, "method": method, "setting": TUNED}
            cells.append(Cell(label=label, run=generated(scale, task, method, **share), seeds=scale.seeds))
    return study("communication", scale, cells)


def starts(scale: Scale) -> Study:
    """rho_init x r x prune start on LR. Each method's usual scaling rate and five times as much (FLoPS: a fifth).

    FLoPS-PA samples its gates in local steps here: below rho_init .17 every median gate is closed, and nothing would ever open it.
    """
    rates = {"flops": (0.1, 0.5), "flops-pa": (0.02, 0.1)}
    sampled = {"flops": {}, "flops-pa": {"step_gates": GateNoise.SAMPLED}}
    cells = []
    for method, strengths in rates.items():
        share = epochs(scale) if method == "flops" else averaging(scale)
        for start in (0.05, 0.2, 0.5, 0.95):
            for strength in strengths:
                for prune in (0.0, 0.5):
                    label = {"task": "lr", "method": method, "start": start, "r": strength, "prune start": prune}
                    options = {"initial_logit_density": start, "scaling_rate": strength, "prune_start": prune, **sampled[method]}
                    cells.append(Cell(label=label, run=generated(scale, "lr", method, **options, **share), seeds=scale.seeds))
    return study("starts", scale, cells)
