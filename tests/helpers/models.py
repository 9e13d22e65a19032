"""Small models with random weights."""

from dataclasses import replace

import numpy as np

from fedsieve.models.sparse_model import ModelMetadata, SparseModel
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.losses import Loss

RNG = np.random.default_rng(5)
LENET = "fedsieve.objectives.lenet:lenet"


def linear_model(loss=Loss.SOFTMAX, features=40, outputs=3, intercept=True, density=0.2, **names):
    """A linear model with random weights."""
    outputs = 1 if loss in (Loss.SQUARED, Loss.LOGISTIC) else outputs
    tensors = {"weights": (outputs, features)} | ({"intercept": (outputs,)} if intercept else {})
    flat = RNG.standard_normal(outputs * features + (outputs if intercept else 0)).astype(np.float32)
    counted = flat[: outputs * features]
    counted[RNG.random(counted.shape) > density] = 0
    index = np.flatnonzero(flat).astype(np.int32)
    classes = {Loss.SQUARED: None, Loss.LOGISTIC: ("no", "yes")}.get(loss, tuple(f"class {i}" for i in range(outputs)))
    metadata = ModelMetadata(task="file", algorithm="sieve", loss=loss, input_shape=(features,), classes=classes, **names)
    return SparseModel(indices=index, values=flat[index], tensor_shapes=tensors, num_ungated=outputs if intercept else 0, metadata=metadata)


def lenet_model():
    """LeNet with one weight in twenty."""
    tensors = {name: tuple(parameter.shape) for name, parameter in lenet().named_parameters()}
    index = np.flatnonzero(RNG.random(44_426) < 0.05).astype(np.int32)
    metadata = ModelMetadata(
        task="mnist-cnn", algorithm="sieve", loss=Loss.SOFTMAX, input_shape=(1, 28, 28), classes=tuple("0123456789"), factory=LENET
    )
    return SparseModel(
        indices=index,
        values=RNG.standard_normal(len(index)).astype(np.float32) / 5,
        tensor_shapes=tensors,
        num_ungated=0,
        metadata=metadata,
    )


MODELS = {
    "regression": linear_model(Loss.SQUARED),
    "two classes": linear_model(Loss.LOGISTIC, intercept=False),
    "classes": linear_model(features=64),
    "labels": linear_model(Loss.MULTILABEL, outputs=5),
    "network": lenet_model(),
}
LINEAR = [name for name in MODELS if name != "network"]


def is_same_model(one, other):
    return (
        one.metadata == other.metadata
        and one.tensor_shapes == other.tensor_shapes
        and one.num_ungated == other.num_ungated
        and np.array_equal(one.to_dense(), other.to_dense())
    )


def random_examples(model, count=50):
    return RNG.standard_normal((count, *model.metadata.input_shape)).astype(np.float32)


def with_feature_names(model, *features):
    return replace(model, metadata=replace(model.metadata, features=features))
