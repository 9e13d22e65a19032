"""Read the examples to predict from a .npz, .csv or svmlight file. Does not import torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data import user_files
from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import Matrix

FILE_SUFFIXES = (".npz", ".csv", ".svm", ".svmlight", ".libsvm")


class ModelInput(NamedTuple):
    """The input of a model."""

    input_shape: tuple[int, ...]
    """shape of an example"""
    features: Sequence[str] | None
    """names of the features; None if only their number is known"""
    first_feature_id: int
    """id of the first feature in svmlight files"""


class PredictionData(NamedTuple):
    """Examples in the form a model takes."""

    x: Matrix
    y: np.ndarray | None
    """the target, if one is named"""
    ignored_columns: list[str]
    """columns or arrays that are not used"""


def read_examples(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    """The examples of a file; raises DataError if they do not fit the model."""
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if path.suffix not in FILE_SUFFIXES:
        raise DataError(f"{path} has an unknown suffix {path.suffix or '(none)'}; use one of {', '.join(FILE_SUFFIXES)}")
    reader = {".npz": _read_npz, ".csv": _read_csv}.get(path.suffix, _read_svmlight)
    try:
        data = reader(path, model_input, target)
    except user_files.READ_ERRORS as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as {path.suffix}: {error or type(error).__name__}") from None
    values = data.x.data if isinstance(data.x, csr_matrix) else data.x
    if not np.isfinite(values).all():
        raise DataError(f"{path} has a feature that is not a finite number; remove or replace it")
    if data.x.shape[0] == 0:  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
        raise DataError(f"{path} has no examples")
    return data


def _read_npz(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    with user_files.open_npz(path) as arrays:
        names = list(arrays)
        x = user_files.as_float32(user_files.load_array(arrays, "x", "array", path), path)
        y = None if target is None else user_files.load_array(arrays, target, "--target", path)
    size = int(np.prod(model_input.input_shape))
    if x.ndim < 2 or int(np.prod(x.shape[1:])) != size:
        raise DataError(
            f"array x of {path} has examples of shape {x.shape[1:]}; the model takes {' x '.join(map(str, model_input.input_shape))}"
        )
    return PredictionData(x.reshape(len(x), *model_input.input_shape), y, [name for name in names if name not in ("x", target)])


def _read_csv(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    header, rows = user_files.read_csv_rows(path)
    target_column = None if target is None else user_files.column_index(header, target, "--target", path)
    y = None if target_column is None else user_files.parse_target(user_files.column_values(rows, target_column))
    if model_input.features is not None:
        columns = [user_files.column_index(header, name, "the model's feature", path) for name in model_input.features]
    else:
        columns = [j for j in range(len(header)) if j != target_column]
        if len(columns) != np.prod(model_input.input_shape):
            raise DataError(f"{path} has {len(columns)} features; the model takes {np.prod(model_input.input_shape)} in a fixed order")
    x = user_files.parse_columns(path, header, rows, columns)
    ignored = [name for j, name in enumerate(header) if j not in (*columns, target_column)]
    return PredictionData(x.reshape(len(x), *model_input.input_shape), y, ignored)


def _read_svmlight(path: Path, model_input: ModelInput, target: str | None) -> PredictionData:
    x, y, labels = user_files.read_svmlight(path)
    first, num_features = model_input.first_feature_id, int(np.prod(model_input.input_shape))
    if target is not None and labels is not None:
        raise DataError("--target with several labels per example needs an .npz file: the labels of a svmlight file depend on its examples")
    shape: Any = x.shape  # SciPy has no stubs
    if shape[1] > num_features + first or (first and shape[1] and x[:, 0].nnz):
        raise DataError(f"{path} has features outside {first} to {num_features + first - 1}, which are the model's")
    x = csr_matrix((x.data, x.indices - first, x.indptr), shape=(shape[0], num_features))
    return PredictionData(x, y if target is not None else None, [])
