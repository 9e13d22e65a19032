"""Which client holds which row. Every partition is a list of index arrays, one per client, some possibly empty."""

from enum import StrEnum

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix


class Partition(StrEnum):
    """How rows fall on clients (L242, L371, L603)."""

    IID = "iid"
    """equal random parts"""
    QUANTITY = "quantity"
    """sizes from a Dirichlet distribution"""
    LABEL = "label"
    """each label's rows spread by a Dirichlet draw of its own"""
    CLUSTERS = "clusters"
    """two parts of two k-means clusters for each client"""


ClientIndices = list[np.ndarray]


def partition_iid(num_examples: int, num_clients: int, rng: np.random.Generator) -> ClientIndices:
    """Equal random parts, sizes differing by one at most."""
    return np.array_split(rng.permutation(num_examples), num_clients)


def partition_by_quantity(num_examples: int, num_clients: int, alpha: float, rng: np.random.Generator) -> ClientIndices:
    """Sizes in proportion to one Dirichlet(alpha) draw over clients, rows at random (quantity skew, L603)."""
    counts = rng.multinomial(num_examples, rng.dirichlet(np.full(num_clients, alpha)))
    return np.split(rng.permutation(num_examples), np.cumsum(counts)[:-1])


def partition_by_label(labels: Int[np.ndarray, " n"], num_clients: int, alpha: float, rng: np.random.Generator) -> ClientIndices:
    """For each label a Dirichlet(alpha) draw over clients says who gets how much of it (label skew, L371)."""
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        counts = rng.multinomial(len(rows), rng.dirichlet(np.full(num_clients, alpha)))
        for part, piece in zip(parts, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
            part.append(piece)
    return [rng.permutation(np.concatenate(part)) for part in parts]


def partition_by_clusters(
    x: Float[np.ndarray, "n f"] | csr_matrix, num_clients: int, rng: np.random.Generator, num_clusters: int = 10
) -> ClientIndices:
    """k-means clusters cut into even pieces; each client gets one piece of each of two clusters (Tong et al. 2022, L369-371)."""
    from sklearn.cluster import MiniBatchKMeans

    pieces = -(-2 * num_clients // num_clusters)
    kmeans = MiniBatchKMeans(num_clusters, random_state=int(rng.integers(2**31)), n_init=3)
    label = kmeans.fit_predict(x)
    stock = [list(np.array_split(rng.permutation(np.flatnonzero(label == c)), pieces)) for c in range(num_clusters)]
    return [
        rng.permutation(np.concatenate([stock[c].pop() for c in pair]))
        for pair in _assign_cluster_pairs(num_clients, num_clusters, pieces, rng)
    ]


def _assign_cluster_pairs(num_clients: int, num_clusters: int, pieces_per_cluster: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Two different clusters for each client, none used more than `pieces` times: the two fullest, ties at random."""
    left = np.full(num_clusters, pieces_per_cluster)
    pairs = []
    for _ in range(num_clients):
        first, second = np.argsort(-(left + rng.random(num_clusters)), kind="stable")[:2]
        left[[first, second]] -= 1
        pairs.append((int(first), int(second)))
    return pairs
