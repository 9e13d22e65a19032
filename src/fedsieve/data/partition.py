"""Partitions of examples: one array of indices per client, possibly empty."""

from enum import StrEnum
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix


class Partition(StrEnum):
    """How examples are distributed over clients (L242, L371, L603)."""

    IID = "iid"
    """random parts of equal size"""
    QUANTITY = "quantity"
    """sizes from a Dirichlet distribution"""
    LABEL = "label"
    """the examples of each label distributed by a separate Dirichlet draw"""
    CLUSTERS = "clusters"
    """each client holds parts of two k-means clusters"""
    NATURAL = "natural"
    """each client is a real one that the data name, such as a writer or a hospital"""


ClientIndices = list[np.ndarray]


def partition_iid(num_examples: int, num_clients: int, rng: np.random.Generator) -> ClientIndices:
    """Random parts whose sizes differ by at most one."""
    return np.array_split(rng.permutation(num_examples), num_clients)


def partition_by_quantity(num_examples: int, num_clients: int, alpha: float, rng: np.random.Generator) -> ClientIndices:
    """Random parts whose sizes follow one Dirichlet(alpha) draw over clients (quantity skew, L603)."""
    counts = rng.multinomial(num_examples, rng.dirichlet(np.full(num_clients, alpha)))
    return np.split(rng.permutation(num_examples), np.cumsum(counts)[:-1])


def partition_by_label(labels: Int[np.ndarray, " n"], num_clients: int, alpha: float, rng: np.random.Generator) -> ClientIndices:
    """Each label is distributed over clients by its own Dirichlet(alpha) draw (label skew, L371)."""
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        indices = rng.permutation(np.flatnonzero(labels == label))
        counts = rng.multinomial(len(indices), rng.dirichlet(np.full(num_clients, alpha)))
        for part, piece in zip(parts, np.split(indices, np.cumsum(counts)[:-1]), strict=True):
            part.append(piece)
    return [rng.permutation(np.concatenate(part)) for part in parts]


def partition_by_owner(owners: Int[np.ndarray, " n"], rng: np.random.Generator) -> ClientIndices:
    """The examples of each owner, in random order."""
    return [rng.permutation(np.flatnonzero(owners == owner)) for owner in np.unique(owners)]


def partition_by_clusters(
    x: Float[np.ndarray, "n f"] | csr_matrix, num_clients: int, rng: np.random.Generator, num_clusters: int = 10
) -> ClientIndices:
    """k-means clusters are cut into equal pieces; each client gets one piece of each of two clusters (Tong et al. 2022, L369-371)."""
    from sklearn.cluster import MiniBatchKMeans

    pieces_per_cluster = -(-2 * num_clients // num_clusters)
    options: dict[str, Any] = {"n_init": 3}  # scikit-learn has no stubs
    kmeans = MiniBatchKMeans(num_clusters, random_state=int(rng.integers(2**31)), **options)
    cluster = kmeans.fit_predict(x)
    pieces = [list(np.array_split(rng.permutation(np.flatnonzero(cluster == c)), pieces_per_cluster)) for c in range(num_clusters)]
    return [
        rng.permutation(np.concatenate([pieces[c].pop() for c in pair]))
        for pair in _assign_cluster_pairs(num_clients, num_clusters, pieces_per_cluster, rng)
    ]


def _assign_cluster_pairs(num_clients: int, num_clusters: int, pieces_per_cluster: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Two different clusters for each client: the two with the most pieces left, ties broken at random."""
    num_left = np.full(num_clusters, pieces_per_cluster)
    pairs = []
    for _ in range(num_clients):
        first, second = np.argsort(-(num_left + rng.random(num_clusters)), kind="stable")[:2]
        num_left[[first, second]] -= 1
        pairs.append((int(first), int(second)))
    return pairs
