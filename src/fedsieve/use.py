"""What `fedsieve export`, `fedsieve predict` and `fedsieve inspect` do. torch is imported only where a model or a format needs it."""

import csv
import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from fedsieve import model
from fedsieve.data import fresh
from fedsieve.experiments import store
from fedsieve.model import Card, Model, ModelError
from fedsieve.objectives.losses import Loss
from fedsieve.options import Flag
from fedsieve.report.markup import Table as Data
from fedsieve.report.supports import strongest_features, strongest_weights, table_of_layers
from fedsieve.show import number, size

if TYPE_CHECKING:
    from fedsieve.export import Rows, Verified

FormatName = Literal["safetensors", "npz", "onnx", "torch"]
CHECKED_ROWS = 1000
TOP = 10
MEANING = {
    Loss.SQUARED: "predicts a number",
    Loss.LOGISTIC: "tells two classes apart",
    Loss.SOFTMAX: "tells classes apart",
    Loss.MULTILABEL: "gives each row any of several labels",
}


def export(run: Path, /, *, format: FormatName = "safetensors", verify: Flag = False, out: Path | None = None, json: Flag = False) -> int:
    """Write a run's model as a file that other programs read.

    Parameters
    ----------
    run
        a run folder, or a model file (.safetensors, .npz)
    format
        safetensors: indices and values; npz: a scipy.sparse matrix, the intercept beside it; onnx: a graph with sparse initialisers;
        torch: a plain state_dict with exact zeros
    verify
        load the file in its own runtime (scipy, torch, onnxruntime) and compare its predictions with the run's on test rows
    out
        the file (default: model.ENDING in the run folder, or beside the model file)
    json
        the result as one JSON object on the last line
    """
    from fedsieve import export as exports

    chosen = exports.Format(format)
    given = model.read(run)
    place = out or model.locate(run).with_suffix(exports.SUFFIX[chosen])
    if place.is_dir():
        raise ModelError(f"--out {place} is a folder; name a file")
    content = exports.export(given, chosen)
    try:
        store.replace(place, content)
    except OSError as problem:
        raise ModelError(f"cannot write {place}: {problem.strerror}; choose another file with --out") from None
    found = checked(run, given, place, format) if verify else None
    if json:
        told = {"file": str(place), "format": format, "bytes": len(content), "verified": None if found is None else found[0]._asdict()}
        print(json_text.dumps(told))
        return 0
    print(f"{place}: {size(len(content))}, {given.kept} of {given.size - given.free} weights")
    if found is not None:
        same, rows = found
        print(f"verified in {same.runtime}: {same.rows} {rows}, largest difference {same.difference:.1g} in outputs up to {same.scale:.3g}")
    return 0


def checked(run: Path, given: Model, place: Path, format: FormatName) -> "tuple[Verified, str]":
    """The file's predictions held against the run's own on its test rows; of a lone model file, on made-up rows."""
    from fedsieve import export as exports

    if (run / store.CONFIG).is_file():
        x, expected = on_test_rows(run, given)
        rows = "test rows"
    else:
        x = np.random.default_rng(0).standard_normal((CHECKED_ROWS, *given.card.row)).astype(np.float32)
        expected, rows = exports.predict(given, x), "made-up rows (a run folder has test rows)"
    return exports.verify(place, exports.Format(format), given, x, expected), rows


def on_test_rows(folder: Path, given: Model) -> "tuple[Rows, np.ndarray]":
    """Some test rows of a run, and what its own objective says of them."""
    import torch

    from fedsieve.experiments.problem import Problem
    from fedsieve.experiments.restore import restore

    run = restore(folder)
    x = Problem(run).drawn.test_x[:CHECKED_ROWS].astype(np.float32)
    rows = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return x, run.objective.predict(torch.from_numpy(given.dense()), rows).numpy()


def predict(model: Path, data: Path, /, *, target: str | None = None, probabilities: Flag = False, out: Path | None = None) -> int:
    """Predict every row of a file; comma-separated values with a header, to the terminal or a file.

    Parameters
    ----------
    model
        a run folder, or a model file (.safetensors, .npz, .onnx)
    data
        rows: .csv (columns are found by name), .npz (array x), .svm
    target
        column or array with the truth; the score is said on standard error
    probabilities
        one column a class with its probability, beside the prediction
    out
        the file to write (default: standard output)
    """
    card, outputs, rows = predicted(model, data, target)
    if rows.unread:
        print(f"note: not read: {', '.join(rows.unread[:8])}{' ...' if len(rows.unread) > 8 else ''}", file=sys.stderr)
    if out is None:
        write(sys.stdout, card, outputs, probabilities=probabilities)
    else:
        try:
            with out.open("w", newline="") as file:
                write(file, card, outputs, probabilities=probabilities)
        except OSError as problem:
            raise ModelError(f"cannot write {out}: {problem.strerror}; choose another file with --out") from None
        print(f"{len(outputs)} predictions in {out}", file=sys.stderr)
    if rows.y is not None:
        scores = score(card, outputs, rows.y)
        print(", ".join(f"{name} {number(value)}" for name, value in scores.items()) + f" on {len(outputs)} rows", file=sys.stderr)
    return 0


