"""The commands `fedsieve export`, `predict` and `inspect`. torch is imported only if a model or a format needs it."""

import json as json_text
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.table import Table

from fedsieve.cli.options import Switch
from fedsieve.formatting import PlainConsole, escape_controls, format_bytes, format_number
from fedsieve.models import predict as prediction
from fedsieve.models import sparse_model
from fedsieve.models.factory import require_trust
from fedsieve.models.sparse_model import ModelError, SparseModel
from fedsieve.objectives.losses import Loss
from fedsieve.report.html.elements import TableData
from fedsieve.report.html.supports import layer_table, strongest_features, strongest_weights
from fedsieve.storage import run_directory
from fedsieve.storage.atomic import atomic_write

if TYPE_CHECKING:
    from fedsieve.models.export import Examples, Format, VerificationResult

FormatName = Literal["safetensors", "npz", "onnx", "torch"]
NUM_CHECKED_EXAMPLES = 1000
DEFAULT_TOP = 10
LOSS_DESCRIPTION = {
    Loss.SQUARED: "regression",
    Loss.LOGISTIC: "two classes",
    Loss.SOFTMAX: "many classes",
    Loss.MULTILABEL: "several labels per example",
}


def export(
    run: Path,
    /,
    *,
    format: FormatName = "safetensors",
    verify: Switch = False,
    out: Path | None = None,
    trust: Switch = False,
    json: Switch = False,
) -> int:
    """Write the model of a run to a file for other programs.

    Parameters
    ----------
    run
        a run folder, or a model file (.safetensors, .npz)
    format
        safetensors: indices and values; npz: scipy.sparse matrix; onnx: graph with sparse initializers; torch: state_dict with exact zeros
    verify
        load the file with scipy, torch or onnxruntime and compare its predictions with those of the run on test examples
    out
        output file (default: model.SUFFIX in the folder of the model)
    trust
        import and call the factory that the model or its run names, if it is a module; this runs code that the file chooses
    json
        print the result as one JSON object on the last line
    """
    from fedsieve.models import export as exports

    file_format = exports.Format(format)
    model = sparse_model.read_model(run)
    if verify or file_format in (exports.Format.ONNX, exports.Format.TORCH):
        require_trust(model.metadata.factory, f"the model {run}", trust=trust)
    path = out or sparse_model.find_model_file(run).with_suffix(exports.SUFFIXES[file_format])
    if path.is_dir():
        raise ModelError(f"--out {path} is a folder; name a file")
    content = exports.export(model, file_format)
    try:
        atomic_write(path, content)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}; choose another file with --out") from None
    verification, examples = verify_export(run, model, path, file_format, trust=trust) if verify else (None, "")
    if json:
        verified = None if verification is None else verification._asdict()
        print(json_text.dumps({"file": str(path), "format": format, "bytes": len(content), "verified": verified}))
        return 0
    print(f"{path}: {format_bytes(len(content))}, {model.num_nonzero} of {model.size - model.num_ungated} weights")
    if verification is not None:
        print(
            f"verified in {verification.runtime}: {verification.num_examples} {examples}, "
            f"largest difference {verification.max_difference:.1g} in outputs up to {verification.max_output:.3g}"
        )
    return 0


def verify_export(run: Path, model: SparseModel, path: Path, format: "Format", *, trust: bool) -> "tuple[VerificationResult, str]":
    """Compare the predictions of a file and of the run on its test examples, or on random examples if it has none."""
    from fedsieve.models import export as exports

    if (run / run_directory.CONFIG).is_file() and "task" in tomllib.loads((run / run_directory.CONFIG).read_text()):
        x, expected = test_predictions(run, model, trust=trust)
        description = "test examples"
    else:
        x = np.random.default_rng(0).standard_normal((NUM_CHECKED_EXAMPLES, *model.metadata.input_shape)).astype(np.float32)
        expected, description = exports.predict(model, x), "random examples"
    return exports.verify(path, format, model, x, expected), description


def test_predictions(folder: Path, model: SparseModel, *, trust: bool) -> "tuple[Examples, np.ndarray]":
    """Test examples of a run, and their predictions by the objective of the run."""
    import torch

    from fedsieve.experiments.config_io import load_run
    from fedsieve.experiments.simulation import Simulation

    run = load_run(folder, trust=trust)
    x = Simulation(run).dataset.test_x[:NUM_CHECKED_EXAMPLES].astype(np.float32)
    examples = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return x, run.objective.predict(torch.from_numpy(model.to_dense()), examples).numpy()


