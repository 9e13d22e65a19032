"""Rows spread over clients: what every task hands to a run."""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data.partition import (
    ClientIndices,
    Partition,
    partition_by_clusters,
    partition_by_label,
    partition_by_quantity,
    partition_iid,
)

Matrix = np.ndarray | csr_matrix


class PartitionSpec(NamedTuple):
    """How rows fall on clients."""

    num_clients: int
    partition: Partition
    alpha: float


class FederatedDataset(NamedTuple):
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


def partition_indices(x: Matrix, labels: np.ndarray | None, spec: PartitionSpec, rng: np.random.Generator) -> ClientIndices:
    """The chosen partition of the rows; `labels` are classes, None where there are none."""
    match spec.partition:
        case Partition.IID:
            return partition_iid(x.shape[0], spec.num_clients, rng)
        case Partition.QUANTITY:
            return partition_by_quantity(x.shape[0], spec.num_clients, spec.alpha, rng)
        case Partition.CLUSTERS:
            return partition_by_clusters(x, spec.num_clients, rng)
        case Partition.LABEL:
            if labels is None:
                raise ValueError("federation.partition label needs one class a row, and this task has none; use quantity, iid or clusters")
            return partition_by_label(labels.astype(np.int64), spec.num_clients, spec.alpha, rng)


def partition_dataset(
    x: Matrix, y: np.ndarray, labels: np.ndarray | None, spec: PartitionSpec, rng: np.random.Generator, num_server_examples: int
) -> tuple:
    """Rows ordered client after client with their counts, and the rows the server keeps for itself, taken first."""
    order = rng.permutation(x.shape[0])
    mine, theirs = order[:num_server_examples], np.sort(order[num_server_examples:])
    parts = partition_indices(x[theirs], None if labels is None else labels[theirs], spec, rng)
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
