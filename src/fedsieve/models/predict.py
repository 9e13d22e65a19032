"""What a model says of the rows in a file, as comma-separated values, and how right it is. Only modules, ONNX and scores need torch."""

import csv
from pathlib import Path
from typing import TextIO

import numpy as np

from fedsieve.data import prediction_files, user_files
from fedsieve.models import sparse_model
from fedsieve.models.sparse_model import ModelError, ModelMetadata
from fedsieve.objectives.losses import Loss


def predict_file(
    model_path: Path, data_path: Path, target: str | None
) -> tuple[ModelMetadata, np.ndarray, prediction_files.PredictionData]:
    """What a model says of the rows in a file."""
    if model_path.suffix == ".onnx" and model_path.is_file():
        from fedsieve.models.export import predict_onnx, read_onnx_metadata

        card = read_onnx_metadata(model_path)
        rows = prediction_files.read_examples(
            data_path, prediction_files.ModelInput(card.input_shape, card.features, card.first_feature_id), target
        )
        return card, predict_onnx(model_path, rows.x), rows
    given = sparse_model.read_model(model_path)
    card = given.metadata
    rows = prediction_files.read_examples(
        data_path, prediction_files.ModelInput(card.input_shape, card.features, card.first_feature_id), target
    )
    if card.factory is None:
        return card, given.predict(rows.x), rows
    from fedsieve.models.export import predict as through_torch

    return card, through_torch(given, rows.x), rows


def write_predictions(file: TextIO, metadata: ModelMetadata, outputs: np.ndarray, *, probabilities: bool) -> None:
    """The predictions, one line a row."""
    lines = csv.writer(file, lineterminator="\n")
    if metadata.loss is Loss.SQUARED and not probabilities:
        lines.writerow(["prediction"])
        lines.writerows([f"{value:.7g}"] for value in outputs[:, 0])
        return
    chance = sparse_model.probabilities(metadata.loss, outputs)
    text = [[f"{value:.4f}" for value in row] for row in chance] if probabilities else []
    if metadata.loss is Loss.MULTILABEL:
        lines.writerow(metadata.classes)
        lines.writerows(text or (chance > 0.5).astype(int).tolist())
        return
    best = chance.argmax(1)
    names = [metadata.classes[i] for i in best]
    if probabilities:
        lines.writerow(["prediction", *metadata.classes])
        lines.writerows([name, *row] for name, row in zip(names, text, strict=True))
    else:
        lines.writerow(["prediction", "probability"])
        lines.writerows([name, f"{chance[i, j]:.4f}"] for i, (name, j) in enumerate(zip(names, best, strict=True)))


def score_predictions(metadata: ModelMetadata, outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The task's metrics on rows whose truth is known."""
    import torch

    from fedsieve.runtime.metrics import METRICS_BY_LOSS

    if len(targets) != len(outputs):
        raise ModelError(f"--target has {len(targets)} entries for {len(outputs)} rows")
    if metadata.loss in (Loss.SQUARED, Loss.MULTILABEL):
        if targets.dtype.kind not in "fiub" or targets.ndim != (1 if metadata.loss is Loss.SQUARED else 2):
            raise ModelError("--target must hold numbers: one a row for a regression, a 0/1 column a label for several labels")
        y = targets.astype(np.float32)
    else:
        place = {name: i for i, name in enumerate(metadata.classes)}
        names = user_files.class_labels(targets)
        if strange := sorted(set(names) - set(place)):
            raise ModelError(f"--target holds {strange[0]!r}, which the model does not know; it knows {', '.join(metadata.classes[:8])}")
        y = np.array([place[name] for name in names], np.float32 if metadata.loss is Loss.LOGISTIC else np.int64)
    return METRICS_BY_LOSS[metadata.loss][0](torch.from_numpy(outputs), torch.from_numpy(y))
