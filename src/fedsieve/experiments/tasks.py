"""The tasks by name: their data, their objective and their default options."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import network_options, recipe_options
from fedsieve.algorithms.recipes import Recipe
from fedsieve.data import builtin, user_files, user_partition
from fedsieve.data.builtin import FED_HT_FEATURES, NUM_WRITERS, BuiltinFiles, HeartFiles
from fedsieve.data.federated_dataset import FederatedDataset
from fedsieve.data.heart import HOSPITALS, NUM_FEATURES
from fedsieve.data.partition import Partition
from fedsieve.data.published import NUM_MNIST_CLIENTS, NUM_POWER_LAW_CLIENTS, NUM_SIMULATED_CLIENTS
from fedsieve.data.synthetic import Synthetic, generate
from fedsieve.data.user_files import UserFiles
from fedsieve.models.factory import load_factory
from fedsieve.objectives.cifar_cnn import cifar_cnn
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import GateGranularity, Module
from fedsieve.runtime.metrics import METRICS_BY_LOSS

MAX_CLASS_VALUES = 20
"""The maximum number of distinct integers for which a target looks like classes."""
MIN_COHORT = 10
"""The minimum cohort size on a user's data, or all clients: a round with one client follows that client (decision F11)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, objective and default options of a task."""

    description: str
    loss: Loss
    data_options: type
    load: Callable[..., FederatedDataset]
    """(data options, partition, seed, number of server examples) -> federated data set"""
    make_objective: Callable[[Any, GateGranularity], Linear | Module]
    """(data options, gate granularity) -> objective"""
    clients: int = 100
    min_cohort: int = 1
    """minimum cohort size, unless the participation is set by the user"""
    partition: Partition = Partition.QUANTITY
    density: float = 0.05
    is_network: bool = False
    """whether algorithms have the defaults for networks"""

    @property
    def metric(self) -> str:
        """The name of the metric that is compared."""
        return METRICS_BY_LOSS[self.loss][1]


def synthetic_task(name: str, description: str, loss: Loss) -> Task:
    """Return one of the paper's synthetic tasks."""

    def make_objective(data: Synthetic, granularity: GateGranularity) -> Linear:
        return make_linear(loss, data.num_features, data.num_classes if name == "mc" else 1, granularity)

    return Task(description=description, loss=loss, data_options=Synthetic, load=partial(generate, name), make_objective=make_objective)


def softmax_task(name: str, description: str, num_features: int, num_classes: int, **defaults: Any) -> Task:
    """Return the task of a linear classifier on built-in data."""
    shared = {"data_options": BuiltinFiles, "load": partial(builtin.load_builtin_dataset, name), "partition": Partition.LABEL}
    shared["make_objective"] = lambda _, group: make_linear(Loss.SOFTMAX, num_features, num_classes, group)
    return Task(description=description, loss=Loss.SOFTMAX, **shared | defaults)


def published_task(name: str, description: str, loss: Loss, num_features: int, num_outputs: int, clients: int, density: float) -> Task:
    """Return the task of a linear model in the setting of a published table: its data on its clients, all weights zero at the start."""
    return Task(
        description=description,
        loss=loss,
        data_options=BuiltinFiles,
        load=partial(builtin.load_builtin_dataset, name),
        make_objective=lambda _, group: replace(make_linear(loss, num_features, num_outputs, group), init_std=0.0),
        clients=clients,
        partition=Partition.NATURAL,
        density=density,
    )


def make_linear(loss: Loss, num_features: int, num_outputs: int, granularity: GateGranularity, *, intercept: bool = False) -> Linear:
    """Return a linear model; its gates belong to weights or to features."""
    if granularity not in (GateGranularity.WEIGHT, GateGranularity.FEATURE):
        raise ValueError(f"gate-granularity {granularity} needs a module with layers; a linear model has weight and feature")
    return Linear(
        loss=loss,
        num_features=num_features,
        num_outputs=num_outputs,
        intercept=intercept,
        group_by_feature=granularity is GateGranularity.FEATURE,
    )


