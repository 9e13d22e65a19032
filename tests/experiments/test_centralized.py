"""Centralized training: all examples on one client, and as many gradients as the federation it is compared with."""

from dataclasses import replace

import numpy as np
import pytest

from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import CentralizedSteps, FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import run_rounds
from helpers.algorithms import make_algorithm

pytestmark = pytest.mark.usefixtures("few_test_rows")
FEDERATED = RunConfig(
    rounds=2,
    density=0.1,
    data=Synthetic(num_examples=200, num_features=20, true_density=0.1),
    federation=FederationConfig(clients=10, participation=0.4),
)


def count_gradients(monkeypatch, config):
    """The gradients of one mini-batch that a run computes, and the examples in them."""
    run, counts = resolve(config), []
    step = type(run.algorithm).client_step

    def client_step(self, objective, client, batch, *rest):
        counts.append((len(batch.y), batch.y.numel()))
        return step(self, objective, client, batch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(type(run.algorithm), "client_step", client_step)
        assert len(list(run_rounds(run, Simulation(run)))) == run.rounds
    return tuple(map(sum, zip(*counts, strict=True)))


@pytest.mark.parametrize("name", ["fed-avg", "flops", "flops-pa", "sieve"])
def test_central_training_takes_as_many_gradients_as_the_federation(name, monkeypatch):
    config = replace(FEDERATED, algorithm_name=name, algorithm=make_algorithm(name, num_batches=5))
    federation = count_gradients(monkeypatch, config)
    central = count_gradients(monkeypatch, replace(config, centralized=True))
    assert federation == central == (2 * 4 * 5, 2 * 4 * 5 * 8)
    alone = replace(config, centralized=True, centralized_steps=CentralizedSteps.CLIENT, federation=FederationConfig(clients=10))
    assert count_gradients(monkeypatch, alone) == (2 * 5, 2 * 5 * 8)


def test_central_training_sees_every_example():
    run = resolve(replace(FEDERATED, centralized=True, algorithm=make_algorithm("fed-avg", batch_size="all")))
    simulation = Simulation(run)
    assert simulation.population.num_clients == 1
    batches = simulation.client_data.epoch_batches(0, 0, 0, 3)
    assert np.array_equal(np.sort(batches, axis=1), np.tile(np.arange(200), (3, 1)))
    assert resolve(run.config) == run


def test_steps_of_central_training_need_central_training():
    with pytest.raises(ValueError, match="--centralized-steps client applies to --centralized"):
        RunConfig(centralized_steps=CentralizedSteps.CLIENT)
    with pytest.raises(ValueError, match=r"leave out federation\.participation"):
        resolve(replace(FEDERATED, centralized=True, centralized_steps=CentralizedSteps.CLIENT))
