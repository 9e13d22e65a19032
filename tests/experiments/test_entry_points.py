"""Every entry point runs the same algorithm: the command line, task file, the estimators, fit and Flower."""

import numpy as np
import pytest
import torch

from fedsieve.algorithms import ALGORITHMS
from fedsieve.data.user_files import UserFiles
from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.estimators import SparseFederatedRegressor
from fedsieve.experiments import fit_arguments
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss
from fedsieve.objectives.module import Module

LINEAR = Linear(loss=Loss.SQUARED, num_features=100, num_outputs=1)


@pytest.fixture
def user_file(tmp_path):
    """A table with 100 features as a user may have it."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "table.npz", x=rng.standard_normal((60, 100)), y=rng.standard_normal(60))
    return UserFiles(path=tmp_path / "table.npz")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_linear_models_get_one_algorithm_everywhere(name, user_file):
    config = RunConfig(task="lr", algorithm_name=name, density=0.1)
    expected = resolve(config).algorithm
    assert resolve(RunConfig(task="file", algorithm_name=name, density=0.1, data=user_file)).algorithm == expected
    assert SparseFederatedRegressor(density=0.1, algorithm=name)._build_algorithm(LINEAR) == expected
    assert deployment_config({"algorithm.name": name, "density": 0.1, "clients": 3}, LINEAR).algorithm == expected


@pytest.mark.parametrize("name", ALGORITHMS)
def test_networks_get_one_algorithm_everywhere(name):
    expected = resolve(RunConfig(task="mnist-cnn", algorithm_name=name, density=0.1)).algorithm
    module = Module(module=lenet(), loss=torch.nn.functional.cross_entropy)
    assert fit_arguments.build_algorithm(name, 0.1, None) == expected
    assert deployment_config({"algorithm.name": name, "density": 0.1, "clients": 3}, module).algorithm == expected
