"""Read and validate the data files of a user: .npz, .csv or svmlight, with or without a client column. Does not import torch."""

import csv
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple
from zipfile import BadZipFile, is_zipfile

import numpy as np
from numpy.lib.npyio import NpzFile
from scipy.sparse import csr_matrix

from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import Matrix
from fedsieve.storage.archives import check_unpacked_size

MAX_CLASSES = 1000
MAX_FEATURES = 10_000_000
READ_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError, RuntimeError)
READ_ERRORS += (csv.Error, BadZipFile, TokenError, zlib.error)
"""What the readers raise for damaged files, also for an array too large for memory or an encrypted archive."""


@dataclass(frozen=True, kw_only=True)
class UserFiles:
    """Options of a task on a file of the user."""

    path: Path | None = None
    """data file: .npz (arrays x and a target), .csv (with a header), .svm"""
    target: str = "y"
    """column (.csv) or array (.npz) to predict; not used for svmlight files"""
    client: str | None = None
    """column or array with the client of each example (default: none, federation.partition distributes the examples)"""
    test_fraction: float = 0.2
    """fraction of the examples held out for testing"""
    intercept: bool = True
    """fit an intercept per output, without a gate and not counted in the density"""
    standardize: bool | None = None
    """standardize dense features and numeric targets by the mean and scale over all clients; the stored model takes examples that are not
    standardized (default: yes for linear models without privacy.noise-multiplier; never for modules)"""

    @property
    def num_examples(self) -> int | None:
        """The number of examples; reads the file. None if there is no path."""
        return None if self.path is None else len(read_table(self.path, self.target, self.client).y)

    def __post_init__(self) -> None:
        """Validate the options."""
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"data.test-fraction must be between 0 and 1; got {self.test_fraction}")


class ExampleTable(NamedTuple):
    """The examples of a file: features, targets, clients and the names of the features."""

    x: Matrix
    y: np.ndarray
    client: np.ndarray | None
    feature_names: list[str]
    label_names: tuple[str, ...] | None = None
    """names of the columns of y, if it has several"""
    first_feature_id: int = 0
    """the id of the first feature in a svmlight file"""
    example_shape: tuple[int, ...] | None = None
    """the shape of an example before it was flattened into a row of x"""


def read_table(path: Path, target: str, client: str | None) -> ExampleTable:
    """Read and validate a file; a file that has not changed is read only once."""
    if not Path(path).is_file():
        raise DataError(f"data.path {path} is not a file")
    status = Path(path).stat()
    return _read_cached(Path(path), target, client, (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=2)
def _read_cached(path: Path, target: str, client: str | None, _: tuple[int, ...]) -> ExampleTable:
    readers = {
        ".npz": read_npz,
        ".csv": read_csv,
        ".svm": read_svmlight_table,
        ".svmlight": read_svmlight_table,
        ".libsvm": read_svmlight_table,
    }
    if path.suffix not in readers:
        raise DataError(f"data.path {path} has an unknown suffix {path.suffix or '(none)'}; use one of {', '.join(readers)}")
    try:
        table = readers[path.suffix](path, target, client)
    except READ_ERRORS as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.path {path} cannot be read as {path.suffix}: {error or type(error).__name__}") from None
    validate_examples(table, path)
    return table


def column_index(names: list[str], name: str, role: str, path: Path) -> int:
    """The index of a name; raises DataError with the most similar names if it is missing."""
    if name not in names:
        similar = get_close_matches(name, names, 1)
        listed = names if len(names) <= 8 else [*names[:6], "...", names[-1]]  # the target is often the last column
        hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(listed)}"
        raise DataError(f"{role} {name} is not in {path}; {hint}")
    return names.index(name)


def read_npz(path: Path, target: str, client: str | None) -> ExampleTable:
    """The arrays x, the target and the client, if one is named."""
    with open_npz(path) as arrays:
        x = as_float32(load_array(arrays, "x", "array", path), path)
        y = load_array(arrays, target, "data.target", path)
        clients = None if client is None else load_array(arrays, client, "data.client", path)
    flat = x.reshape(len(x), int(np.prod(x.shape[1:])))
    return ExampleTable(flat, y, clients, feature_names(0, flat.shape[1], path), example_shape=x.shape[1:])


