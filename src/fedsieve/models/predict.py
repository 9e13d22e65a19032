"""Predict the examples of a file, write predictions as .csv and score them. Imports torch only for modules, ONNX and scores."""

import csv
from pathlib import Path
from typing import TextIO

import numpy as np

from fedsieve.data.prediction_files import ModelInput, PredictionData, read_examples
from fedsieve.data.user_files import class_labels
from fedsieve.formatting import spreadsheet_cell
from fedsieve.models import sparse_model
from fedsieve.models.factory import require_trust
from fedsieve.models.sparse_model import ModelError, ModelMetadata
from fedsieve.objectives.losses import Loss


def predict_file(model_path: Path, data_path: Path, target: str | None, *, trust: bool) -> tuple[ModelMetadata, np.ndarray, PredictionData]:
    """The metadata of a model, its predictions or logits for the examples of a file, and these examples."""
    if model_path.suffix == ".onnx" and model_path.is_file():
        from fedsieve.models.export import predict_onnx, read_onnx_metadata

        metadata = read_onnx_metadata(model_path)
        data = read_examples(data_path, model_input(metadata), target)
        return metadata, predict_onnx(model_path, data.x), data
    model = sparse_model.read_model(model_path)
    require_trust(model.metadata.factory, f"the model {model_path}", trust=trust)
    data = read_examples(data_path, model_input(model.metadata), target)
    if model.metadata.factory is None:
        return model.metadata, model.predict(data.x), data
    from fedsieve.models.export import predict

    outputs = predict(model, data.x)
    if outputs.ndim != 2 or outputs.shape[1] < len(model.metadata.classes or (None,)):
        raise ModelError(
            f"{model.metadata.factory} has outputs of shape {outputs.shape}; the model has {len(model.metadata.classes or '1')} classes"
        )
    return model.metadata, outputs, data


def model_input(metadata: ModelMetadata) -> ModelInput:
    """The input of a model with this metadata."""
    return ModelInput(metadata.input_shape, metadata.features, metadata.first_feature_id)


def write_predictions(file: TextIO, metadata: ModelMetadata, outputs: np.ndarray, *, probabilities: bool) -> None:
    """Write the predictions as .csv, one line per example."""
    lines = csv.writer(file, lineterminator="\n")
    if metadata.loss is Loss.SQUARED and not probabilities:
        lines.writerow(["prediction"])
        lines.writerows([f"{value:.7g}"] for value in outputs[:, 0])
        return
    class_probabilities = sparse_model.probabilities(metadata.loss, outputs)
    classes = [spreadsheet_cell(name) for name in metadata.classes or ()]
    cells = [[f"{value:.4f}" for value in row] for row in class_probabilities] if probabilities else []
    if metadata.loss is Loss.MULTILABEL:
        lines.writerow(classes)
        lines.writerows(cells or (class_probabilities > 0.5).astype(int).tolist())
        return
    best = class_probabilities.argmax(1)
    names = [classes[i] for i in best]
    if probabilities:
        lines.writerow(["prediction", *classes])
        lines.writerows([name, *row] for name, row in zip(names, cells, strict=True))
    else:
        lines.writerow(["prediction", "probability"])
        lines.writerows([name, f"{class_probabilities[i, j]:.4f}"] for i, (name, j) in enumerate(zip(names, best, strict=True)))


def score_predictions(metadata: ModelMetadata, outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The metrics of the predictions of examples with known targets."""
    import torch

    from fedsieve.runtime.metrics import METRICS_BY_LOSS

    if len(targets) != len(outputs):
        raise ModelError(f"--target has {len(targets)} entries for {len(outputs)} examples")
    if metadata.loss in (Loss.SQUARED, Loss.MULTILABEL):
        if targets.dtype.kind not in "fiub" or targets.ndim != (1 if metadata.loss is Loss.SQUARED else 2):
            raise ModelError("--target must hold numbers: one per example for regression, a 0/1 column per label for several labels")
        y = targets.astype(np.float32)
    else:
        classes = metadata.classes or ()
        class_index = {name: i for i, name in enumerate(classes)}
        names = class_labels(targets)
        if unknown := sorted(set(names) - set(classes)):
            raise ModelError(f"--target has the class {unknown[0]!r}, which the model does not know; it knows {', '.join(classes[:8])}")
        y = np.array([class_index[name] for name in names], np.float32 if metadata.loss is Loss.LOGISTIC else np.int64)
    return METRICS_BY_LOSS[metadata.loss][0](torch.from_numpy(outputs), torch.from_numpy(y))
