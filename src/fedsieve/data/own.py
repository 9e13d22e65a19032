"""A user's own rows: .npz, .csv or svmlight files, with or without a column that says whose row it is."""

import csv
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.core.streams import stream
from fedsieve.data.sources import DataError
from fedsieve.data.spread import Drawn, Matrix, Spread, split

MOST_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Own:
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

    @property
    def rows(self) -> int | None:
        """Known once the file is read."""
        return None if self.path is None else read(self.path, self.target, self.client).x.shape[0]

    def __post_init__(self) -> None:
        """A file is needed, and some rows on both sides."""
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"data.test-fraction must lie between 0 and 1; got {self.test_fraction}")


class Table(NamedTuple):
    """Rows as read: features, targets, whose row it is, and the features' names."""

    x: Matrix
    y: np.ndarray
    owner: np.ndarray | None
    names: list[str]


@lru_cache(maxsize=2)
def read(path: Path, target: str, client: str | None) -> Table:
    """Read a file of any known kind and refuse what no model could learn from."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"data.path {path} is not a file")
    readers = {".npz": read_npz, ".csv": read_csv, ".svm": read_svm, ".svmlight": read_svm, ".libsvm": read_svm}
    if path.suffix not in readers:
        raise DataError(f"data.path {path} has an unknown ending {path.suffix or '(none)'}; use one of {', '.join(readers)}")
    try:
        table = readers[path.suffix](path, target, client)
    except (OSError, ValueError, KeyError, TypeError, csv.Error, BadZipFile) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"data.path {path} cannot be read as {path.suffix}: {problem}") from None
    values = table.x.data if isinstance(table.x, csr_matrix) else table.x
    if table.x.shape[0] == 0 or table.x.shape[1] == 0:
        raise DataError(f"data.path {path} has {table.x.shape[0]} rows and {table.x.shape[1]} features; at least one of each is needed")
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))[0]) + 1
        raise DataError(f"data.path {path} has a feature that is not a finite number (entry {bad}); remove or replace it")
    if table.y.dtype.kind == "f" and not np.isfinite(table.y).all():
        raise DataError(
            f"data.path {path} has a target that is not a finite number (row {int(np.flatnonzero(~np.isfinite(table.y))[0]) + 1})"
        )
    if table.owner is not None and len(table.owner) != table.x.shape[0]:
        raise DataError(f"data.path {path} has {table.x.shape[0]} rows but {len(table.owner)} entries in data.client")
    if len(table.y) != table.x.shape[0]:
        raise DataError(f"data.path {path} has {table.x.shape[0]} rows of features but {len(table.y)} targets")
    return table


def _column(names: list[str], wanted: str, what: str, path: Path) -> int:
    if wanted not in names:
        near = get_close_matches(wanted, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
        raise DataError(f"{what} {wanted} is not in {path}; {hint}")
    return names.index(wanted)


def read_npz(path: Path, target: str, client: str | None) -> Table:
    """Arrays x, the target, and perhaps the client's; never a pickle."""
    with np.load(path, allow_pickle=False) as arrays:
        names = list(arrays)
        x = arrays[names[_column(names, "x", "array", path)]]
        y = arrays[names[_column(names, target, "data.target", path)]]
        owner = None if client is None else arrays[names[_column(names, client, "data.client", path)]]
    x = x.reshape(len(x), -1).astype(np.float32)
    return Table(x, y, owner, [f"x{j}" for j in range(x.shape[1])])


def read_csv(path: Path, target: str, client: str | None) -> Table:
    """A header, then numbers; target and client may be words."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    if len(rows) < 2:
        raise DataError(f"data.path {path} needs a header line and at least one row")
    header = [name.strip() for name in rows[0]]
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise DataError(f"{path}, line {number}: {len(row)} columns, the header has {len(header)}")
    apart = {_column(header, target, "data.target", path)}
    if client is not None:
        apart.add(_column(header, client, "data.client", path))
    kept = [j for j in range(len(header)) if j not in apart]
    try:
        x = np.array([[row[j] for j in kept] for row in rows[1:]], dtype=np.float32)
    except ValueError:
        number, j = next((n, j) for n, row in enumerate(rows[1:], 2) for j in kept if not _is_number(row[j]))
        raise DataError(f"{path}, line {number}: column {header[j]} is {rows[number - 1][j]!r}, not a number") from None
    words = [row[header.index(target)].strip() for row in rows[1:]]
    y = np.array(words, dtype=np.float32) if all(map(_is_number, words)) else np.array(words)
    owner = None if client is None else np.array([row[header.index(client)].strip() for row in rows[1:]])
    return Table(x, y, owner, [header[j] for j in kept])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_svm(path: Path, _: str, client: str | None) -> Table:
    """svmlight rows, which stay sparse; several labels a row give a 0/1 column each."""
    from sklearn.datasets import load_svmlight_file

    if client is not None:
        raise DataError("data.client needs a .csv or .npz file: svmlight rows have no columns of that kind")
    first = path.read_text().split(maxsplit=1)[:1]
    many = bool(first) and "," in first[0]
    x, y = load_svmlight_file(str(path), multilabel=many, dtype=np.float32)
    if many:
        labels = sorted({label for row in y for label in row})
        y = np.array([[label in row for label in labels] for row in y], dtype=np.float32)
    return Table(csr_matrix(x), np.asarray(y), None, [f"x{j}" for j in range(x.shape[1])])


def classes(y: np.ndarray) -> np.ndarray:
    """The distinct targets of a classification."""
    found = np.unique(y)
    if len(found) > MOST_CLASSES:
        raise DataError(f"the target has {len(found)} different values, too many for classes; use --model linear for regression")
    if len(found) < 2:
        raise DataError(f"the target has one value only, {found[0]}; there is nothing to tell apart")
    return found


def draw(data: Own, labels: bool, spread: Spread, seed: int, server_rows: int = 0) -> Drawn:
    """The rows on their own clients, or spread by the chosen partition; some held out as test rows."""
    table = read(data.path, data.target, data.client)
    y = np.searchsorted(classes(table.y), table.y) if labels else table.y.astype(np.float32)
    order = stream(seed, "test rows").permutation(len(y))
    cut = max(1, round(data.test_fraction * len(y)))
    test, mine, rest = order[:cut], order[cut : cut + server_rows], np.sort(order[cut + server_rows :])
    if not len(rest):
        raise DataError(f"{len(y)} rows leave none to train on after {cut} test rows and {server_rows} for the server")
    if table.owner is None:
        parts = split(table.x[rest], y[rest] if labels else None, spread, stream(seed, "partition"))
    else:
        names = np.unique(table.owner)
        rng = stream(seed, "own order")
        parts = [rng.permutation(np.flatnonzero(table.owner[rest] == name)) for name in names]
    placed = rest[np.concatenate(parts)]
    counts = np.array([len(part) for part in parts])
    return Drawn(table.x[placed], y[placed], counts, table.x[test], y[test], table.x[mine], y[mine])
