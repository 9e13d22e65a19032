"""Flower's run configuration as a plan: everything typed has an effect or is refused in one line."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsieve.algorithms.base import Method
from fedsieve.algorithms.defaults import CAREFUL
from fedsieve.core.optimizers import StepRule
from fedsieve.deployment.config import OF_THE_PLAN, OF_THE_SCREEN, OTHERS, plan_from
from fedsieve.experiments.config import Run
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module

OBJECTIVE = Linear(loss=Loss.SQUARED, features=40)


def test_every_setting_arrives():
    config = {"clients": 3, "rounds": 7, "seed": 5, "density": 0.2, "method": "flops-pa", "precision": "double", "participation": 0.5}
    config |= {"quorum": 1, "retries": 4, "round-seconds": 9, "start-seconds": 8.5, "threads": 2, "weights": "sqrt", "run-dir": "/x"}
    config |= {"algorithm.steps": 3, "algorithm.step-rule": "constant", "algorithm.batch": "all", "algorithm.rate": 1, "data.path": "mine"}
    plan = plan_from(config, OBJECTIVE)
    assert (plan.clients, plan.rounds, plan.seed, plan.participation, plan.quorum, plan.retries) == (3, 7, 5, 0.5, 1.0, 4)
    assert (plan.round_seconds, plan.start_seconds, plan.threads, str(plan.run_dir), plan.dtype) == (9, 8.5, 2, "/x", torch.float64)
    algorithm = plan.algorithm
    assert (algorithm.density, algorithm.weights, algorithm.steps, algorithm.batch, algorithm.rate) == (0.2, "sqrt", 3, "all", 1.0)
    assert algorithm.step_rule is StepRule.CONSTANT


def test_every_setting_is_explained():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    table = page[page.index("## Settings") : page.index("## When something breaks")]
    for name in (*OF_THE_PLAN, *OF_THE_SCREEN, *OTHERS):
        assert f"`{name}`" in table


def test_a_deployment_speaks_to_the_same_model_as_a_run_on_one_machine():
    run = Run(task="lr", method="flops-pa", density=0.1)
    assert plan_from({"clients": 3, "method": "flops-pa", "density": 0.1}, run.objective).fingerprint == run.fingerprint


def test_a_module_has_the_settings_of_modules_and_a_start_that_is_sent_where_it_cannot_be_drawn():
    built = plan_from({"clients": 2, "density": 0.5}, Module(module=nn.Linear(4, 2), build=lambda: nn.Linear(4, 2)))
    assert built.known_start and built.algorithm.rate == CAREFUL["rate"]
    assert not plan_from({"clients": 2, "density": 0.5}, Module(module=nn.Linear(4, 2))).known_start
    assert plan_from({"clients": 2}, OBJECTIVE).algorithm.step_rule is Method.step_rule


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "clients is missing"),
        ({"clients": 0}, "clients must be at least 1; got 0"),
        ({"clients": "3"}, "clients takes a whole number; got '3'"),
        ({"clients": True}, "clients takes a whole number; got True"),
        ({"clients": 3, "local-epochs": 1}, "local-epochs is no setting; there are clients"),
        ({"clients": 3, "method": "fed"}, "method fed is unknown; there are sieve"),
        ({"clients": 3, "precision": "half"}, "precision is single or double; got half"),
        ({"clients": 3, "weights": "mine"}, "weights takes examples, sqrt"),
        ({"clients": 3, "quorum": 0}, "quorum is a fraction"),
        ({"clients": 3, "participation": 1.5}, "participation is a fraction"),
        ({"clients": 3, "round-seconds": 0}, "round-seconds must be above 0"),
        ({"clients": 3, "rounds": 2.5}, "rounds takes a whole number; got 2.5"),
        ({"clients": 3, "density": 0.0001}, "keeps none"),
        ({"clients": 3, "algorithm.speed": 1}, "algorithm.speed is no setting of sieve"),
        ({"clients": 3, "algorithm.batch": "some"}, "algorithm.batch takes a whole number or all; got 'some'"),
        ({"clients": 3, "algorithm.bits": 7}, "algorithm.bits takes 32 or 16 or 8 or 4"),
    ],
)
def test_what_cannot_be_is_refused_with_rule_and_value(config, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        plan_from(config, OBJECTIVE)


@pytest.mark.parametrize(
    ("client", "x", "y", "message"),
    [
        (3, np.zeros((2, 40)), np.zeros(2), "partition-id 3 is not below clients 3"),
        (0, np.zeros((2, 40)), np.zeros(3), "x has 2 rows and y has 3"),
        (0, np.full((2, 40), np.nan), np.zeros(2), "not a finite number"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_at_the_node(client, x, y, message):
    with pytest.raises(ValueError, match=message):
        plan_from({"clients": 3}, OBJECTIVE).site(client, x, y)


def test_a_robust_mean_is_a_setting_and_gives_each_client_one_say():
    from fedsieve.core.aggregation import Mean, Weighting

    algorithm = plan_from({"clients": 5, "mean": "trimmed", "tolerate": 0.2}, OBJECTIVE).algorithm
    assert (algorithm.mean, algorithm.tolerate, algorithm.weights) == (Mean.TRIMMED, 0.2, Weighting.UNIFORM)
    with pytest.raises(ValueError, match="run config mean takes weighted, median"):
        plan_from({"clients": 5, "mean": "middle"}, OBJECTIVE)
    with pytest.raises(ValueError, match="hostile majority"):
        plan_from({"clients": 5, "mean": "trimmed", "tolerate": 0.5}, OBJECTIVE)
