"""Rows to predict: the columns a model reads, out of files of the kinds it may have learned from. No torch here."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data import user_files
from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import Matrix

KINDS = (".npz", ".csv", ".svm", ".svmlight", ".libsvm")


class Wanted(NamedTuple):
    """What a model reads."""

    row: tuple[int, ...]
    """shape of a row"""
    features: Sequence[str] | None
    """names of its columns, None where only their number is known"""
    first: int
    """number of the first feature in svmlight files"""


class Fresh(NamedTuple):
    """Rows as a model reads them."""

    x: Matrix
    y: np.ndarray | None
    """the target, where one was named"""
    unread: list[str]
    """columns or arrays nobody asked for"""


def read(path: Path, wanted: Wanted, target: str | None) -> Fresh:
    """The rows of a file, refused where they are not what the model reads."""
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if path.suffix not in KINDS:
        raise DataError(f"{path} has an unknown ending {path.suffix or '(none)'}; use one of {', '.join(KINDS)}")
    reader = {".npz": _npz, ".csv": _csv}.get(path.suffix, _svm)
    try:
        found = reader(path, wanted, target)
    except user_files.DAMAGE as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"{path} cannot be read as {path.suffix}: {problem or type(problem).__name__}") from None
    values = found.x.data if isinstance(found.x, csr_matrix) else found.x
    if not np.isfinite(values).all():
        raise DataError(f"{path} has a feature that is not a finite number; remove or replace it")
    if found.x.shape[0] == 0:
        raise DataError(f"{path} has no rows")
    return found


def _npz(path: Path, wanted: Wanted, target: str | None) -> Fresh:
    with user_files.archive(path) as arrays:
        names = list(arrays)
        x = user_files.real(user_files.member(arrays, "x", "array", path), path)
        y = None if target is None else user_files.member(arrays, target, "--target", path)
    size = int(np.prod(wanted.row))
    if x.ndim < 2 or int(np.prod(x.shape[1:])) != size:
        raise DataError(f"array x of {path} has rows of shape {x.shape[1:]}; the model reads {' x '.join(map(str, wanted.row))}")
    return Fresh(x.reshape(len(x), *wanted.row), y, [name for name in names if name not in ("x", target)])


def _csv(path: Path, wanted: Wanted, target: str | None) -> Fresh:
    header, rows = user_files.read_lines(path)
    y = None if target is None else user_files.targets(user_files.column(rows, user_files.column_number(header, target, "--target", path)))
    if wanted.features is not None:
        kept = [user_files.column_number(header, name, "the model's column", path) for name in wanted.features]
    else:
        kept = [j for j, name in enumerate(header) if name != target]
        if len(kept) != np.prod(wanted.row):
            raise DataError(f"{path} has {len(kept)} columns; the model reads {np.prod(wanted.row)}, known by their order only")
    x = user_files.numbers(path, header, rows, kept)
    read = {*kept, *([] if target is None else [header.index(target)])}
    return Fresh(x.reshape(len(x), *wanted.row), y, [name for j, name in enumerate(header) if j not in read])


def _svm(path: Path, wanted: Wanted, target: str | None) -> Fresh:
    x, y, labels = user_files.read_svmlight(path)
    width = int(np.prod(wanted.row))
    if target is not None and labels is not None:
        raise DataError("--target with several labels a row needs an .npz file: which labels a svmlight file has depends on its rows")
    if x.shape[1] > width + wanted.first or (wanted.first and x.shape[1] and x[:, 0].nnz):
        raise DataError(f"{path} has features outside {wanted.first} to {width + wanted.first - 1}, which are the model's")
    x = csr_matrix((x.data, x.indices - wanted.first, x.indptr), shape=(x.shape[0], width))
    return Fresh(x, y if target is not None else None, [])
