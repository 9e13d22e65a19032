"""The tasks by the name a user types: their data, their objective, and the defaults that go with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fedsieve import metrics
from fedsieve.core.optimizers import StepRule
from fedsieve.core.selection import BudgetRule, Schedule
from fedsieve.core.types import Objective
from fedsieve.data import files
from fedsieve.data.files import Files
from fedsieve.data.partition import Partition
from fedsieve.data.spread import Drawn
from fedsieve.data.synthetic import Synthetic, generate
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module

MEASURES = {
    Loss.SQUARED: (metrics.regression, "r2"),
    Loss.LOGISTIC: (metrics.binary, "accuracy"),
    Loss.SOFTMAX: (metrics.multiclass, "accuracy"),
    Loss.MULTILABEL: (metrics.multilabel, "micro_f1"),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task brings along."""

    about: str
    loss: Loss
    options: type
    draw: Callable[..., Drawn]
    """(options, spread, seed, server rows) -> rows on clients"""
    objective: Callable[[Any], Objective]
    clients: int = 100
    partition: Partition = Partition.QUANTITY
    density: float = 0.05
    settings: Mapping[str, Any] = field(default_factory=dict)
    """defaults of every method on this task"""

    @property
    def metric(self) -> str:
        """The name of the number that is compared."""
        return MEASURES[self.loss][1]


def synthetic(name: str, about: str, loss: Loss) -> Task:
    """One of the paper's generated tasks."""

    def objective(data: Synthetic) -> Linear:
        return Linear(loss=loss, features=data.features, outputs=data.classes if name == "mc" else 1)

    return Task(about=about, loss=loss, options=Synthetic, draw=partial(generate, name), objective=objective)


def softmax(name: str, about: str, features: int, classes: int, **defaults: Any) -> Task:
    """A linear classifier on known files."""
    objective = Linear(loss=Loss.SOFTMAX, features=features, outputs=classes)
    shared = {"options": Files, "draw": partial(files.draw, name), "partition": Partition.LABEL}
    return Task(about=about, loss=Loss.SOFTMAX, objective=lambda _: objective, **shared, **defaults)


TASKS = {
    "lr": synthetic("lr", "sparse linear regression, generated", Loss.SQUARED),
    "lg": synthetic("lg", "two classes, generated", Loss.LOGISTIC),
    "mc": synthetic("mc", "many classes, generated", Loss.SOFTMAX),
    "digits": softmax("digits", "8 x 8 digits, shipped with scikit-learn", 64, 10, clients=20, density=0.1),
    "mnist": softmax("mnist", "28 x 28 digits, softmax", 784, 10),
    "emnist": softmax("emnist", "62 classes of characters, softmax", 784, 62, clients=1000),
    "mnist-cnn": Task(
        about="28 x 28 digits, LeNet",
        loss=Loss.SOFTMAX,
        options=Files,
        draw=partial(files.draw, "mnist-cnn"),
        objective=lambda _: Module(module=lenet(), build=lenet),
        partition=Partition.LABEL,
        settings={
            "budget": BudgetRule.ERK,
            "schedule": Schedule.CUBIC,
            "start_density": 0.3,
            "step_rule": StepRule.CONSTANT,
            "rate": 0.3,
            "clip": 1.0,
            "steps": 60,
        },
    ),
    "rcv1": Task(
        about="newswire topics, 34 labels, sparse rows",
        loss=Loss.MULTILABEL,
        options=Files,
        draw=partial(files.draw, "rcv1"),
        objective=lambda _: Linear(loss=Loss.MULTILABEL, features=47_236, outputs=34),
        partition=Partition.CLUSTERS,
        density=0.005,
    ),
}
