"""What a task brings along."""

import numpy as np
import pytest
import torch

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.core.schedules import DensitySchedule
from fedsieve.data.builtin import Source
from fedsieve.data.partition import Partition
from fedsieve.experiments.config import EvaluationSplit, FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation, validation_split
from fedsieve.experiments.tasks import TASKS, default_options
from fedsieve.experiments.training import run_rounds


@pytest.mark.parametrize(
    ("task", "size", "kept"),
    [
        ("rcv1", 1_606_024, 8_030),
        ("mnist", 7_840, 392),
        ("mnist-cnn", 44_426, 2_221),
        ("emnist", 48_608, 2_430),
        ("digits", 640, 64),
        ("heart", 14, 7),
        ("cifar10", 30_720, 1_536),
        ("cifar10-cnn", 471_338, 23_566),
    ],
)
def test_models_have_the_published_sizes(task, size, kept):
    run = resolve(RunConfig(task=task))
    assert run.objective.layout.size == size
    assert sum(count for _, count in run.algorithm.final_budget(run.objective.layout)) == kept


@pytest.mark.parametrize("task", ["digits", "mnist", "emnist", "rcv1", "mnist-cnn", "mnist-writers", "heart", "cifar10", "cifar10-cnn"])
def test_every_real_task_trains_on_a_stand_in(task):
    federation = FederationConfig(clients=6, participation=0.4, partition=Partition.IID)
    algorithm = algorithm_class("flops-pa")(**(default_options(TASKS[task], algorithm_class("flops-pa"), None) | {"local_steps": 2}))
    run = resolve(
        RunConfig(
            task=task,
            rounds=2,
            data=TASKS[task].data_options(source=Source.SYNTHETIC, num_examples=200),
            federation=federation,
            algorithm=algorithm,
        )
    )
    *_, last = run_rounds(run, Simulation(run))
    assert int((last.parameters != 0).sum()) == sum(count for _, count in run.algorithm.final_budget(run.objective.layout))
    assert torch.isfinite(last.parameters).all()


@pytest.mark.parametrize(("task", "clients"), [("mnist-writers", 539), ("heart", 4)])
def test_a_task_with_natural_clients_has_one_client_for_each(task, clients):
    run = resolve(RunConfig(task=task, data=TASKS[task].data_options(source=Source.SYNTHETIC)))
    assert run.federation.partition is Partition.NATURAL and len(Simulation(run).dataset.counts) == clients
    with pytest.raises(ValueError, match=f"the data name {clients} clients; leave it out"):
        resolve(RunConfig(task=task, federation=FederationConfig(clients=clients + 1)))


def test_natural_clients_need_data_that_name_them():
    with pytest.raises(ValueError, match="those of task mnist do not; leave it out"):
        resolve(RunConfig(task="mnist", federation=FederationConfig(partition=Partition.NATURAL)))


@pytest.mark.parametrize("method", ALGORITHMS)
def test_networks_get_budgets_and_a_schedule_with_every_algorithm(method):
    cls = algorithm_class(method)
    settings = default_options(TASKS["mnist-cnn"], cls, None)
    assert settings["sparsity_allocation"].value == "erk"
    assert "density_schedule" not in cls.option_names() or cls(**settings).density_schedule is DensitySchedule.CUBIC


def test_validation_examples_are_a_tenth_of_each_clients_examples():
    run = resolve(RunConfig(task="digits", evaluate_on=EvaluationSplit.VALIDATION))
    whole, cut = Simulation(resolve(RunConfig(task="digits"))).dataset, Simulation(run).dataset
    assert np.array_equal(cut.counts, whole.counts - whole.counts // 10)
    assert len(cut.test_y) == (whole.counts // 10).sum()
    assert len(cut.y) + len(cut.test_y) == len(whole.y)
    assert np.array_equal(validation_split(whole).x, cut.x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "method", "least"), [("lr", "flops", 0.94), ("lr", "flops-pa", 0.94), ("lg", "flops", 0.915), ("lg", "flops-pa", 0.90)]
)
def test_defaults_reach_what_is_promised_on_a_fresh_seed(task, method, least):
    run = resolve(RunConfig(task=task, algorithm_name=method, seed=7))
    *_, last = run_rounds(run, Simulation(run))
    assert last.metrics[run.metric] >= least
    assert last.metrics["tdr"] >= 0.98