@contextmanager
def open_npz(path: Path) -> Iterator[NpzFile]:
    """Open an .npz file without allowing pickled objects."""
    with path.open("rb") as file:
        if file.read(2) != b"PK" or not is_zipfile(file):
            raise DataError(f"{path} is not an .npz archive, or it is truncated; write it with numpy.savez")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            check_unpacked_size(arrays.zip.infolist(), path.stat().st_size)
            yield arrays


def load_array(arrays: NpzFile, key: str, role: str, path: Path) -> np.ndarray:
    """An array of an .npz file by its name."""
    names = list(arrays)
    name = names[column_index(names, key, role, path)]
    try:
        array = arrays[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise DataError(f"{path}: array {name} holds Python objects; save it as numbers or strings") from None
        raise
    if not isinstance(array, np.ndarray):  # NumPy returns the bytes of a member without an array header
        raise DataError(f"{path}: {key} is damaged, it has no array header")
    return array


def as_float32(x: np.ndarray, path: Path) -> np.ndarray:
    """Features in single precision; values too large for it become infinite, which validation rejects."""
    if x.dtype.kind not in "biuf" or x.ndim < 1:
        raise DataError(f"{path}: array x is {x.dtype} of shape {x.shape}; use real numbers of shape (examples, features)")
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def feature_names(first: int, last: int, path: Path) -> list[str]:
    """Default names of features with ids from `first` to `last - 1`."""
    if last > MAX_FEATURES:
        raise DataError(f"{path} has a feature with the id {last - 1}; at most {MAX_FEATURES} are supported")
    return [f"x{j}" for j in range(first, last)]


def read_csv(path: Path, target: str, client: str | None) -> ExampleTable:
    """A header, then numbers; target and client may be strings."""
    header, rows = read_csv_rows(path)
    target_column = column_index(header, target, "data.target", path)
    client_column = None if client is None else column_index(header, client, "data.client", path)
    features = [j for j in range(len(header)) if j not in (target_column, client_column)]
    hint = "" if client else "; if it is the client of an example, name it with --data.client"
    x = parse_columns(path, header, rows, features, hint)
    y = parse_target(column_values(rows, target_column))
    clients = None if client_column is None else np.array(column_values(rows, client_column))
    return ExampleTable(x, y, clients, [header[j] for j in features])


def read_csv_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header of a .csv file and its rows, which have the same length."""
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    if len(lines) < 2:
        raise DataError(f"data.path {path} needs a header line and at least one example")
    header = [name.strip() for name in lines[0]]
    if duplicate := next((name for name in header if header.count(name) > 1), None):
        raise DataError(f"{path}: two columns have the name {duplicate}; rename one of them")
    for number, row in enumerate(lines[1:], 2):
        if len(row) != len(header):
            raise DataError(f"{path}, line {number}: {len(row)} columns, the header has {len(header)}")
    return header, lines[1:]


def parse_columns(path: Path, header: list[str], rows: list[list[str]], columns: list[int], hint: str = "") -> np.ndarray:
    """The columns as numbers; `hint` is appended to the error if one holds something else."""
    try:
        with np.errstate(over="ignore"):
            return np.array([[row[j] for j in columns] for row in rows], dtype=np.float32).reshape(len(rows), len(columns))
    except ValueError:
        number, j = next((n, j) for n, row in enumerate(rows) for j in columns if not _is_number(row[j]))
        location = f"{path}, line {number + 2}: column {header[j]}"
        raise DataError(f"{location} is {rows[number][j]!r}, not a number; replace it, or remove the column{hint}") from None


def column_values(rows: list[list[str]], index: int) -> list[str]:
    """One column as strings."""
    return [row[index].strip() for row in rows]


def parse_target(values: list[str]) -> np.ndarray:
    """An array of numbers if all values are numbers, else of strings."""
    return np.array(values, dtype=np.float32) if all(map(_is_number, values)) else np.array(values)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_svmlight_table(path: Path, _: str, client: str | None) -> ExampleTable:
    """Sparse examples; if an example may have several labels, each label becomes a 0/1 column of y."""
    if client is not None:
        raise DataError("data.client needs a .csv or .npz file: a svmlight file has no column for it")
    x, y, labels = read_svmlight(path)
    num_columns: int = x.shape[1]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
    first = 0 if num_columns == 0 or x[:, 0].nnz else 1  # most files number features from 1, which leaves column 0 empty
    return ExampleTable(x[:, first:], y, None, feature_names(first, num_columns, path), labels, first)


def read_svmlight(path: Path) -> tuple[csr_matrix, np.ndarray, tuple[str, ...] | None]:
    """Features with the ids of the file, targets, and the names of the targets' columns if there are several."""
    from sklearn.datasets import load_svmlight_file

    first_word = path.read_text().split(maxsplit=1)[:1]
    multilabel = bool(first_word) and "," in first_word[0]
    options: dict[str, Any] = {"dtype": np.float32, "zero_based": True}  # scikit-learn has no stubs
    x, y = load_svmlight_file(str(path), multilabel=multilabel, **options)
    if not multilabel:
        return csr_matrix(x), np.asarray(y), None
    labels = sorted({label for row in y for label in row})
    if not np.isfinite(labels).all():
        raise DataError(f"{path} has a label that is not a finite number")
    return csr_matrix(x), np.array([[label in row for label in labels] for row in y], dtype=np.float32), class_labels(np.array(labels))


def distinct_classes(y: np.ndarray) -> np.ndarray:
    """The distinct targets of a classification."""
    classes = np.unique(y)
    if len(classes) > MAX_CLASSES:
        raise DataError(f"the target has {len(classes)} different values, at most {MAX_CLASSES} classes are supported; use --model linear")
    if len(classes) < 2:
        raise DataError(f"the target has only one value, {classes[0]}; classification needs at least two")
    return classes


def class_labels(values: np.ndarray) -> tuple[str, ...]:
    """Classes as text, whole numbers without a decimal point."""
    return tuple(f"{value:g}" if values.dtype.kind == "f" else str(value) for value in values)


def class_names(table: ExampleTable) -> tuple[str, ...]:
    """The names of the classes or labels."""
    if table.y.ndim == 1:
        return class_labels(distinct_classes(table.y))
    return table.label_names or tuple(map(str, range(table.y.shape[1])))


def validate_examples(table: ExampleTable, path: Path) -> None:
    """Check that features, targets and clients have matching shapes and finite values; the error names the first that is invalid."""
    x, y = table.x, table.y
    num_examples, num_features = x.shape[0], x.shape[1]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
    if not num_examples or not num_features:
        raise DataError(f"data.path {path} has {num_examples} examples and {num_features} features; at least one of each is needed")
    if y.ndim not in (1, 2) or y.dtype.kind not in "biufUS":
        raise DataError(
            f"data.path {path}: the target is {y.dtype} of shape {y.shape}; use one number or string per example, or 0/1 per label"
        )
    if len(y) != num_examples:
        raise DataError(f"data.path {path} has {num_examples} examples but {len(y)} targets")
    if (entry := find_non_finite(x)) is not None:
        row, column, value = entry
        raise DataError(
            f"data.path {path}, row {row + 1}: feature {table.feature_names[column]} is {value}, not a finite number in single precision; "
            f"remove or replace it"
        )
    with np.errstate(over="ignore"):
        invalid = np.argwhere(~np.isfinite(y.astype(np.float32))) if y.dtype.kind == "f" else []
    if len(invalid):
        raise DataError(f"data.path {path}, row {invalid[0][0] + 1}: the target is not a finite number; remove the example or replace it")
    if table.client is not None:
        validate_clients(table.client, num_examples, path)


def find_non_finite(x: Matrix) -> tuple[int, int, float] | None:
    """Row, column and value of the first entry that is not finite, or None."""
    values = x.data if isinstance(x, csr_matrix) else x
    invalid = ~np.isfinite(values)
    if not invalid.any():
        return None
    if isinstance(x, csr_matrix):
        entry = int(np.argmax(invalid))
        return int(np.searchsorted(x.indptr, entry, "right")) - 1, int(x.indices[entry]), float(values[entry])
    row, column = map(int, np.argwhere(invalid)[0])
    return row, column, float(values[row, column])


def validate_clients(client: np.ndarray, num_examples: int, path: Path) -> None:
    """Check that every example has exactly one client."""
    if client.ndim != 1 or len(client) != num_examples:
        raise DataError(f"data.path {path} has {num_examples} examples but data.client has the shape {client.shape}; use one per example")
    if client.dtype.kind not in "biufUS":
        raise DataError(f"data.path {path}: data.client holds {client.dtype}; use numbers or strings")
    empty = ~np.isfinite(client) if client.dtype.kind == "f" else np.array([not str(name).strip() for name in client.tolist()])
    if empty.any():
        raise DataError(f"data.path {path}, row {int(np.argmax(empty)) + 1}: data.client is empty; name a client, or remove the example")
