"""Build a SparseModel from a parameter vector, for simulated and deployed runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from fedsieve.models.sparse_model import ModelMetadata, SparseModel
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss
from fedsieve.objectives.module import Module

LOSS_BY_FUNCTION = {functional.cross_entropy: Loss.SOFTMAX, functional.binary_cross_entropy_with_logits: Loss.MULTILABEL}
"""The meaning of a module's outputs, by the loss it is trained with. With any other loss the outputs are numbers."""


def build_model(
    objective: Linear | Module,
    parameters: Tensor,
    example: Any,
    *,
    task: str,
    algorithm: str,
    class_names: Sequence[str] = (),
    feature_names: Sequence[str] | None = None,
    first_feature_id: int = 0,
    feature_std: np.ndarray | None = None,
    factory: str | None = None,
) -> SparseModel:
    """Return the nonzero weights of `parameters` with the metadata of the model; `example` is a batch of one example.

    `factory` names the function that builds a module (default: the objective's own). Classes without a name get their number.
    """
    flat = parameters.float().numpy(force=True)  # parameters, and buffers if the model has any
    indices = np.flatnonzero(flat).astype(np.int32)
    if isinstance(objective, Linear):
        loss, num_outputs, factory = objective.loss, objective.num_outputs, None
    else:
        loss, num_outputs = LOSS_BY_FUNCTION.get(objective.loss, Loss.SQUARED), objective.predict(parameters, example).shape[-1]
        build = objective.factory or type(objective.module)
        factory = factory or f"{build.__module__}:{build.__qualname__}"
    classes = None
    if loss is not Loss.SQUARED:  # a module may have more outputs than there are class names
        classes = (*class_names, *map(str, range(len(class_names), 2 if loss is Loss.LOGISTIC else num_outputs)))
    metadata = ModelMetadata(
        task=task,
        algorithm=algorithm,
        loss=loss,
        input_shape=tuple(example.shape[1:]),
        classes=classes,
        features=None if feature_names is None else tuple(feature_names),
        first_feature_id=first_feature_id,
        feature_std=None if feature_std is None else tuple(float(f"{scale:.6g}") for scale in feature_std),
        factory=factory,
    )
    return SparseModel(
        indices=indices,
        values=flat[indices],
        tensor_shapes={name: tuple(shape) for name, (_, shape) in objective.slices.items()},
        num_ungated=objective.layout.num_ungated + len(flat) - objective.layout.size,
        metadata=metadata,
    )
