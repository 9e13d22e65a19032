"""A user's own rows: .npz, .csv or svmlight files, with or without a column that says whose row it is. No torch here."""

import csv
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple
from zipfile import BadZipFile, is_zipfile

import numpy as np
from numpy.lib.npyio import NpzFile
from scipy.sparse import csr_matrix

from fedsieve.data import validation
from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import Matrix

MAX_CLASSES = 1000
MAX_FEATURES = 10_000_000
READ_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError, RuntimeError)
READ_ERRORS += (csv.Error, BadZipFile, TokenError, zlib.error)
"""What readers of damaged files raise: a shape beyond all memory and a locked archive are among it."""


@dataclass(frozen=True, kw_only=True)
class UserFiles:
    """Where the rows are and what is what in them."""

    path: Path | None = None
    """file with the rows: .npz (arrays x and a target), .csv (with a header), .svm"""
    target: str = "y"
    """column (csv) or array (npz) to predict; svmlight files have theirs in front"""
    client: str | None = None
    """column or array that says which client a row belongs to; without it a partition is chosen"""
    test_fraction: float = 0.2
    """part of the rows held out as test rows"""
    intercept: bool = True
    """fit one more number an output, without a gate and outside the density"""
    standardize: bool | None = None
    """clients first agree on mean and scale of dense features and of numbers to predict; the model reads your units all the same
    (default: yes for linear models, unless privacy.noise-multiplier hides clients; modules take rows as they are)"""

    @property
    def num_examples(self) -> int | None:
        """Known once the file is read."""
        return None if self.path is None else read_table(self.path, self.target, self.client).x.shape[0]

    def __post_init__(self) -> None:
        """A file is needed, and some rows on both sides."""
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"data.test-fraction must lie between 0 and 1; got {self.test_fraction}")


class ExampleTable(NamedTuple):
    """Rows as read: features, targets, whose row it is, and the features' names."""

    x: Matrix
    y: np.ndarray
    client: np.ndarray | None
    feature_names: list[str]
    label_names: tuple[str, ...] | None = None
    """what the columns of y stand for, where there are several"""
    first_feature_id: int = 0
    """the number the file gives its first feature"""
    example_shape: tuple[int, ...] | None = None
    """the shape of a row, where x is the rows laid flat"""


def read_table(path: Path, target: str, client: str | None) -> ExampleTable:
    """Read a file of any known kind and refuse what no model could learn from; one that did not change is read once."""
    if not Path(path).is_file():
        raise DataError(f"data.path {path} is not a file")
    facts = Path(path).stat()
    return _read_cached(Path(path), target, client, (facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size))


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
        raise DataError(f"data.path {path} has an unknown ending {path.suffix or '(none)'}; use one of {', '.join(readers)}")
    try:
        table = readers[path.suffix](path, target, client)
    except READ_ERRORS as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"data.path {path} cannot be read as {path.suffix}: {problem or type(problem).__name__}") from None
    validation.validate_examples(table.x, table.y, table.client, table.feature_names, path)
    return table


def column_index(names: list[str], name: str, role: str, path: Path) -> int:
    """Where a name stands, or the nearest one there is."""
    if name not in names:
        near = get_close_matches(name, names, 1)
        some = names if len(names) <= 8 else [*names[:6], "...", names[-1]]  # targets often stand last
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(some)}"
        raise DataError(f"{role} {name} is not in {path}; {hint}")
    return names.index(name)


def read_npz(path: Path, target: str, client: str | None) -> ExampleTable:
    """Arrays x, the target, and perhaps the client's."""
    with open_npz(path) as arrays:
        x = as_float32(load_array(arrays, "x", "array", path), path)
        y = load_array(arrays, target, "data.target", path)
        owner = None if client is None else load_array(arrays, client, "data.client", path)
    flat = x.reshape(len(x), int(np.prod(x.shape[1:])))
    return ExampleTable(flat, y, owner, feature_names(0, flat.shape[1], path), example_shape=x.shape[1:])


@contextmanager
def open_npz(path: Path) -> Iterator[NpzFile]:
    """The arrays of an .npz file; never a pickle, nor NumPy's advice to trust one."""
    with path.open("rb") as file:
        if file.read(2) != b"PK" or not is_zipfile(file):
            raise DataError(f"{path} is no .npz archive, or a part of it is missing; numpy.savez writes one")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays


def load_array(arrays: NpzFile, key: str, role: str, path: Path) -> np.ndarray:
    """An array of an .npz file by its name; what has no array's header comes back as bytes."""
    names = list(arrays)
    name = names[column_index(names, key, role, path)]
    try:
        found = arrays[name]
    except ValueError as problem:
        if "allow_pickle" in str(problem):
            raise DataError(f"{path}: array {name} holds Python objects; save it as numbers or words") from None
        raise
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path}: {key} is damaged, it does not begin like an array")
    return found


