"""What a model says of the rows in a file, as comma-separated values, and how right it is. Only modules, ONNX and scores need torch."""

import csv
from pathlib import Path
from typing import TextIO

import numpy as np

from fedsieve.data import prediction_files, user_files
from fedsieve.models import sparse_model
from fedsieve.models.sparse_model import Card, ModelError
from fedsieve.objectives.losses import Loss


def predicted(path: Path, data: Path, target: str | None) -> tuple[Card, np.ndarray, prediction_files.Fresh]:
    """What a model says of the rows in a file."""
    if path.suffix == ".onnx" and path.is_file():
        from fedsieve.models.export import onnx_card, onnx_predict

        card = onnx_card(path)
        rows = prediction_files.read(data, prediction_files.Wanted(card.row, card.features, card.first), target)
        return card, onnx_predict(path, rows.x), rows
    given = sparse_model.read(path)
    card = given.card
    rows = prediction_files.read(data, prediction_files.Wanted(card.row, card.features, card.first), target)
    if card.build is None:
        return card, given.predict(rows.x), rows
    from fedsieve.models.export import predict as through_torch

    return card, through_torch(given, rows.x), rows


def write(file: TextIO, card: Card, outputs: np.ndarray, *, probabilities: bool) -> None:
    """The predictions, one line a row."""
    lines = csv.writer(file, lineterminator="\n")
    if card.loss is Loss.SQUARED and not probabilities:
        lines.writerow(["prediction"])
        lines.writerows([f"{value:.7g}"] for value in outputs[:, 0])
        return
    chance = sparse_model.probabilities(card.loss, outputs)
    text = [[f"{value:.4f}" for value in row] for row in chance] if probabilities else []
    if card.loss is Loss.MULTILABEL:
        lines.writerow(card.classes)
        lines.writerows(text or (chance > 0.5).astype(int).tolist())
        return
    best = chance.argmax(1)
    names = [card.classes[i] for i in best]
    if probabilities:
        lines.writerow(["prediction", *card.classes])
        lines.writerows([name, *row] for name, row in zip(names, text, strict=True))
    else:
        lines.writerow(["prediction", "probability"])
        lines.writerows([name, f"{chance[i, j]:.4f}"] for i, (name, j) in enumerate(zip(names, best, strict=True)))


def score(card: Card, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """The task's metrics on rows whose truth is known."""
    import torch

    from fedsieve.experiments.tasks import MEASURES

    if len(truth) != len(outputs):
        raise ModelError(f"--target has {len(truth)} entries for {len(outputs)} rows")
    if card.loss in (Loss.SQUARED, Loss.MULTILABEL):
        if truth.dtype.kind not in "fiub" or truth.ndim != (1 if card.loss is Loss.SQUARED else 2):
            raise ModelError("--target must hold numbers: one a row for a regression, a 0/1 column a label for several labels")
        y = truth.astype(np.float32)
    else:
        place = {name: i for i, name in enumerate(card.classes)}
        names = user_files.named(truth)
        if strange := sorted(set(names) - set(place)):
            raise ModelError(f"--target holds {strange[0]!r}, which the model does not know; it knows {', '.join(card.classes[:8])}")
        y = np.array([place[name] for name in names], np.float32 if card.loss is Loss.LOGISTIC else np.int64)
    return MEASURES[card.loss][0](torch.from_numpy(outputs), torch.from_numpy(y))