def predicted(path: Path, data: Path, target: str | None) -> tuple[Card, np.ndarray, fresh.Fresh]:
    """What a model says of the rows in a file."""
    if path.suffix == ".onnx" and path.is_file():
        from fedsieve.export import onnx_card, onnx_predict

        card = onnx_card(path)
        rows = fresh.read(data, fresh.Wanted(card.row, card.features, card.first), target)
        return card, onnx_predict(path, rows.x), rows
    given = model.read(path)
    card = given.card
    rows = fresh.read(data, fresh.Wanted(card.row, card.features, card.first), target)
    if card.build is None:
        return card, given.predict(rows.x), rows
    from fedsieve.export import predict as through_torch

    return card, through_torch(given, rows.x), rows


def write(file: TextIO, card: Card, outputs: np.ndarray, *, probabilities: bool) -> None:
    """The predictions, one line a row."""
    lines = csv.writer(file, lineterminator="\n")
    if card.loss is Loss.SQUARED and not probabilities:
        lines.writerow(["prediction"])
        lines.writerows([f"{value:.7g}"] for value in outputs[:, 0])
        return
    chance = model.probabilities(card.loss, outputs)
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

    from fedsieve.data import own
    from fedsieve.experiments.tasks import MEASURES

    if len(truth) != len(outputs):
        raise ModelError(f"--target has {len(truth)} entries for {len(outputs)} rows")
    if card.loss in (Loss.SQUARED, Loss.MULTILABEL):
        if truth.dtype.kind not in "fiub" or truth.ndim != (1 if card.loss is Loss.SQUARED else 2):
            raise ModelError("--target must hold numbers: one a row for a regression, a 0/1 column a label for several labels")
        y = truth.astype(np.float32)
    else:
        place = {name: i for i, name in enumerate(card.classes)}
        names = own.named(truth)
        if strange := sorted(set(names) - set(place)):
            raise ModelError(f"--target holds {strange[0]!r}, which the model does not know; it knows {', '.join(card.classes[:8])}")
        y = np.array([place[name] for name in names], np.float32 if card.loss is Loss.LOGISTIC else np.int64)
    return MEASURES[card.loss][0](torch.from_numpy(outputs), torch.from_numpy(y))


def inspect(run: Path, /, *, top: int = TOP, out: Path | None = None, json: Flag = False) -> int:
    """What a model kept: density per layer, bytes on disk, its strongest features, and a picture.

    Parameters
    ----------
    run
        a run folder, or a model file (.safetensors, .npz)
    top
        how many features or weights to list
    out
        the picture (default: model.png in the run folder, or beside the model file)
    json
        everything as one JSON object on the last line, and no picture unless --out is given
    """
    path, given = model.locate(run), model.read(run)
    if top < 1:
        raise ModelError(f"--top must be at least 1; got {top}")
    layers = table_of_layers({"layers": given.layers}, given.index, given.value)
    if given.card.build is None:
        strong = strongest_features(given.coef, given.card.features, given.card.first, top)
    else:
        strong = strongest_weights({"layers": given.layers}, given.index, given.value, top)
    place = out or (None if json else path.with_suffix(".png"))
    if place is not None:
        draw(given, place)
    if json:
        print(
            json_text.dumps(facts(path, given) | {"layers": rows_of(layers), "strongest": rows_of(strong), "picture": place and str(place)})
        )
        return 0
    show(path, given, layers, strong)
    print(f"picture in {place}")
    return 0


def facts(path: Path, given: Model) -> dict[str, Any]:
    """A model in numbers."""
    return {
        "file": str(path),
        "task": given.card.task,
        "method": given.card.method,
        "model": given.card.build or "linear",
        "loss": given.card.loss.value,
        "row": list(given.card.row),
        "classes": None if given.card.classes is None else len(given.card.classes),
        "size": given.size - given.free,
        "nonzero": given.kept,
        "density": given.density,
        "free": given.free,
        "bytes": path.stat().st_size,
        "bytes_dense": 4 * given.size,
    }


def rows_of(data: Data) -> list[dict[str, Any]]:
    """A report's table as JSON objects."""
    return [dict(zip(data.columns, row, strict=True)) for row in data.rows]


def show(path: Path, given: Model, layers: Data, strong: Data) -> None:
    """Tables for people."""
    card, told = given.card, facts(path, given)
    console = Console(highlight=False)
    table = Table(title=f"{card.method} on {card.task}", show_header=False, title_justify="left")
    classes = "" if card.classes is None else f": {', '.join(card.classes[:6])}{' ...' if len(card.classes) > 6 else ''}"
    table.add_row("model", f"{told['model']}, {MEANING[card.loss]}{classes}")
    table.add_row("reads rows of", f"{' x '.join(map(str, card.row))} numbers")
    table.add_row("weights kept", f"{given.kept} of {told['size']} (density {given.density:.4g})")
    if given.free:
        table.add_row("outside the density", f"{given.free} (intercepts, or parameters without a gate)")
    table.add_row("file", f"{size(told['bytes'])}; every weight in four bytes is {size(told['bytes_dense'])}")
    console.print(table)
    for data in (layers, strong):
        console.print(f"\n{data.caption}")
        drawn = Table()
        for name, cell in zip(data.columns, data.rows[0], strict=True):
            drawn.add_column(name, justify="left" if isinstance(cell, str) else "right")
        for row in data.rows:
            drawn.add_row(*(number(cell) if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row))
        console.print(drawn)


def draw(given: Model, place: Path) -> None:
    """The picture, or one line about why not."""
    from fedsieve.report.portrait import portrait

    try:
        portrait(given, place)
    except (OSError, ValueError) as problem:
        raise ModelError(f"--out {place} cannot be written: {problem}; name a .png, .pdf or .svg file") from None
