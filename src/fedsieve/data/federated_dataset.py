"""A data set distributed over clients."""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data.partition import (
    ClientIndices,
    Partition,
    partition_by_clusters,
    partition_by_label,
    partition_by_owner,
    partition_by_quantity,
    partition_iid,
)

Matrix = np.ndarray | csr_matrix


class PartitionSpec(NamedTuple):
    """How examples are distributed over clients."""

    num_clients: int
    partition: Partition
    alpha: float


class FederatedDataset(NamedTuple):
    """Training examples ordered by client, test examples, examples of the server, and the true coefficients if they are known."""

    x: Matrix
    y: np.ndarray
    counts: np.ndarray
    """number of examples of each client"""
    test_x: Matrix
    test_y: np.ndarray
    server_x: Matrix
    server_y: np.ndarray
    source: str
    """where the examples come from, and how training and test examples were separated"""
    truth: np.ndarray | None = None
    """(outputs, features)"""
    note: str | None = None
    """a warning about the data"""

    @property
    def description(self) -> str:
        """One sentence with source and numbers of examples, for results, tables and figures."""
        at_server = f", {len(self.server_y):,} at the server" if len(self.server_y) else ""
        return f"{self.source}: {len(self.y):,} training and {len(self.test_y):,} test examples{at_server}"


def partition_indices(
    x: Matrix, labels: np.ndarray | None, spec: PartitionSpec, rng: np.random.Generator, owners: np.ndarray | None = None
) -> ClientIndices:
    """The indices of each client's examples; `labels` are classes and `owners` natural clients, or None if there are none."""
    num_examples: int = x.shape[0]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
    match spec.partition:
        case Partition.IID:
            return partition_iid(num_examples, spec.num_clients, rng)
        case Partition.QUANTITY:
            return partition_by_quantity(num_examples, spec.num_clients, spec.alpha, rng)
        case Partition.CLUSTERS:
            return partition_by_clusters(x, spec.num_clients, rng)
        case Partition.NATURAL:
            if owners is None:
                raise ValueError(
                    "federation.partition natural needs data that name the client of each example, and these do not; "
                    "use iid, quantity, label or clusters"
                )
            return partition_by_owner(owners, rng)
        case Partition.LABEL:
            if labels is None:
                raise ValueError(
                    "federation.partition label needs one class per example, and this task has none; use quantity, iid or clusters"
                )
            return partition_by_label(labels.astype(np.int64), spec.num_clients, spec.alpha, rng)


def partition_dataset(
    x: Matrix,
    y: np.ndarray,
    labels: np.ndarray | None,
    spec: PartitionSpec,
    rng: np.random.Generator,
    num_server_examples: int,
    owners: np.ndarray | None = None,
) -> tuple[Matrix, np.ndarray, np.ndarray, Matrix, np.ndarray]:
    """Examples ordered by client with their counts, and the examples of the server, which are drawn first."""
    order = rng.permutation(x.shape[0])  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
    server, clients = order[:num_server_examples], np.sort(order[num_server_examples:])
    parts = partition_indices(
        x[clients], None if labels is None else labels[clients], spec, rng, None if owners is None else owners[clients]
    )
    by_client = clients[np.concatenate(parts)]
    return x[by_client], y[by_client], np.array([len(part) for part in parts]), x[server], y[server]


def label_counts(y: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """The number of examples of each label on each client, (clients, labels); None for regression."""
    client = np.repeat(np.arange(len(counts)), counts)
    if y.ndim == 2:
        return np.stack([np.bincount(client, weights=column, minlength=len(counts)) for column in y.T], axis=1)
    if len(np.unique(y)) > 200:
        return None
    labels = y.astype(np.int64)
    table = np.zeros((len(counts), int(labels.max()) + 1))
    np.add.at(table, (client, labels), 1)
    return table
