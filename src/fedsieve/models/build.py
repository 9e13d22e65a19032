"""A run's parameters as a model that knows what it is."""

from pathlib import Path

import numpy as np
from torch import Tensor

from fedsieve.data import user_files
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.simulation import Simulation
from fedsieve.models.sparse_model import ModelMetadata, SparseModel
from fedsieve.objectives.linear import Linear, Loss


def model_of(config: RunConfig, simulation: Simulation, theta: Tensor) -> SparseModel:
    """The weights that are not zero, their places and their meaning."""
    flat = simulation.to_original(theta).float().numpy(force=True)
    index = np.flatnonzero(flat).astype(np.int32)
    tensors = {name: tuple(shape) for name, (_, shape) in config.objective.slices.items()}
    return SparseModel(
        indices=index,
        values=flat[index],
        tensor_shapes=tensors,
        num_ungated=config.objective.layout.num_ungated,
        metadata=build_metadata(config, simulation, theta),
    )


def build_metadata(config: RunConfig, simulation: Simulation, theta: Tensor) -> ModelMetadata:
    """What the parameters mean, with the names of classes and features where the rows have some."""
    table = user_files.read_table(config.data.path, config.data.target, config.data.client) if config.task == "file" else None
    objective, loss, rows = config.objective, config.task_spec.loss, simulation.test_set[0]
    classes = None
    if loss is not Loss.SQUARED:
        known = () if table is None else user_files.class_names(table)
        count = 2 if loss is Loss.LOGISTIC else objective.predict(theta, rows[:1]).shape[1]
        classes = (*known, *map(str, range(len(known), count)))  # a module may have more outputs than there are classes
    return ModelMetadata(
        task=config.task,
        algorithm=config.algorithm_name,
        loss=loss,
        input_shape=tuple(rows.shape[1:]),
        classes=classes,
        features=tuple(table.feature_names) if table is not None and Path(config.data.path).suffix == ".csv" else None,
        first_feature_id=0 if table is None else table.first_feature_id,
        feature_std=None if simulation.feature_std is None else tuple(float(f"{scale:.6g}") for scale in simulation.feature_std),
        factory=None
        if isinstance(objective, Linear)
        else config.model or f"{objective.factory.__module__}:{objective.factory.__qualname__}",
    )
