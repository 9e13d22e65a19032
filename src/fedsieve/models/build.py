"""A run's parameters as a model that knows what it is."""

from pathlib import Path

import numpy as np
from torch import Tensor

from fedsieve.data import user_files
from fedsieve.experiments.config import Run
from fedsieve.experiments.simulation import Problem
from fedsieve.models.sparse_model import Card, Model
from fedsieve.objectives.linear import Linear, Loss


def model_of(run: Run, problem: Problem, theta: Tensor) -> Model:
    """The weights that are not zero, their places and their meaning."""
    flat = problem.outward(theta).float().numpy(force=True)
    index = np.flatnonzero(flat).astype(np.int32)
    tensors = {name: tuple(shape) for name, (_, shape) in run.objective.places.items()}
    return Model(index=index, value=flat[index], tensors=tensors, free=run.objective.layout.free, card=card(run, problem, theta))


def card(run: Run, problem: Problem, theta: Tensor) -> Card:
    """What the parameters mean, with the names of classes and features where the rows have some."""
    table = user_files.read(run.data.path, run.data.target, run.data.client) if run.task == "file" else None
    objective, loss, rows = run.objective, run.about.loss, problem.test[0]
    classes = None
    if loss is not Loss.SQUARED:
        known = () if table is None else user_files.class_names(table)
        count = 2 if loss is Loss.LOGISTIC else objective.predict(theta, rows[:1]).shape[1]
        classes = (*known, *map(str, range(len(known), count)))  # a module may have more outputs than there are classes
    return Card(
        task=run.task,
        method=run.method,
        loss=loss,
        row=tuple(rows.shape[1:]),
        classes=classes,
        features=tuple(table.names) if table is not None and Path(run.data.path).suffix == ".csv" else None,
        first=0 if table is None else table.first,
        spread=None if problem.spread is None else tuple(float(f"{scale:.6g}") for scale in problem.spread),
        build=None if isinstance(objective, Linear) else run.model or f"{objective.build.__module__}:{objective.build.__qualname__}",
    )