def predict(
    model: Path,
    data: Path,
    /,
    *,
    target: str | None = None,
    probabilities: Switch = False,
    out: Path | None = None,
    trust: Switch = False,
) -> int:
    """Predict the examples of a file and write the predictions as .csv.

    Parameters
    ----------
    model
        a run folder, or a model file (.safetensors, .npz, .onnx)
    data
        examples: .csv (columns by name), .npz (array x), .svm
    target
        column or array with the true targets; the score is printed on standard error
    probabilities
        add a column with the probability of each class
    out
        output file (default: standard output)
    trust
        import and call the factory that the model names, if it is a module; this runs code that the file chooses
    """
    metadata, outputs, examples = prediction.predict_file(model, data, target, trust=trust)
    if ignored := examples.ignored_columns:
        print(escape_controls(f"note: ignored: {', '.join(ignored[:8])}{' ...' if len(ignored) > 8 else ''}"), file=sys.stderr)
    if out is None:
        prediction.write_predictions(sys.stdout, metadata, outputs, probabilities=probabilities)
    else:
        try:
            with out.open("w", newline="") as file:
                prediction.write_predictions(file, metadata, outputs, probabilities=probabilities)
        except OSError as error:
            raise ModelError(f"cannot write {out}: {error.strerror}; choose another file with --out") from None
        print(f"{len(outputs)} predictions in {out}", file=sys.stderr)
    if examples.y is not None:
        scores = prediction.score_predictions(metadata, outputs, examples.y)
        text = ", ".join(f"{name} {format_number(value)}" for name, value in scores.items())
        print(f"{text} on {len(outputs)} examples", file=sys.stderr)
    return 0


def inspect(run: Path, /, *, top: int = DEFAULT_TOP, out: Path | None = None, json: Switch = False) -> int:
    """Show the density of each layer, the size on disk and the strongest features of a model, and draw it.

    Parameters
    ----------
    run
        a run folder, or a model file (.safetensors, .npz)
    top
        number of features or weights to list
    out
        file of the picture (default: model.png in the folder of the model)
    json
        print everything as one JSON object on the last line; draw a picture only if --out is set
    """
    path, model = sparse_model.find_model_file(run), sparse_model.read_model(run)
    if top < 1:
        raise ModelError(f"--top must be at least 1; got {top}")
    layers = layer_table({"layers": model.layers}, model.indices, model.values)
    if model.metadata.factory is None:
        strongest = strongest_features(model, top)
    else:
        strongest = strongest_weights({"layers": model.layers}, model.indices, model.values, top)
    picture = out or (None if json else path.with_suffix(".png"))
    if picture is not None:
        draw(model, picture)
    if json:
        tables = {"layers": table_records(layers), "strongest": table_records(strongest)}
        print(json_text.dumps(model_facts(path, model) | tables | {"picture": picture and str(picture)}))
        return 0
    print_model(path, model, layers, strongest)
    print(f"picture in {picture}")
    return 0


def model_facts(path: Path, model: SparseModel) -> dict[str, Any]:
    """The properties of a model as JSON values."""
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


def table_records(data: TableData) -> list[dict[str, Any]]:
    """The rows of a table as JSON objects."""
    return [dict(zip(data.columns, row, strict=True)) for row in data.rows]


def print_model(path: Path, model: SparseModel, layers: TableData, strongest: TableData) -> None:
    """Print the model as tables."""
    metadata, facts = model.metadata, model_facts(path, model)
    console = PlainConsole()
    table = Table(title=f"{metadata.algorithm} on {metadata.task}", show_header=False, title_justify="left")
    classes = "" if metadata.classes is None else f": {', '.join(metadata.classes[:6])}{' ...' if len(metadata.classes) > 6 else ''}"
    table.add_row("model", f"{facts['model']}, {LOSS_DESCRIPTION[metadata.loss]}{classes}")
    table.add_row("shape of an example", " x ".join(map(str, metadata.input_shape)))
    table.add_row("non-zero weights", f"{model.num_nonzero} of {facts['size']} (density {model.density:.4g})")
    if model.num_ungated:
        table.add_row("without a gate", f"{model.num_ungated} (not counted in the density, such as intercepts)")
    table.add_row("file", f"{format_bytes(facts['bytes'])}; {format_bytes(facts['bytes_dense'])} with all weights in float32")
    console.print(table)
    for data in (layers, strongest):
        console.print(f"\n{data.caption}")
        listing = Table()
        for name, cell in zip(data.columns, data.rows[0], strict=True):
            listing.add_column(name, justify="left" if isinstance(cell, str) else "right")
        for row in data.rows:
            listing.add_row(*(format_number(cell) if isinstance(cell, float) else "" if cell is None else str(cell) for cell in row))
        console.print(listing)


def draw(model: SparseModel, path: Path) -> None:
    """Draw the model; raises ModelError if the file cannot be written."""
    from fedsieve.report.figures.model_picture import draw_model

    try:
        draw_model(model, path)
    except (OSError, ValueError) as error:
        raise ModelError(f"--out {path} cannot be written: {error}; name a .png, .pdf or .svg file") from None
