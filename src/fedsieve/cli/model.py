"""What `fedsieve export`, `fedsieve predict` and `fedsieve inspect` do. torch is imported only where a model or a format needs it."""

import json as json_text
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from fedsieve.cli.options import Switch
from fedsieve.formatting import format_bytes, format_number
from fedsieve.models import predict as prediction
from fedsieve.models import sparse_model
from fedsieve.models.sparse_model import ModelError, SparseModel
from fedsieve.objectives.losses import Loss
from fedsieve.report.html.elements import TableData as Data
from fedsieve.report.html.supports import layer_table, strongest_features, strongest_weights
from fedsieve.storage import run_directory

if TYPE_CHECKING:
    from fedsieve.models.export import Examples, VerificationResult

FormatName = Literal["safetensors", "npz", "onnx", "torch"]
NUM_CHECKED_EXAMPLES = 1000
DEFAULT_TOP = 10
LOSS_DESCRIPTION = {
    Loss.SQUARED: "predicts a number",
    Loss.LOGISTIC: "tells two classes apart",
    Loss.SOFTMAX: "tells classes apart",
    Loss.MULTILABEL: "gives each row any of several labels",
}


def export(
    run: Path, /, *, format: FormatName = "safetensors", verify: Switch = False, out: Path | None = None, json: Switch = False
) -> int:
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
    given = sparse_model.read_model(run)
    place = out or sparse_model.find_model_file(run).with_suffix(exports.SUFFIXES[chosen])
    if place.is_dir():
        raise ModelError(f"--out {place} is a folder; name a file")
    content = exports.export(given, chosen)
    try:
        run_directory.atomic_write(place, content)
    except OSError as problem:
        raise ModelError(f"cannot write {place}: {problem.strerror}; choose another file with --out") from None
    found = verify_export(run, given, place, format) if verify else None
    if json:
        told = {"file": str(place), "format": format, "bytes": len(content), "verified": None if found is None else found[0]._asdict()}
        print(json_text.dumps(told))
        return 0
    print(f"{place}: {format_bytes(len(content))}, {given.num_nonzero} of {given.size - given.num_ungated} weights")
    if found is not None:
        same, rows = found
        print(
            f"verified in {same.runtime}: {same.num_examples} {rows}, largest difference {same.max_difference:.1g} in outputs up to {same.max_output:.3g}"
        )
    return 0


def verify_export(run: Path, model: SparseModel, path: Path, format: FormatName) -> "tuple[VerificationResult, str]":
    """The file's predictions held against the run's own on its test rows; on made-up rows where these are not here."""
    from fedsieve.models import export as exports

    if (run / run_directory.CONFIG).is_file() and "task" in tomllib.loads((run / run_directory.CONFIG).read_text()):
        x, expected = test_predictions(run, model)
        rows = "test rows"
    else:
        x = np.random.default_rng(0).standard_normal((NUM_CHECKED_EXAMPLES, *model.metadata.input_shape)).astype(np.float32)
        expected, rows = exports.predict(model, x), "made-up rows"
    return exports.verify(path, exports.Format(format), model, x, expected), rows


def test_predictions(folder: Path, model: SparseModel) -> "tuple[Examples, np.ndarray]":
    """Some test rows of a run, and what its own objective says of them."""
    import torch

    from fedsieve.experiments.config_io import load_run
    from fedsieve.experiments.simulation import Simulation

    run = load_run(folder)
    x = Simulation(run).dataset.test_x[:NUM_CHECKED_EXAMPLES].astype(np.float32)
    rows = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return x, run.objective.predict(torch.from_numpy(model.to_dense()), rows).numpy()


