"""The tasks by the name a user types: their data, their objective, and the defaults that go with them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from torch import nn

from fedsieve.algorithms.base import Method
from fedsieve.algorithms.defaults import CAREFUL, FALLING, fitting
from fedsieve.algorithms.flops_pa import GateNoise
from fedsieve.algorithms.sieve_rules import Ending, Uplink
from fedsieve.core.aggregation import Weighting
from fedsieve.core.optimizers import StepRule
from fedsieve.core.types import Objective
from fedsieve.data import builtin, user_files, user_partition
from fedsieve.data.builtin import Files
from fedsieve.data.federated_dataset import Drawn
from fedsieve.data.partition import Partition
from fedsieve.data.synthetic import Synthetic, generate
from fedsieve.data.user_files import Own
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Group, Module
from fedsieve.runtime import metrics

MEASURES = {
    Loss.SQUARED: (metrics.regression, "r2"),
    Loss.LOGISTIC: (metrics.binary, "accuracy"),
    Loss.SOFTMAX: (metrics.multiclass, "accuracy"),
    Loss.MULTILABEL: (metrics.multilabel, "micro_f1"),
}


IMAGES = {**FALLING, "rate": 3.0, "batch": 64, "scaling_rate": 0.3, "step_gates": GateNoise.SAMPLED}
"""For softmax on images; the last two are FLoPS-PA's: with the schedule it may close gates sooner."""
BOUNDED = {"step_rule": StepRule.CAPPED}
"""Steps of at most 1/L: Polyak's aims at a loss of 0, which noisy targets and models smaller than a batch do not have (decision F10)."""
FEW_VALUES = 20
"""Different whole numbers up to which a target looks like classes."""
MOST_BOUNDED = 1000
"""Sparse features up to which L is computed: it needs a client's rows over all the features it has."""
FEWEST = 10
"""Clients a round takes at least on rows of a user's own, or all there are: a round of one client follows that client (decision F11)."""
REFITTED = {"uplink": Uplink.WEIGHTS, "ending": Ending.FROZEN}
"""For sieve on rows of a user's own (estimators, `fit`, task file): numbers, not signs, no gate noise at the end (H6)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task brings along."""

    about: str
    loss: Loss
    options: type
    draw: Callable[..., Drawn]
    """(options, spread, seed, server rows) -> rows on clients"""
    objective: Callable[[Any, Group], Objective]
    """(options, what shares a gate) -> the loss"""
    clients: int = 100
    fewest: int = 1
    """clients a round takes at least, unless a participation is typed"""
    partition: Partition = Partition.QUANTITY
    density: float = 0.05
    weights: Weighting | None = None
    """how much clients count (None: the method's own)"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """defaults of every method on this task"""
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """found on validation rows, for methods without a rule that holds on every task"""
    sieve: Mapping[str, Any] = field(default_factory=dict)
    """where sieve departs from its rule: rows of a user's own"""
    rule: Callable[[type[Method]], Mapping[str, Any]] = lambda _: {}
    """what else depends on the method"""

    @property
    def metric(self) -> str:
        """The name of the number that is compared."""
        return MEASURES[self.loss][1]


def synthetic(name: str, about: str, loss: Loss) -> Task:
    """One of the paper's generated tasks."""

    def objective(data: Synthetic, group: Group) -> Linear:
        return linear(loss, data.features, data.classes if name == "mc" else 1, group)

    return Task(about=about, loss=loss, options=Synthetic, draw=partial(generate, name), objective=objective)


def softmax(name: str, about: str, features: int, classes: int, **defaults: Any) -> Task:
    """A linear classifier on known files."""
    shared = {"options": Files, "draw": partial(builtin.draw, name), "partition": Partition.LABEL}
    shared["objective"] = lambda _, group: linear(Loss.SOFTMAX, features, classes, group)
    return Task(about=about, loss=Loss.SOFTMAX, **shared, **defaults)


def linear(loss: Loss, features: int, outputs: int, group: Group, *, intercept: bool = False) -> Linear:
    """A linear model; of the groups, only features make sense in it."""
    if group not in (Group.WEIGHT, Group.FEATURE):
        raise ValueError(f"gates.group {group} needs a module with layers; a linear model has weight and feature")
    return Linear(loss=loss, features=features, outputs=outputs, intercept=intercept, by_feature=group is Group.FEATURE)


