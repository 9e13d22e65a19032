"""What `fedsieve export`, `fedsieve predict` and `fedsieve inspect` do. torch is imported only where a model or a format needs it."""

import json as json_text
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from fedsieve.cli.options import Flag
from fedsieve.formatting import number, size
from fedsieve.models import predict as prediction
from fedsieve.models import sparse_model
from fedsieve.models.sparse_model import Model, ModelError
from fedsieve.objectives.losses import Loss
from fedsieve.report.html.elements import Table as Data
from fedsieve.report.html.supports import strongest_features, strongest_weights, table_of_layers
from fedsieve.storage import run_directory

if TYPE_CHECKING:
    from fedsieve.models.export import Rows, Verified

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
        safetensors: indices and values; npz: a scipy.sparse matrix; onnx: sparse initialisers; torch: a state_dict with exact zeros
    verify
        load the file in its own runtime (scipy, torch, onnxruntime) and compare its predictions with the run's on test rows
    out
        the file (default: model.ENDING in the run folder, or beside the model file)
    json
        the result as one JSON object on the last line
    """
    from fedsieve.models import export as exports

    chosen = exports.Format(format)
    given = sparse_model.read(run)
    place = out or sparse_model.locate(run).with_suffix(exports.SUFFIX[chosen])
    if place.is_dir():
        raise ModelError(f"--out {place} is a folder; name a file")
    content = exports.export(given, chosen)
    try:
        run_directory.replace(place, content)
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
    """The file's predictions held against the run's own on its test rows; on made-up rows where these are not here."""
    from fedsieve.models import export as exports

    if (run / run_directory.CONFIG).is_file() and "task" in tomllib.loads((run / run_directory.CONFIG).read_text()):
        x, expected = on_test_rows(run, given)
        rows = "test rows"
    else:
        x = np.random.default_rng(0).standard_normal((CHECKED_ROWS, *given.card.row)).astype(np.float32)
        expected, rows = exports.predict(given, x), "made-up rows"
    return exports.verify(place, exports.Format(format), given, x, expected), rows


def on_test_rows(folder: Path, given: Model) -> "tuple[Rows, np.ndarray]":
    """Some test rows of a run, and what its own objective says of them."""
    import torch

    from fedsieve.experiments.config_io import restore
    from fedsieve.experiments.simulation import Problem

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
    card, outputs, rows = prediction.predicted(model, data, target)
    if rows.unread:
        print(f"note: not read: {', '.join(rows.unread[:8])}{' ...' if len(rows.unread) > 8 else ''}", file=sys.stderr)
    if out is None:
        prediction.write(sys.stdout, card, outputs, probabilities=probabilities)
    else:
        try:
            with out.open("w", newline="") as file:
                prediction.write(file, card, outputs, probabilities=probabilities)
        except OSError as problem:
            raise ModelError(f"cannot write {out}: {problem.strerror}; choose another file with --out") from None
        print(f"{len(outputs)} predictions in {out}", file=sys.stderr)
    if rows.y is not None:
        scores = prediction.score(card, outputs, rows.y)
        print(", ".join(f"{name} {number(value)}" for name, value in scores.items()) + f" on {len(outputs)} rows", file=sys.stderr)
    return 0


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
    path, given = sparse_model.locate(run), sparse_model.read(run)
    if top < 1:
        raise ModelError(f"--top must be at least 1; got {top}")
    layers = table_of_layers({"layers": given.layers}, given.index, given.value)
    if given.card.build is None:
        strong = strongest_features(given, top)
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
    from fedsieve.report.figures.model import portrait

    try:
        portrait(given, place)
    except (OSError, ValueError) as problem:
        raise ModelError(f"--out {place} cannot be written: {problem}; name a .png, .pdf or .svg file") from None
