"""Rows that no model could learn from, or that nobody meant, are refused in one line."""

from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import Matrix


def validate_examples(x: Matrix, y: np.ndarray, client: np.ndarray | None, names: list[str], path: Path) -> None:
    """Features, targets and owners of rows must fit together and be finite; the first that is not is named."""
    if 0 in x.shape:
        raise DataError(f"data.path {path} has {x.shape[0]} rows and {x.shape[1]} features; at least one of each is needed")
    if y.ndim not in (1, 2) or y.dtype.kind not in "biufUS":
        raise DataError(f"data.path {path}: the target is {y.dtype} of shape {y.shape}; use one number or word a row, or 0/1 a label")
    if len(y) != x.shape[0]:
        raise DataError(f"data.path {path} has {x.shape[0]} rows of features but {len(y)} targets")
    if (bad := find_non_finite(x)) is not None:
        row, column, value = bad
        raise DataError(
            f"data.path {path}, row {row + 1}: feature {names[column]} is {value}, not a finite number in single precision; "
            f"remove or replace it"
        )
    with np.errstate(over="ignore"):
        lost = np.argwhere(~np.isfinite(y.astype(np.float32))) if y.dtype.kind == "f" else []
    if len(lost):
        raise DataError(f"data.path {path}, row {lost[0][0] + 1}: the target is not a finite number; remove the row or replace it")
    if client is not None:
        validate_clients(client, x.shape[0], path)


def find_non_finite(x: Matrix) -> tuple[int, int, float] | None:
    """Row, column and value of the first entry that is no finite number."""
    values = x.data if isinstance(x, csr_matrix) else x
    wrong = ~np.isfinite(values)
    if not wrong.any():
        return None
    if isinstance(x, csr_matrix):
        entry = int(np.argmax(wrong))
        return int(np.searchsorted(x.indptr, entry, "right")) - 1, int(x.indices[entry]), float(values[entry])
    row, column = map(int, np.argwhere(wrong)[0])
    return row, column, float(values[row, column])


def validate_clients(client: np.ndarray, num_examples: int, path: Path) -> None:
    """Every row must say in one value whose it is."""
    if client.ndim != 1 or len(client) != num_examples:
        raise DataError(f"data.path {path} has {num_examples} rows but data.client has the shape {client.shape}; one entry a row is needed")
    if client.dtype.kind not in "biufUS":
        raise DataError(f"data.path {path}: data.client holds {client.dtype}; use numbers or words")
    nobody = ~np.isfinite(client) if client.dtype.kind == "f" else np.array([not str(name).strip() for name in client.tolist()])
    if nobody.any():
        raise DataError(f"data.path {path}, row {int(np.argmax(nobody)) + 1}: data.client is empty; say whose row it is, or remove it")
