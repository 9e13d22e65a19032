"""Examples, sizes and settings of the workloads. Needs only NumPy, which every environment of a contender has."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

NETWORK_SIZES = {"lenet": 44_426, "cifar_cnn": 471_338}
IMAGE_SHAPES = {"lenet": (1, 28, 28), "cifar_cnn": (3, 32, 32)}


class Workload(NamedTuple):
    """The training of one round; all clients take part, so that every contender does the same work."""

    name: str
    description: str
    loss: str
    num_features: int
    num_outputs: int
    num_clients: int
    batch_size: int
    local_steps: int
    """local steps, or exchanges if gradients are exchanged"""
    density: float = 0.05
    exchanges_gradients: bool = False
    """whether gradients are exchanged for every batch (Algorithm 1, else Algorithm 2)"""
    samples_gates: bool = True
    """whether gates are sampled in each local step; else they have their median value"""
    learning_rate: float = 0.05
    gate_learning_rate: float = 0.01
    examples_per_client: int = 320
    """number of examples of each client"""
    nonzero_per_example: int = 0
    """number of features of a sparse example; 0 if examples are dense"""
    timed_rounds: int = 2
    """number of rounds timed together"""

    @property
    def size(self) -> int:
        """The number of parameters."""
        return NETWORK_SIZES.get(self.loss, self.num_features * self.num_outputs)

    @property
    def client_steps(self) -> int:
        """The number of local steps of all clients in a round."""
        return self.num_clients * self.local_steps


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "W1",
            "linear regression, 1,000 weights, 10 clients, FLoPS",
            "squared",
            1000,
            1,
            10,
            64,
            10,
            exchanges_gradients=True,
            timed_rounds=6,
        ),
        Workload("W2", "softmax, 784 x 10, 5 clients, FLoPS-PA", "softmax", 784, 10, 5, 32, 20, timed_rounds=4),
        Workload("W3", "LeNet, 44,426 weights, 5 clients, FLoPS-PA", "lenet", 784, 10, 5, 32, 10, samples_gates=False),
        Workload(
            "W4",
            "sparse examples, 47,236 x 34, 5 clients, FLoPS-PA",
            "multilabel",
            47_236,
            34,
            5,
            64,
            10,
            0.005,
            samples_gates=False,
            nonzero_per_example=74,
        ),
        Workload(
            "RCV1",
            "RCV1 itself, 47,236 x 34, 5 clients, FLoPS-PA",
            "multilabel",
            47_236,
            34,
            5,
            64,
            10,
            0.005,
            samples_gates=False,
            nonzero_per_example=74,
        ),
        Workload("C100", "W2 with 100 clients", "softmax", 784, 10, 100, 32, 20, timed_rounds=1),
        Workload("CNN", "CNN for CIFAR-10, 471,338 weights, 5 clients, FLoPS-PA", "cifar_cnn", 3072, 10, 5, 32, 5, samples_gates=False),
        Workload(
            "10M",
            "sparse examples, 1,000,000 x 10, 5 clients, FLoPS-PA",
            "multilabel",
            1_000_000,
            10,
            5,
            64,
            10,
            0.001,
            samples_gates=False,
            nonzero_per_example=74,
            timed_rounds=1,
        ),
    )
}


class Examples(NamedTuple):
    """The examples of all clients, client after client; sparse ones as the three arrays of a CSR matrix."""

    x: np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]
    y: np.ndarray


def draw_examples(workload: Workload) -> Examples:
    """Return the examples of a workload."""
    rng = np.random.default_rng(1)
    n = workload.num_clients * workload.examples_per_client
    if workload.name == "RCV1":
        return rcv1_examples(n)
    if workload.nonzero_per_example:
        return Examples(sparse_examples(workload, n, rng), (rng.random((n, workload.num_outputs)) < 0.1).astype(np.float32))
    x = rng.standard_normal((n, workload.num_features), dtype=np.float32)
    if workload.loss == "squared":
        truth = np.where(rng.random(workload.num_features) < workload.density, 1, 0).astype(np.float32)
        return Examples(x, x @ truth + rng.standard_normal(n, dtype=np.float32))
    for row in x:  # one by one, to save memory with a thousand clients
        np.abs(row, out=row)
        row *= rng.random(workload.num_features, dtype=np.float32) < 0.2
    return Examples(x, rng.integers(0, workload.num_outputs, n))


def rcv1_examples(num_examples: int) -> Examples:
    """Return the first training examples of RCV1, from the files in FEDSIEVE_DATA; they are cached for the next contender."""
    cache = Path(__file__).parent.parent / ".bench" / f"rcv1-{num_examples}.npz"
    if not cache.exists():
        from fedsieve.data.rcv1 import read_rcv1

        (x, y), _, _ = read_rcv1(Path(os.environ["FEDSIEVE_DATA"]) if "FEDSIEVE_DATA" in os.environ else None)
        x = x[:num_examples]
        np.savez(cache, data=x.data, indices=x.indices, indptr=x.indptr, y=y[:num_examples])
    with np.load(cache) as arrays:
        return Examples((arrays["data"], arrays["indices"], arrays["indptr"]), arrays["y"])


def sparse_examples(workload: Workload, num_examples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return examples like those of RCV1: as many words per document, frequencies by Zipf's law, unit norm."""
    frequency = 1 / (np.arange(workload.num_features) + 10.0)
    frequency /= frequency.sum()
    words = [np.unique(rng.choice(workload.num_features, workload.nonzero_per_example, p=frequency)) for _ in range(num_examples)]
    lengths = np.array([len(w) for w in words])
    values = rng.random(lengths.sum(), dtype=np.float32)
    norms = np.sqrt(np.add.reduceat(values**2, np.cumsum(lengths) - lengths))
    shuffled = rng.permutation(workload.num_features)
    columns = np.concatenate([np.sort(shuffled[w]) for w in words])
    return values / np.repeat(norms, lengths), columns.astype(np.int32), np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