def as_float32(x: np.ndarray, path: Path) -> np.ndarray:
    """An array of features in single precision; what is too large for it is refused with what is not finite."""
    if x.dtype.kind not in "biuf" or x.ndim < 1:
        raise DataError(f"{path}: array x is {x.dtype} of shape {x.shape}; use real numbers, one row of features after the other")
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def feature_names(first: int, last: int, path: Path) -> list[str]:
    """Names of features without any."""
    if last > MAX_FEATURES:
        raise DataError(f"{path} has features up to number {last - 1}; at most {MAX_FEATURES} are supported")
    return [f"x{j}" for j in range(first, last)]


def read_csv(path: Path, target: str, client: str | None) -> ExampleTable:
    """A header, then numbers; target and client may be words."""
    header, rows = read_csv_rows(path)
    apart = {column_index(header, target, "data.target", path)}
    if client is not None:
        apart.add(column_index(header, client, "data.client", path))
    kept = [j for j in range(len(header)) if j not in apart]
    owner = None if client is None else np.array(column_values(rows, header.index(client)))
    hint = "" if client else "; if it says whose a row is, name it with --data.client"
    return ExampleTable(
        parse_columns(path, header, rows, kept, hint),
        parse_target(column_values(rows, header.index(target))),
        owner,
        [header[j] for j in kept],
    )


def read_csv_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header of a .csv file and its rows, all of one length."""
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    if len(lines) < 2:
        raise DataError(f"data.path {path} needs a header line and at least one row")
    header = [name.strip() for name in lines[0]]
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise DataError(f"{path}: two columns are called {twice}; give each its own name")
    for number, row in enumerate(lines[1:], 2):
        if len(row) != len(header):
            raise DataError(f"{path}, line {number}: {len(row)} columns, the header has {len(header)}")
    return header, lines[1:]


def parse_columns(path: Path, header: list[str], rows: list[list[str]], columns: list[int], hint: str = "") -> np.ndarray:
    """Some columns as numbers; `hint` is what else the others may be for."""
    try:
        with np.errstate(over="ignore"):
            return np.array([[row[j] for j in columns] for row in rows], dtype=np.float32).reshape(len(rows), len(columns))
    except ValueError:
        number, j = next((n, j) for n, row in enumerate(rows) for j in columns if not _is_number(row[j]))
        said = f"{path}, line {number + 2}: column {header[j]} is {rows[number][j]!r}, not a number; replace it, or remove the column"
        raise DataError(said + hint) from None


def column_values(rows: list[list[str]], index: int) -> list[str]:
    """One column as it is written."""
    return [row[index].strip() for row in rows]


def parse_target(values: list[str]) -> np.ndarray:
    """Numbers where all are, else words."""
    return np.array(values, dtype=np.float32) if all(map(_is_number, values)) else np.array(values)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_svmlight_table(path: Path, _: str, client: str | None) -> ExampleTable:
    """svmlight rows, which stay sparse; several labels a row give a 0/1 column each."""
    if client is not None:
        raise DataError("data.client needs a .csv or .npz file: svmlight rows have no columns of that kind")
    x, y, labels = read_svmlight(path)
    first = 0 if x.shape[1] == 0 or x[:, 0].nnz else 1  # most files number their features from 1, and leave column 0 empty
    return ExampleTable(x[:, first:], y, None, feature_names(first, x.shape[1], path), labels, first)


def read_svmlight(path: Path) -> tuple[csr_matrix, np.ndarray, tuple[str, ...] | None]:
    """Rows with features numbered as in the file, targets, and what the targets' columns stand for where there are several."""
    from sklearn.datasets import load_svmlight_file

    words = path.read_text().split(maxsplit=1)[:1]
    many = bool(words) and "," in words[0]
    x, y = load_svmlight_file(str(path), multilabel=many, dtype=np.float32, zero_based=True)
    if not many:
        return csr_matrix(x), np.asarray(y), None
    labels = sorted({label for row in y for label in row})
    if not np.isfinite(labels).all():
        raise DataError(f"{path} has a label that is not a finite number")
    return csr_matrix(x), np.array([[label in row for label in labels] for row in y], dtype=np.float32), class_labels(np.array(labels))


def distinct_classes(y: np.ndarray) -> np.ndarray:
    """The distinct targets of a classification."""
    found = np.unique(y)
    if len(found) > MAX_CLASSES:
        raise DataError(f"the target has {len(found)} different values, too many for classes; use --model linear for regression")
    if len(found) < 2:
        raise DataError(f"the target has one value only, {found[0]}; there is nothing to tell apart")
    return found


def class_labels(values: np.ndarray) -> tuple[str, ...]:
    """Targets as people write them: 1, not 1.0."""
    return tuple(f"{value:g}" if values.dtype.kind == "f" else str(value) for value in values)


def class_names(table: ExampleTable) -> tuple[str, ...]:
    """What a model of these rows tells apart."""
    if table.y.ndim == 1:
        return class_labels(distinct_classes(table.y))
    return table.label_names or tuple(map(str, range(table.y.shape[1])))
