"""Rows spread over clients: what every task hands to a run."""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data.partition import Partition, Parts, by_clusters, by_label, by_quantity, iid

Matrix = np.ndarray | csr_matrix


class Spread(NamedTuple):
    """How rows fall on clients."""

    clients: int
    partition: Partition
    alpha: float


class Drawn(NamedTuple):
    """A task's rows, client after client, its test rows, the server's own, and the truth where it is known."""

    x: Matrix
    y: np.ndarray
    counts: np.ndarray
    test_x: Matrix
    test_y: np.ndarray
    server_x: Matrix
    server_y: np.ndarray
    truth: np.ndarray | None = None
    """(outputs, features)"""
    note: str | None = None
    """what a reader of the result must know about the data"""


def split(x: Matrix, labels: np.ndarray | None, spread: Spread, rng: np.random.Generator) -> Parts:
    """The chosen partition of the rows; `labels` are classes, None where there are none."""
    match spread.partition:
        case Partition.IID:
            return iid(x.shape[0], spread.clients, rng)
        case Partition.QUANTITY:
            return by_quantity(x.shape[0], spread.clients, spread.alpha, rng)
        case Partition.CLUSTERS:
            return by_clusters(x, spread.clients, rng)
        case Partition.LABEL:
            if labels is None:
                raise ValueError("federation.partition label needs one class a row, and this task has none; use quantity, iid or clusters")
            return by_label(labels.astype(np.int64), spread.clients, spread.alpha, rng)


def spread_rows(x: Matrix, y: np.ndarray, labels: np.ndarray | None, spread: Spread, rng: np.random.Generator, server_rows: int) -> tuple:
    """Rows ordered client after client with their counts, and the rows the server keeps for itself, taken first."""
    order = rng.permutation(x.shape[0])
    mine, theirs = order[:server_rows], np.sort(order[server_rows:])
    parts = split(x[theirs], None if labels is None else labels[theirs], spread, rng)
    placed = theirs[np.concatenate(parts)]
    return x[placed], y[placed], np.array([len(part) for part in parts]), x[mine], y[mine]


def label_counts(y: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """How many rows of each label each client holds, (clients, labels); None for regression."""
    owner = np.repeat(np.arange(len(counts)), counts)
    if y.ndim == 2:
        return np.stack([np.bincount(owner, weights=column, minlength=len(counts)) for column in y.T], axis=1)
    if len(np.unique(y)) > 200:
        return None
    labels = y.astype(np.int64)
    table = np.zeros((len(counts), int(labels.max()) + 1))
    np.add.at(table, (owner, labels), 1)
    return table