def file_task(data: UserFiles, model: str | None) -> Task:
    """Return the task of a user's file with the named model, or with the model that the target suggests."""
    if data.path is None:
        raise ValueError("task file needs --data.path with a .npz, .csv or .svm file")
    table = user_files.read_table(data.path, data.target, data.client)
    kind = model or infer_model(table.y)
    features: int = table.x.shape[1]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
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
        if (count := len(user_files.distinct_classes(table.y))) != 2:
            raise ValueError(f"--model logistic needs two classes; data.target {data.target} has {count}; use --model softmax")
        loss, outputs = Loss.LOGISTIC, 1
    elif kind == "softmax" or ":" in kind:
        loss, outputs = Loss.SOFTMAX, len(user_files.distinct_classes(table.y))
    else:
        raise ValueError(f"--model takes linear, logistic, softmax, multilabel or PACKAGE.MODULE:FACTORY; got {kind}")

    def make_objective(_: UserFiles, granularity: GateGranularity) -> Linear | Module:
        if ":" in kind:
            build = load_factory(kind)
            return Module(module=build(), factory=build, granularity=granularity)
        return make_linear(loss, features, outputs, granularity, intercept=data.intercept)

    def load(options: UserFiles, *rest: Any) -> FederatedDataset:
        found = user_partition.load_user_dataset(options, classes, table.example_shape if module else None, *rest)
        remark = class_warning(table.y) if model is None and kind == "linear" else None
        return found._replace(note="; ".join(filter(None, (remark, found.note))) or None)

    classes = {Loss.LOGISTIC: np.float32, Loss.SOFTMAX: np.int64}.get(loss)
    module = ":" in kind
    return Task(
        description="your own rows",
        loss=loss,
        data_options=UserFiles,
        load=load,
        make_objective=make_objective,
        clients=min(100, max(1, len(table.y) // 20)) if table.client is None else len(np.unique(table.client)),
        partition=Partition.QUANTITY if classes is None else Partition.LABEL,
        min_cohort=MIN_COHORT,
        is_network=module,
    )


def infer_model(y: np.ndarray) -> str:
    """Return the default model for a target: strings and integers are classes, other numbers are regression targets."""
    if y.ndim == 2:
        return "multilabel"
    if y.dtype.kind not in "USiub":
        return "linear"
    return "logistic" if len(user_files.distinct_classes(y)) == 2 else "softmax"


def class_warning(y: np.ndarray) -> str | None:
    """Return a warning if a numeric target may be classes."""
    values = np.unique(y)
    if len(values) > MAX_CLASS_VALUES or (values % 1 != 0).any():
        return None
    model = "logistic" if len(values) == 2 else "softmax"
    return f"the target has {len(values)} different whole numbers and is predicted as a number; for classes use --model {model}"


TASKS = {
    "lr": synthetic_task("lr", "sparse linear regression, generated", Loss.SQUARED),
    "lg": synthetic_task("lg", "two classes, generated", Loss.LOGISTIC),
    "mc": synthetic_task("mc", "many classes, generated", Loss.SOFTMAX),
    "digits": softmax_task("digits", "8 x 8 digits, shipped with scikit-learn", 64, 10, clients=20, density=0.1),
    "mnist": softmax_task("mnist", "28 x 28 digits, softmax", 784, 10),
    "mnist-writers": softmax_task(
        "mnist-writers", "28 x 28 digits on their 539 writers", 784, 10, clients=NUM_WRITERS, partition=Partition.NATURAL
    ),
    "emnist": softmax_task("emnist", "62 classes of characters, softmax", 784, 62, clients=1000),
    "mnist-cnn": Task(
        description="28 x 28 digits, LeNet",
        loss=Loss.SOFTMAX,
        data_options=BuiltinFiles,
        load=partial(builtin.load_builtin_dataset, "mnist-cnn"),
        make_objective=lambda _, group: Module(module=lenet(), factory=lenet, granularity=group),
        partition=Partition.LABEL,
        is_network=True,
    ),
    "rcv1": Task(
        description="newswire topics, 34 labels, sparse rows",
        loss=Loss.MULTILABEL,
        data_options=BuiltinFiles,
        load=partial(builtin.load_builtin_dataset, "rcv1"),
        make_objective=lambda _, group: make_linear(Loss.MULTILABEL, 47_236, 34, group),
        partition=Partition.CLUSTERS,
        density=0.005,
    ),
    "heart": Task(
        description="heart disease at four hospitals, logistic",
        loss=Loss.LOGISTIC,
        data_options=HeartFiles,
        load=builtin.load_heart_dataset,
        make_objective=lambda _, group: make_linear(Loss.LOGISTIC, NUM_FEATURES, 1, group, intercept=True),
        clients=len(HOSPITALS),
        min_cohort=len(HOSPITALS),
        partition=Partition.NATURAL,
        density=0.5,
    ),
    "cifar10": softmax_task("cifar10", "32 x 32 colour images, softmax", 3072, 10),
    "cifar10-cnn": Task(
        description="32 x 32 colour images, CNN",
        loss=Loss.SOFTMAX,
        data_options=BuiltinFiles,
        load=partial(builtin.load_builtin_dataset, "cifar10-cnn"),
        make_objective=lambda _, group: Module(module=cifar_cnn(), factory=cifar_cnn, granularity=group),
        partition=Partition.LABEL,
        is_network=True,
    ),
    "fed-ht-linear": published_task(
        "fed-ht-linear", "Simulation I of Fed-HT, linear", Loss.SQUARED, FED_HT_FEATURES, 1, NUM_SIMULATED_CLIENTS, 0.2
    ),
    "fed-ht-logistic": published_task(
        "fed-ht-logistic", "Simulation II of Fed-HT, logistic", Loss.LOGISTIC, FED_HT_FEATURES, 1, NUM_SIMULATED_CLIENTS, 0.2
    ),
    "fed-ht-mnist": published_task(
        "fed-ht-mnist", "28 x 28 digits, two classes a client, softmax", Loss.SOFTMAX, 784, 10, NUM_MNIST_CLIENTS, 0.0638
    ),
    "fedml-mnist": published_task(
        "fedml-mnist", "28 x 28 digits, two classes a client, sizes by a power law", Loss.SOFTMAX, 784, 10, NUM_POWER_LAW_CLIENTS, 0.05
    ),
    "heterofl-mnist": Task(
        description="28 x 28 digits, two classes a client, LeNet",
        loss=Loss.SOFTMAX,
        data_options=BuiltinFiles,
        load=partial(builtin.load_builtin_dataset, "heterofl-mnist"),
        make_objective=lambda _, group: Module(module=lenet(), factory=lenet, granularity=group),
        clients=NUM_MNIST_CLIENTS,
        partition=Partition.NATURAL,
        is_network=True,
    ),
    "file": Task(
        description="your own rows",
        loss=Loss.SQUARED,
        data_options=UserFiles,
        load=user_partition.load_user_dataset,
        make_objective=lambda *_: None,  # pyright: ignore[reportArgumentType]  # `get_task` replaces this entry before it is used
    ),
}


def default_options(
    task: Task, algorithm_type: type[BaseAlgorithm], model: str | None, recipe: Recipe = Recipe.RECOMMENDED
) -> dict[str, Any]:
    """Return the options of an algorithm that differ from its defaults: networks and recipes have some."""
    is_network = task.is_network or (model is not None and ":" in model)
    return (network_options(algorithm_type) if is_network else {}) | recipe_options(algorithm_type, recipe, task.loss)


def get_task(name: str, data: Any, model: str | None) -> Task:
    """Return the task of a run."""
    if name == "file":
        return file_task(data, model)
    if model is not None:
        raise ValueError(f"--model belongs to task file; task {name} brings its own")
    return TASKS[name]
