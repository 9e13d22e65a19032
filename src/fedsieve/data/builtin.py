"""Tasks on real files: digits (shipped with scikit-learn), MNIST, EMNIST, RCV1; and stand-ins where there are no files."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.core.random import generator
from fedsieve.data import mnist
from fedsieve.data import rcv1 as reuters
from fedsieve.data.federated_dataset import FederatedDataset, Matrix, PartitionSpec, partition_dataset

Examples = tuple[Matrix, np.ndarray]
TrainAndTest = tuple[Examples, Examples, str | None]


class Source(StrEnum):
    """Where rows come from."""

    FILES = "files"
    SYNTHETIC = "synthetic"
    """generated rows of the same shape, for trying things out; results say so"""


@dataclass(frozen=True, kw_only=True)
class BuiltinFiles:
    """A task that reads known files."""

    path: Path | None = None
    """folder with the data files (default: FEDSIEVE_DATA, else a cache folder in your home)"""
    source: Source = Source.FILES
    """the files, or generated stand-ins of the same shape"""
    num_examples: int | None = None
    """use only this many training rows"""

    def __post_init__(self) -> None:
        """Refuse what no file could satisfy."""
        if self.num_examples is not None and self.num_examples < 1:
            raise ValueError(f"data.num-examples must be at least 1; got {self.num_examples}")
        if self.path is not None and not Path(self.path).is_dir():
            raise ValueError(f"data.path {self.path} is not a folder")


def load_builtin_dataset(task: str, data: BuiltinFiles, spec: PartitionSpec, seed: int, num_server_examples: int = 0) -> FederatedDataset:
    """The task's rows on their clients. The files are what they are: the seed decides only who holds which row."""
    loader = SYNTHETIC_LOADERS[task] if data.source is Source.SYNTHETIC else LOADERS[task]
    (x, y), (test_x, test_y), note = loader(data.path)
    if data.num_examples is not None:
        chosen = np.sort(generator(seed, "subset").permutation(x.shape[0])[: data.num_examples])
        x, y = x[chosen], y[chosen]
    labels = y if y.ndim == 1 else None
    placed = partition_dataset(x, y, labels, spec, generator(seed, "partition"), num_server_examples)
    return FederatedDataset(*placed[:3], test_x, test_y, *placed[3:], note=note)


def flatten_images(pair: tuple[np.ndarray, np.ndarray]) -> Examples:
    """Images as rows of pixels in [0, 1]."""
    return pair[0].reshape(len(pair[0]), -1).astype(np.float32) / np.float32(255), pair[1].astype(np.int64)


def add_channel(pair: tuple[np.ndarray, np.ndarray]) -> Examples:
    """Images with one channel, pixels in [0, 1]."""
    x, y = flatten_images(pair)
    return x.reshape(-1, 1, 28, 28), y


@lru_cache(maxsize=1)
def load_mnist(folder: Path | None) -> TrainAndTest:
    """Flat MNIST."""
    train, test, note = mnist.read_mnist(folder)
    return flatten_images(train), flatten_images(test), note


@lru_cache(maxsize=1)
def load_mnist_images(folder: Path | None) -> TrainAndTest:
    """MNIST for convolutions."""
    train, test, note = mnist.read_mnist(folder)
    return add_channel(train), add_channel(test), note


@lru_cache(maxsize=1)
def load_emnist(folder: Path | None) -> TrainAndTest:
    """Flat EMNIST."""
    train, test, note = mnist.read_emnist(folder)
    return flatten_images(train), flatten_images(test), note


@lru_cache(maxsize=1)
def load_rcv1(folder: Path | None) -> TrainAndTest:
    """RCV1, sparse."""
    return reuters.read_rcv1(folder)


@lru_cache(maxsize=1)
def load_digits(_: Path | None) -> TrainAndTest:
    """1,797 digits of 8 x 8 pixels, shipped with scikit-learn; a fixed fifth is the test set."""
    from sklearn.datasets import load_digits as shipped

    x, y = shipped(return_X_y=True)
    order = generator(0, "digits").permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    return (x[360:], y[360:]), (x[:360], y[:360]), None


def synthetic_images(num_features: int, num_classes: int, shape: tuple[int, ...]) -> Callable[[Path | None], TrainAndTest]:
    """Images that are noisy copies of one prototype a class."""

    def load(_: Path | None) -> TrainAndTest:
        rng = generator(0, "stand-in", num_features, num_classes)
        prototypes = (rng.random((num_classes, num_features)) < 0.15).astype(np.float32)
        y = rng.integers(0, num_classes, 6000)
        x = np.clip(prototypes[y] * rng.random((6000, num_features)) + 0.3 * rng.random((6000, num_features)) ** 3, 0, 1).astype(np.float32)
        x = x.reshape(6000, *shape)
        return (x[:5000], y[:5000]), (x[5000:], y[5000:]), "generated stand-in, not the real data"

    return load


def synthetic_topics(_: Path | None) -> TrainAndTest:
    """Sparse rows whose features speak for topics, of RCV1's width."""
    rng = generator(0, "stand-in topics")
    rows, per_row = 1500, 60
    words = rng.zipf(1.3, (reuters.NUM_LABELS, 400)) * 97 % reuters.NUM_FEATURES
    y = (rng.random((rows, reuters.NUM_LABELS)) < 0.09).astype(np.float32)
    y[np.arange(rows), rng.integers(0, reuters.NUM_LABELS, rows)] = 1
    columns = np.stack([rng.choice(words[rng.choice(np.flatnonzero(row), per_row), rng.integers(0, 400, per_row)], per_row) for row in y])
    x = csr_matrix(
        (np.full(rows * per_row, per_row**-0.5, np.float32), columns.reshape(-1), np.arange(rows + 1) * per_row),
        (rows, reuters.NUM_FEATURES),
    )
    x.sum_duplicates()
    return (x[:1200], y[:1200]), (x[1200:], y[1200:]), "generated stand-in, not the real data"


LOADERS: dict[str, Callable[[Path | None], TrainAndTest]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "mnist-cnn": load_mnist_images,
    "emnist": load_emnist,
    "rcv1": load_rcv1,
}
SYNTHETIC_LOADERS: dict[str, Callable[[Path | None], TrainAndTest]] = {
    "digits": load_digits,
    "mnist": synthetic_images(784, 10, (784,)),
    "mnist-cnn": synthetic_images(784, 10, (1, 28, 28)),
    "emnist": synthetic_images(784, 62, (784,)),
    "rcv1": synthetic_topics,
}
