"""What is timed: rows, sizes and settings of W1 to W4, in NumPy alone, so that every contender's own environment can read them."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Workload(NamedTuple):
    """Real training steps of one round; all clients take part, so every contender does the same amount of work."""

    name: str
    description: str
    loss: str
    num_features: int
    num_outputs: int
    num_clients: int
    batch_size: int
    local_steps: int
    """local steps, or exchanges where gradients are exchanged"""
    density: float = 0.05
    exchanges_gradients: bool = False
    """Algorithm 1: gradients exchanged every batch; else Algorithm 2"""
    samples_gates: bool = True
    """gates drawn in each local step, or at their median (the default of the task)"""
    learning_rate: float = 0.05
    gate_learning_rate: float = 0.01
    examples_per_client: int = 320
    """rows of each client"""
    nonzero_per_example: int = 0
    """features of a sparse row; 0 where rows are dense"""
    timed_rounds: int = 2
    """rounds timed at once"""

    @property
    def size(self) -> int:
        """Parameters."""
        return 44_426 if self.loss == "lenet" else self.num_features * self.num_outputs

    @property
    def client_steps(self) -> int:
        """Steps of all clients in a round."""
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
            "sparse rows, 47,236 x 34, 5 clients, FLoPS-PA",
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
    )
}


class Examples(NamedTuple):
    """Rows of all clients, client after client; sparse ones as the three arrays of a CSR matrix."""

    x: np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]
    y: np.ndarray


def draw_examples(workload: Workload) -> Examples:
    """The rows of a workload."""
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
    for row in x:  # one by one: a thousand clients' rows are not held twice
        np.abs(row, out=row)
        row *= rng.random(workload.num_features, dtype=np.float32) < 0.2
    return Examples(x, rng.integers(0, workload.num_outputs, n))


def rcv1_examples(num_examples: int) -> Examples:
    """The first training rows of RCV1, from the files FEDSIEVE_DATA names; the next contender finds them read."""
    kept = Path(__file__).parent.parent / ".bench" / f"rcv1-{num_examples}.npz"
    if not kept.exists():
        from fedsieve.data.rcv1 import read_rcv1

        (x, y), _, _ = read_rcv1(Path(os.environ["FEDSIEVE_DATA"]) if "FEDSIEVE_DATA" in os.environ else None)
        x = x[:num_examples]
        np.savez(kept, data=x.data, indices=x.indices, indptr=x.indptr, y=y[:num_examples])
    with np.load(kept) as rows:
        return Examples((rows["data"], rows["indices"], rows["indptr"]), rows["y"])


def sparse_examples(workload: Workload, num_examples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows like RCV1's: as many words a document, as common as Zipf's law has it, unit length."""
    common = 1 / (np.arange(workload.num_features) + 10.0)
    common /= common.sum()
    words = [np.unique(rng.choice(workload.num_features, workload.nonzero_per_example, p=common)) for _ in range(num_examples)]
    lengths = np.array([len(w) for w in words])
    values = rng.random(lengths.sum(), dtype=np.float32)
    norms = np.sqrt(np.add.reduceat(values**2, np.cumsum(lengths) - lengths))
    shuffled = rng.permutation(workload.num_features)
    columns = np.concatenate([np.sort(shuffled[w]) for w in words])
    return values / np.repeat(norms, lengths), columns.astype(np.int32), np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