def file_task(data: Own, model: str | None) -> Task:
    """A user's own rows under the model they name; without one, what the target suggests."""
    if data.path is None:
        raise ValueError("task file needs --data.path with a .npz, .csv or .svm file")
    table = user_files.read(data.path, data.target, data.client)
    kind = model or suggested(table.y)
    features = table.x.shape[1]
    if table.y.ndim != 1 and kind != "multilabel":
        raise ValueError(f"--model {kind} needs one value a row to predict; data.target {data.target} has {table.y.ndim} dimensions")
    if kind == "linear":
        if table.y.dtype.kind not in "fiub":
            raise ValueError(f"--model linear needs numbers to predict; data.target {data.target} holds words; use --model softmax")
        loss, outputs = Loss.SQUARED, 1
    elif kind == "multilabel":
        if table.y.ndim != 2:
            raise ValueError("--model multilabel needs a 0/1 column a label; this target has one value a row; use --model softmax")
        if not np.isin(table.y, (0, 1)).all():
            raise ValueError("--model multilabel needs 0 or 1 for each label; this target holds other numbers")
        loss, outputs = Loss.MULTILABEL, table.y.shape[1]
    elif kind == "logistic":
        if (count := len(user_files.classes(table.y))) != 2:
            raise ValueError(f"--model logistic tells two classes apart; data.target {data.target} has {count}; use --model softmax")
        loss, outputs = Loss.LOGISTIC, 1
    elif kind == "softmax" or ":" in kind:
        loss, outputs = Loss.SOFTMAX, len(user_files.classes(table.y))
    else:
        raise ValueError(f"--model takes linear, logistic, softmax, multilabel or PACKAGE.MODULE:FACTORY; got {kind}")

    def objective(_: Own, group: Group) -> Objective:
        if ":" in kind:
            build = factory(kind)
            return Module(module=build(), build=build, group=group)
        return linear(loss, features, outputs, group, intercept=data.intercept)

    def draw(options: Own, *rest: Any) -> Drawn:
        found = user_partition.draw(options, classes, table.row if module else None, *rest)
        remark = doubtful(table.y) if model is None and kind == "linear" else None
        return found._replace(note="; ".join(filter(None, (remark, found.note))) or None)

    classes = {Loss.LOGISTIC: np.float32, Loss.SOFTMAX: np.int64}.get(loss)
    module, sparse = ":" in kind, not isinstance(table.x, np.ndarray)
    return Task(
        about="your own rows",
        loss=loss,
        options=Own,
        draw=draw,
        objective=objective,
        clients=min(100, max(1, table.x.shape[0] // 20)) if table.owner is None else len(np.unique(table.owner)),
        partition=Partition.QUANTITY if classes is None else Partition.LABEL,
        fewest=FEWEST,
        settings=CAREFUL if module else {},
        sieve=REFITTED,
        rule=lambda method: {} if module else own_settings(method, linear(loss, features, outputs, Group.WEIGHT), sparse=sparse),
    )


def suggested(y: np.ndarray) -> str:
    """The model a target asks for, where nobody names one: words and whole numbers are classes, other numbers are to be predicted."""
    if y.ndim == 2:
        return "multilabel"
    if y.dtype.kind not in "USiub":
        return "linear"
    return "logistic" if len(user_files.classes(y)) == 2 else "softmax"


def doubtful(y: np.ndarray) -> str | None:
    """What to say of numbers that may well be classes."""
    values = np.unique(y)
    if len(values) > FEW_VALUES or (values % 1 != 0).any():
        return None
    model = "logistic" if len(values) == 2 else "softmax"
    return f"the target has {len(values)} different whole numbers and is predicted as a number; for classes use --model {model}"


def own_settings(method: type[Method], objective: Linear, *, sparse: bool) -> dict[str, Any]:
    """How a method is set for a linear model of a user's own rows."""
    narrow = not sparse or objective.features <= MOST_BOUNDED
    small = objective.loss is Loss.SQUARED or objective.layout.gated <= method.batch
    bounded = narrow and small and method.step_rule is StepRule.POLYAK
    return (BOUNDED if bounded else {}) | (REFITTED if method.holds_everywhere else {})


def factory(name: str) -> Callable[[], nn.Module]:
    """The function PACKAGE.MODULE:FACTORY, which builds a module."""
    where, _, what = name.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(import_module(where), what)
        built = found()
    except Exception as problem:  # whatever a user's own code raises is theirs to read, in one line
        raise ValueError(f"--model {name} cannot be loaded: {type(problem).__name__}: {problem}") from None
    finally:
        sys.path.remove("")
    if not isinstance(built, nn.Module):
        raise ValueError(f"--model {name} must build a torch.nn.Module; it built {type(built).__name__}")
    return found


TASKS = {
    "lr": synthetic("lr", "sparse linear regression, generated", Loss.SQUARED),
    "lg": synthetic("lg", "two classes, generated", Loss.LOGISTIC),
    "mc": synthetic("mc", "many classes, generated", Loss.SOFTMAX),
    "digits": softmax("digits", "8 x 8 digits, shipped with scikit-learn", 64, 10, clients=20, density=0.1),
    "mnist": softmax("mnist", "28 x 28 digits, softmax", 784, 10, weights=Weighting.SQRT, tuned=IMAGES),
    "emnist": softmax(
        "emnist",
        "62 classes of characters, softmax",
        784,
        62,
        clients=1000,
        weights=Weighting.SQRT,
        tuned={**IMAGES, "schedule_end": 0.8},
    ),
    "mnist-cnn": Task(
        about="28 x 28 digits, LeNet",
        loss=Loss.SOFTMAX,
        options=Files,
        draw=partial(builtin.draw, "mnist-cnn"),
        objective=lambda _, group: Module(module=lenet(), build=lenet, group=group),
        partition=Partition.LABEL,
        settings=CAREFUL,
    ),
    "rcv1": Task(
        about="newswire topics, 34 labels, sparse rows",
        loss=Loss.MULTILABEL,
        options=Files,
        draw=partial(builtin.draw, "rcv1"),
        objective=lambda _, group: linear(Loss.MULTILABEL, 47_236, 34, group),
        partition=Partition.CLUSTERS,
        density=0.005,
    ),
    "file": Task(
        about="your own rows", loss=Loss.SQUARED, options=Own, draw=user_partition.draw, objective=lambda *_: None, sieve=REFITTED
    ),
}


def settings_of(task: Task, method: type[Method], model: str | None) -> dict[str, Any]:
    """Defaults of a method on this task, or for a module of the user's own."""
    settings = dict(CAREFUL if model is not None and ":" in str(model) else task.settings)
    return fitting(method, settings | (task.sieve if method.holds_everywhere else task.tuned) | task.rule(method))


def task_of(name: str, data: Any, model: str | None) -> Task:
    """The task of a run."""
    if name == "file":
        return file_task(data, model)
    if model is not None:
        raise ValueError(f"--model belongs to task file; task {name} brings its own")
    return TASKS[name]
