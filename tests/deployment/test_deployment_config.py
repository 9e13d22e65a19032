"""Every key of Flower's run config has an effect or is refused in one line."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import NETWORK_DEFAULTS
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.optimizers import StepRule
from fedsieve.deployment.deployment_config import deployment_config, setting_types
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module

OBJECTIVE = Linear(loss=Loss.SQUARED, num_features=40)


def test_every_key_of_the_run_config_has_an_effect():
    config = {
        "clients": 3,
        "rounds": 7,
        "seed": 5,
        "density": 0.2,
        "algorithm.name": "flops-pa",
        "precision": "double",
        "participation": 0.5,
    }
    config |= {
        "quorum": 1,
        "retries": 4,
        "round-seconds": 9,
        "start-seconds": 8.5,
        "client-weighting": "sqrt",
        "run-dir": "/x",
    }
    config |= {
        "algorithm.local-steps": 3,
        "algorithm.step-rule": "constant",
        "algorithm.batch-size": "all",
        "algorithm.learning-rate": 1,
        "data.path": "mine",
    }
    deployment = deployment_config(config, OBJECTIVE)
    assert (deployment.clients, deployment.rounds, deployment.seed, deployment.participation, deployment.quorum, deployment.retries) == (
        3,
        7,
        5,
        0.5,
        1.0,
        4,
    )
    assert (deployment.round_seconds, deployment.start_seconds, str(deployment.run_dir), deployment.dtype) == (
        9,
        8.5,
        "/x",
        torch.float64,
    )
    algorithm = deployment.algorithm
    assert (algorithm.density, algorithm.client_weighting, algorithm.local_steps, algorithm.batch_size, algorithm.learning_rate) == (
        0.2,
        "sqrt",
        3,
        "all",
        1.0,
    )
    assert algorithm.step_rule is StepRule.CONSTANT


def test_every_key_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    table = page[page.index("## Settings") : page.index("## When something breaks")]
    for key in setting_types(BaseAlgorithm):
        assert key.startswith("algorithm") or f"`{key.replace('_', '-')}`" in table


def test_a_deployment_has_the_fingerprint_of_a_simulated_run():
    run = resolve(RunConfig(task="lr", algorithm_name="flops-pa", density=0.1))
    assert deployment_config({"clients": 3, "algorithm.name": "flops-pa", "density": 0.1}, run.objective).fingerprint == run.fingerprint


def test_a_module_has_network_defaults_and_starts_from_its_seed_or_its_weights():
    built = deployment_config({"clients": 2, "density": 0.5}, Module(module=nn.Linear(4, 2), factory=lambda: nn.Linear(4, 2)))
    assert built.start_from_seed and built.algorithm.learning_rate == NETWORK_DEFAULTS["learning_rate"]
    assert not deployment_config({"clients": 2, "density": 0.5}, Module(module=nn.Linear(4, 2))).start_from_seed
    assert deployment_config({"clients": 2}, OBJECTIVE).algorithm.step_rule is BaseAlgorithm.step_rule


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "clients is missing"),
        ({"clients": 0}, "clients must be at least 1; got 0"),
        ({"clients": "three"}, "clients takes a whole number; got three"),
        ({"clients": True}, "clients takes a whole number; got true"),
        ({"clients": 3, "local-epochs": 1}, "run config local-epochs is unknown; there are seed, clients"),
        ({"clients": 3, "round-secs": 1}, "did you mean round-seconds?"),
        ({"clients": 3, "algorithm.name": "fed"}, "run config algorithm.name takes sieve, .*; got fed"),
        ({"clients": 3, "precision": "half"}, "precision takes single, double; got half"),
        ({"clients": 3, "client-weighting": "mine"}, "client-weighting takes examples, sqrt"),
        ({"clients": 3, "quorum": 0}, "quorum is a fraction"),
        ({"clients": 3, "participation": 1.5}, "participation is a fraction"),
        ({"clients": 3, "round-seconds": 0}, "round-seconds must be above 0"),
        ({"clients": 3, "rounds": 2.5}, "rounds takes a whole number; got 2.5"),
        ({"clients": 3, "density": 0.0001}, "keeps none"),
        ({"clients": 3, "algorithm.speed": 1}, "run config algorithm.speed is unknown; there are"),
        ({"clients": 3, "algorithm.batch-size": "some"}, "algorithm.batch-size takes a whole number or all; got some"),
        ({"clients": 5, "aggregator": "middle"}, "run config aggregator takes weighted, median"),
        ({"clients": 5, "aggregator": "trimmed", "max-malicious-fraction": 0.5}, "majority"),
        ({"clients": 3, "algorithm.bits": 7}, "algorithm.bits takes 32, 16, 8, 4"),
    ],
)
def test_an_invalid_setting_is_refused_with_rule_and_value(config, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        deployment_config(config, OBJECTIVE)


@pytest.mark.parametrize(
    ("client", "x", "y", "message"),
    [
        (3, np.zeros((2, 40)), np.zeros(2), "partition-id 3 is not below clients 3"),
        (0, np.zeros((2, 40)), np.zeros(3), "x has 2 examples and y has 3"),
        (0, np.full((2, 40), np.nan), np.zeros(2), "not a finite number"),
    ],
)
def test_invalid_examples_are_refused_at_the_node(client, x, y, message):
    with pytest.raises(ValueError, match=message):
        deployment_config({"clients": 3}, OBJECTIVE).client_engine(client, x, y)


def test_a_robust_aggregator_weights_clients_equally():
    algorithm = deployment_config({"clients": 5, "aggregator": "trimmed", "max-malicious-fraction": 0.2}, OBJECTIVE).algorithm
    assert (algorithm.aggregator, algorithm.max_malicious_fraction, algorithm.client_weighting) == (
        Aggregator.TRIMMED,
        0.2,
        ClientWeighting.UNIFORM,
    )
