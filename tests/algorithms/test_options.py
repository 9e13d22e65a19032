"""Nothing a user sets is silently ignored: each option a method offers changes its run, and what it does not offer it refuses."""

import re

import pytest
import torch

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.cli.main import main
from fedsieve.core.batches import BatchSampling
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling
from fedsieve.core.types import Clock
from fedsieve.experiments.fit_arguments import build_algorithm
from helpers.algorithms import SOME_ALGORITHMS, make_algorithm
from helpers.runs import small_run, train_run

FALLING = {"density_schedule": DensitySchedule.CUBIC}
MOMENTUM = {"server_optimizer": Optimizer.MOMENTUM}
OTHER = {
    "batch_size": ({}, 4),
    "batch_sampling": ({}, BatchSampling.INDEPENDENT),
    "local_steps": ({}, 7),
    "learning_rate": ({}, 0.37),
    "final_learning_rate_fraction": ({}, 0.5),
    "step_rule": ({"learning_rate": 0.01}, None),
    "max_gradient_norm": ({}, 0.01),
    "bits": ({}, 16),
    "density_schedule": ({}, None),
    "initial_density": (FALLING, 0.9),
    "anneal_start": (FALLING, 0.3),
    "anneal_end": (FALLING | {"initial_density": 0.5, "log_alpha_scaling": LogAlphaScaling.OFF}, 0.3),
    "warmup": ({}, 2),
    "server_optimizer": ({}, Optimizer.MOMENTUM),
    "server_learning_rate": ({}, 0.7),
    "server_momentum": (MOMENTUM, 0.5),
    "residual_decay": ({}, 0.33),
}
"""What else is set, and another value; None: the one of two that is not the method's own."""
SWAPPED = {"step_rule": (StepRule.CONSTANT, StepRule.POLYAK), "density_schedule": (DensitySchedule.CONSTANT, DensitySchedule.CUBIC)}


@pytest.mark.parametrize(
    ("density", "typed", "begins"), [(0.005, None, 0.03), (0.05, None, 0.3), (0.2, None, 0.3), (0.5, None, 0.5), (0.005, 0.3, 0.3)]
)
def test_a_falling_schedule_starts_at_the_default_multiple_of_its_target(density, typed, begins):
    algorithm = algorithm_class("fed-iter-ht")(density=density, initial_density=typed, **FALLING)
    assert algorithm.message_density(Clock(0, 100)) == pytest.approx(begins)
    assert algorithm.message_density(Clock(round(100 * algorithm.anneal_end), 100)) == density


def test_an_annealed_density_falls_by_the_cube_of_the_rounds_left():
    algorithm = algorithm_class("fed-iter-ht")(density=0.05, initial_density=0.5, anneal_start=0.0, anneal_end=0.5, **FALLING)
    values = [algorithm.message_density(Clock(number, 20)) for number in range(12)]
    assert values == pytest.approx([0.05 + 0.45 * (max(10 - number, 0) / 10) ** 3 for number in range(12)])
    assert values[10:] == [0.05, 0.05]


def test_learning_rates_fall_along_half_a_cosine_and_stay_at_their_end():
    algorithm, constant = (algorithm_class("fed-avg")(final_learning_rate_fraction=end) for end in (0.1, 1.0))
    path = [algorithm.learning_rate_factor(Clock(number, 12)) for number in range(16)]
    assert path[0] == 1.0 and path[6] == pytest.approx(0.55) and path[12:] == pytest.approx([0.1] * 4)
    assert path[4] == pytest.approx(0.1 + 0.9 * 0.75)  # cos 60 degrees is a half
    assert {constant.learning_rate_factor(Clock(number, 12)) for number in range(16)} == {1.0}


