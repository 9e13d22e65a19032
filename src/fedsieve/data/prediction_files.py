"""Rows to predict: the columns a model reads, out of files of the kinds it may have learned from. No torch here."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data import user_files
from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import Matrix

FILE_SUFFIXES = (".npz", ".csv", ".svm", ".svmlight", ".libsvm")


class ModelInput(NamedTuple):
    """What a model reads."""

    input_shape: tuple[int, ...]
    """shape of a row"""
    features: Sequence[str] | None
    """names of its columns, None where only their number is known"""
    first_feature_id: int
    """number of the first feature in svmlight files"""


class PredictionData(NamedTuple):
    """Rows as a model reads them."""

    x: Matrix
    y: np.ndarray | None
    """the target, where one was named"""
    ignored_columns: list[str]
    """columns or arrays nobody asked for"""


def read_examples(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    """The rows of a file, refused where they are not what the model reads."""
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if path.suffix not in FILE_SUFFIXES:
        raise DataError(f"{path} has an unknown ending {path.suffix or '(none)'}; use one of {', '.join(FILE_SUFFIXES)}")
    reader = {".npz": _read_npz, ".csv": _read_csv}.get(path.suffix, _read_svmlight)
    try:
        found = reader(path, model_input, target)
    except user_files.READ_ERRORS as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"{path} cannot be read as {path.suffix}: {problem or type(problem).__name__}") from None
    values = found.x.data if isinstance(found.x, csr_matrix) else found.x
    if not np.isfinite(values).all():
        raise DataError(f"{path} has a feature that is not a finite number; remove or replace it")
    if found.x.shape[0] == 0:
        raise DataError(f"{path} has no rows")
    return found


def _read_npz(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    with user_files.open_npz(path) as arrays:
        names = list(arrays)
        x = user_files.as_float32(user_files.load_array(arrays, "x", "array", path), path)
        y = None if target is None else user_files.load_array(arrays, target, "--target", path)
    size = int(np.prod(model_input.input_shape))
    if x.ndim < 2 or int(np.prod(x.shape[1:])) != size:
        raise DataError(
            f"array x of {path} has rows of shape {x.shape[1:]}; the model reads {' x '.join(map(str, model_input.input_shape))}"
        )
    return PredictionData(x.reshape(len(x), *model_input.input_shape), y, [name for name in names if name not in ("x", target)])


def _read_csv(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    header, rows = user_files.read_csv_rows(path)
    y = (
        None
        if target is None
        else user_files.parse_target(user_files.column_values(rows, user_files.column_index(header, target, "--target", path)))
    )
    if model_input.features is not None:
        kept = [user_files.column_index(header, name, "the model's column", path) for name in model_input.features]
    else:
        kept = [j for j, name in enumerate(header) if name != target]
        if len(kept) != np.prod(model_input.input_shape):
            raise DataError(
                f"{path} has {len(kept)} columns; the model reads {np.prod(model_input.input_shape)}, known by their order only"
            )
    x = user_files.parse_columns(path, header, rows, kept)
    read = {*kept, *([] if target is None else [header.index(target)])}
    return PredictionData(x.reshape(len(x), *model_input.input_shape), y, [name for j, name in enumerate(header) if j not in read])


def _read_svmlight(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    x, y, labels = user_files.read_svmlight(path)
    width = int(np.prod(model_input.input_shape))
    if target is not None and labels is not None:
        raise DataError("--target with several labels a row needs an .npz file: which labels a svmlight file has depends on its rows")
    if x.shape[1] > width + model_input.first_feature_id or (model_input.first_feature_id and x.shape[1] and x[:, 0].nnz):
        raise DataError(
            f"{path} has features outside {model_input.first_feature_id} to {width + model_input.first_feature_id - 1}, which are the model's"
        )
    x = csr_matrix((x.data, x.indices - model_input.first_feature_id, x.indptr), shape=(x.shape[0], width))
    return PredictionData(x, y if target is not None else None, [])