def predict(model: Path, data: Path, /, *, target: str | None = None, probabilities: Switch = False, out: Path | None = None) -> int:
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
    card, outputs, rows = prediction.predict_file(model, data, target)
    if rows.ignored_columns:
        print(f"note: not read: {', '.join(rows.ignored_columns[:8])}{' ...' if len(rows.ignored_columns) > 8 else ''}", file=sys.stderr)
    if out is None:
        prediction.write_predictions(sys.stdout, card, outputs, probabilities=probabilities)
    else:
        try:
            with out.open("w", newline="") as file:
                prediction.write_predictions(file, card, outputs, probabilities=probabilities)
        except OSError as problem:
            raise ModelError(f"cannot write {out}: {problem.strerror}; choose another file with --out") from None
        print(f"{len(outputs)} predictions in {out}", file=sys.stderr)
    if rows.y is not None:
        scores = prediction.score_predictions(card, outputs, rows.y)
        print(", ".join(f"{name} {format_number(value)}" for name, value in scores.items()) + f" on {len(outputs)} rows", file=sys.stderr)
    return 0


def inspect(run: Path, /, *, top: int = DEFAULT_TOP, out: Path | None = None, json: Switch = False) -> int:
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
    path, given = sparse_model.find_model_file(run), sparse_model.read_model(run)
    if top < 1:
        raise ModelError(f"--top must be at least 1; got {top}")
    layers = layer_table({"layers": given.layers}, given.indices, given.values)
    if given.metadata.factory is None:
        strong = strongest_features(given, top)
    else:
        strong = strongest_weights({"layers": given.layers}, given.indices, given.values, top)
    place = out or (None if json else path.with_suffix(".png"))
    if place is not None:
        draw(given, place)
    if json:
        print(
            json_text.dumps(
                model_facts(path, given)
                | {"layers": table_records(layers), "strongest": table_records(strong), "picture": place and str(place)}
            )
        )
        return 0
    print_model(path, given, layers, strong)
    print(f"picture in {place}")
    return 0


def model_facts(path: Path, model: SparseModel) -> dict[str, Any]:
    """A model in numbers."""
    return {
        "file": str(path),
        "task": model.metadata.task,
        "algorithm": model.metadata.algorithm,
        "model": model.metadata.factory or "linear",
        "loss": model.metadata.loss.value,
        "input_shape": list(model.metadata.input_shape),
        "classes": None if model.metadata.classes is None else len(model.metadata.classes),
        "size": model.size - model.num_ungated,
        "nonzero": model.num_nonzero,
        "density": model.density,
        "num_ungated": model.num_ungated,
        "bytes": path.stat().st_size,
        "bytes_dense": 4 * model.size,
    }


def table_records(data: Data) -> list[dict[str, Any]]:
    """A report's table as JSON objects."""
    return [dict(zip(data.columns, row, strict=True)) for row in data.rows]


def print_model(path: Path, model: SparseModel, layers: Data, strongest: Data) -> None:
    """Tables for people."""
    card, told = model.metadata, model_facts(path, model)
    console = Console(highlight=False)
    table = Table(title=f"{card.algorithm} on {card.task}", show_header=False, title_justify="left")
    classes = "" if card.classes is None else f": {', '.join(card.classes[:6])}{' ...' if len(card.classes) > 6 else ''}"
    table.add_row("model", f"{told['model']}, {LOSS_DESCRIPTION[card.loss]}{classes}")
    table.add_row("reads rows of", f"{' x '.join(map(str, card.input_shape))} numbers")
    table.add_row("weights kept", f"{model.num_nonzero} of {told['size']} (density {model.density:.4g})")
    if model.num_ungated:
        table.add_row("outside the density", f"{model.num_ungated} (intercepts, or parameters without a gate)")
    table.add_row("file", f"{format_bytes(told['bytes'])}; every weight in four bytes is {format_bytes(told['bytes_dense'])}")
    console.print(table)
    for data in (layers, strongest):
        console.print(f"\n{data.caption}")
        drawn = Table()
        for name, cell in zip(data.columns, data.rows[0], strict=True):
            drawn.add_column(name, justify="left" if isinstance(cell, str) else "right")
        for row in data.rows:
            drawn.add_row(*(format_number(cell) if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row))
        console.print(drawn)


def draw(model: SparseModel, path: Path) -> None:
    """The picture, or one line about why not."""
    from fedsieve.report.figures.model import draw_model

    try:
        draw_model(model, path)
    except (OSError, ValueError) as problem:
        raise ModelError(f"--out {path} cannot be written: {problem}; name a .png, .pdf or .svg file") from None