def outcome(method, **options):
    steps = train_run(small_run(method, rounds=3, algorithm=make_algorithm(method, **{"num_batches": 3, **options})))
    return [part for part in steps[-1].result.server if isinstance(part, torch.Tensor)], [step.metrics["bytes_up"] for step in steps]


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("method", SOME_ALGORITHMS)
def test_every_shared_option_of_an_algorithm_changes_its_run(method):
    cls = algorithm_class(method)
    assert BaseAlgorithm.option_names() - {"sparsity_allocation"} == OTHER.keys()  # budgets need several layers
    known = {}
    for name in cls.option_names() & OTHER.keys():
        around, value = OTHER[name]
        around = {key: setting for key, setting in around.items() if key in cls.option_names()}
        if name == "anneal_end" and method in ("fed-l1", "sign-ht", "eden"):  # .3 and their .5 keep equally many weights here
            value = 0.9
        if name in SWAPPED:
            own = getattr(cls, name)
            value = next(v for v in SWAPPED[name] if v is not own)
        if str(around) not in known:
            known[str(around)] = outcome(method, **around)
        (before, sent), (after, sent_then) = known[str(around)], outcome(method, **around, **{name: value})
        assert sent != sent_then or not all(map(torch.equal, before, after)), name


@pytest.mark.parametrize("method", ALGORITHMS)
def test_an_algorithm_refuses_options_it_does_not_have(method):
    cls = algorithm_class(method)
    for name in cls.unsupported_options:
        around, value = OTHER[name]
        around = {key: setting for key, setting in around.items() if key in cls.option_names()}
        with pytest.raises(ValueError, match=f"algorithm.{name.replace('_', '-')} has no effect on {cls.__name__}"):
            cls(**around, **{name: DensitySchedule.CUBIC if value is None else value})


@pytest.mark.parametrize(
    ("method", "options", "needed"),
    [
        ("flops", {"log_alpha_scaling_rate": 0.3}, "log-alpha-scaling literal"),
        ("flops-pa", {"log_alpha_scaling": "off", "scaling_start": 0.3}, "log-alpha-scaling linear"),
        ("flops-pa", {"gate_inverse": "exact"}, "gate-encoding gates"),
        ("flops-pa", {"message_gate_noise": "deterministic"}, "gate-encoding gates"),
        ("flops-pa", {"min_default_gate": 0.1}, "gate-encoding gates"),
        ("flops-pa", {"recipe": "paper", "anneal_end": 0.3}, "density-schedule cubic"),
        ("flops", {"initial_density": 0.3}, "density-schedule cubic"),
        ("fed-avg", {"server_momentum": 0.3}, "server-optimizer momentum"),
    ],
)
def test_an_option_without_effect_beside_the_others_is_refused(method, options, needed):
    *others, (name, value) = options.items()
    words = re.escape(f"algorithm.{name.replace('_', '-')} {value} has no effect without --algorithm.{needed}")
    with pytest.raises(ValueError, match=words):
        small_run(method, algorithm=options)
    small_run(method, algorithm=dict(others))


def test_fit_refuses_an_option_without_effect():
    with pytest.raises(ValueError, match=r"algorithm\.anneal-end 0\.3 has no effect without --algorithm\.density-schedule cubic"):
        build_algorithm("fed-round-ht", 0.1, None, {"density_schedule": "constant", "anneal_end": 0.3})


def test_an_option_may_be_given_as_the_word_of_its_choice():
    assert small_run("fed-avg", algorithm={"step_rule": "constant"}).algorithm.step_rule is StepRule.CONSTANT
    with pytest.raises(ValueError, match=r"algorithm\.step-rule takes constant, capped, polyak; got fixed"):
        small_run("fed-avg", algorithm={"step_rule": "fixed"})


def test_compare_refuses_an_option_that_no_algorithm_has(capsys):
    assert main(["compare", "--algorithms", "fed-sgd,fed-avg", "--algorithm.warmup", "3"]) == 2
    assert "--algorithm.warmup has no effect on fed-sgd or fed-avg; leave it out" in capsys.readouterr().err
