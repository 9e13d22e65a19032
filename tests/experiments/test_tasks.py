"""What a task brings along."""

import numpy as np
import pytest
import torch

from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.core.selection import Schedule
from fedsieve.data.builtin import Files, Source
from fedsieve.experiments.config import Federation, Judge, Run
from fedsieve.experiments.simulation import Problem, held_out
from fedsieve.experiments.tasks import TASKS, settings_of
from fedsieve.experiments.training import execute


@pytest.mark.parametrize(
    ("task", "size", "kept"),
    [("rcv1", 1_606_024, 8_030), ("mnist", 7_840, 392), ("mnist-cnn", 44_426, 2_221), ("emnist", 48_608, 2_430), ("digits", 640, 64)],
)
def test_models_have_the_papers_sizes(task, size, kept):
    run = Run(task=task)
    assert run.objective.layout.size == size
    assert sum(count for _, count in run.algorithm.final_budget(run.objective.layout)) == kept


@pytest.mark.parametrize("task", ["digits", "mnist", "emnist", "rcv1", "mnist-cnn"])
def test_every_real_task_trains_on_a_stand_in(task):
    federation = Federation(clients=6, participation=0.4)
    algorithm = algorithm_class("flops-pa")(**(settings_of(TASKS[task], algorithm_class("flops-pa"), None) | {"steps": 2}))
    run = Run(task=task, rounds=2, data=Files(source=Source.STAND_IN, rows=200), federation=federation, algorithm=algorithm)
    *_, last = execute(run, Problem(run))
    assert int((last.theta != 0).sum()) == sum(count for _, count in run.algorithm.final_budget(run.objective.layout))
    assert torch.isfinite(last.theta).all()


@pytest.mark.parametrize("method", METHODS)
def test_networks_get_budgets_and_a_schedule_with_every_method(method):
    cls = algorithm_class(method)
    settings = settings_of(TASKS["mnist-cnn"], cls, None)
    assert settings["budget"].value == "erk"
    assert "schedule" not in cls.offered() or cls(**settings).schedule is Schedule.CUBIC


def test_validation_rows_are_a_tenth_of_each_clients_own():
    run = Run(task="digits", judge=Judge.VALIDATION)
    whole, cut = Problem(Run(task="digits")).drawn, Problem(run).drawn
    assert np.array_equal(cut.counts, whole.counts - whole.counts // 10)
    assert len(cut.test_y) == (whole.counts // 10).sum()
    assert len(cut.y) + len(cut.test_y) == len(whole.y)
    assert np.array_equal(held_out(whole).x, cut.x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "method", "least"), [("lr", "flops", 0.94), ("lr", "flops-pa", 0.94), ("lg", "flops", 0.915), ("lg", "flops-pa", 0.90)]
)
def test_defaults_reach_what_is_promised_on_a_fresh_seed(task, method, least):
    run = Run(task=task, method=method, seed=7)
    *_, last = execute(run, Problem(run))
    assert last.row[run.metric] >= least
    assert last.row["tdr"] >= 0.98
