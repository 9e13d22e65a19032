"""The built-in data sets: digits (part of scikit-learn), MNIST, EMNIST, RCV1, and synthetic replacements of the same shape."""

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
TrainAndTest = tuple[Examples, Examples, str]
"""Training examples, test examples, and their source."""
SYNTHETIC_SOURCE = "synthetic examples, not the real data"


class Source(StrEnum):
    """Where the examples of a built-in data set come from."""

    FILES = "files"
    SYNTHETIC = "synthetic"
    """generated examples of the same shape, to try things out; the result says so"""


@dataclass(frozen=True, kw_only=True)
class BuiltinFiles:
    """Options of a task on a built-in data set."""

    path: Path | None = None
    """folder of the data files (default: FEDSIEVE_DATA, or ~/.cache/fedsieve if it is not set)"""
    source: Source = Source.FILES
    """the real files, or generated examples of the same shape"""
    num_examples: int | None = None
    """use only this many training examples"""

    def __post_init__(self) -> None:
        """Validate the options."""
        if self.num_examples is not None and self.num_examples < 1:
            raise ValueError(f"data.num-examples must be at least 1; got {self.num_examples}")
        if self.path is not None and not Path(self.path).is_dir():
            raise ValueError(f"data.path {self.path} is not a folder")


def load_builtin_dataset(task: str, data: BuiltinFiles, spec: PartitionSpec, seed: int, num_server_examples: int = 0) -> FederatedDataset:
    """Load a data set and distribute it over clients. The seed decides only which client holds which example."""
    loader = SYNTHETIC_LOADERS[task] if data.source is Source.SYNTHETIC else LOADERS[task]
    (x, y), (test_x, test_y), source = loader(data.path)
    if data.num_examples is not None:
        num_rows: int = x.shape[0]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
        subset = np.sort(generator(seed, "subset").permutation(num_rows)[: data.num_examples])
        x, y, source = x[subset], y[subset], f"{source}, a random subset of the training examples"
    labels = y if y.ndim == 1 else None
    x, y, counts, server_x, server_y = partition_dataset(x, y, labels, spec, generator(seed, "partition"), num_server_examples)
    return FederatedDataset(x, y, counts, test_x, test_y, server_x, server_y, source)


def flatten_images(pair: tuple[np.ndarray, np.ndarray]) -> Examples:
    """Images as vectors of pixels in [0, 1], and their labels."""
    return pair[0].reshape(len(pair[0]), -1).astype(np.float32) / np.float32(255), pair[1].astype(np.int64)


def add_channel(pair: tuple[np.ndarray, np.ndarray]) -> Examples:
    """Images of shape (1, 28, 28) with pixels in [0, 1], and their labels."""
    x, y = flatten_images(pair)
    return x.reshape(-1, 1, 28, 28), y


@lru_cache(maxsize=1)
def load_mnist(folder: Path | None) -> TrainAndTest:
    """MNIST as vectors."""
    train, test, source = mnist.read_mnist(folder)
    return flatten_images(train), flatten_images(test), source


@lru_cache(maxsize=1)
def load_mnist_images(folder: Path | None) -> TrainAndTest:
    """MNIST as images, for convolutional networks."""
    train, test, source = mnist.read_mnist(folder)
    return add_channel(train), add_channel(test), source


@lru_cache(maxsize=1)
def load_emnist(folder: Path | None) -> TrainAndTest:
    """EMNIST as vectors."""
    train, test, source = mnist.read_emnist(folder)
    return flatten_images(train), flatten_images(test), source


@lru_cache(maxsize=1)
def load_rcv1(folder: Path | None) -> TrainAndTest:
    """RCV1 as sparse matrices."""
    return reuters.read_rcv1(folder)


@lru_cache(maxsize=1)
def load_digits(_: Path | None) -> TrainAndTest:
    """The 1,797 digits of 8 x 8 pixels of scikit-learn; a fixed fifth is the test set."""
    from sklearn.datasets import load_digits as sklearn_digits

    x, y = sklearn_digits(return_X_y=True)
    order = generator(0, "digits").permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    return (x[360:], y[360:]), (x[:360], y[:360]), "the digits of scikit-learn, a fixed fifth for testing"


def synthetic_images(num_features: int, num_classes: int, shape: tuple[int, ...]) -> Callable[[Path | None], TrainAndTest]:
    """A loader of images that are noisy copies of one prototype per class."""

    def load(_: Path | None) -> TrainAndTest:
        rng = generator(0, "stand-in", num_features, num_classes)
        prototypes = (rng.random((num_classes, num_features)) < 0.15).astype(np.float32)
        y = rng.integers(0, num_classes, 6000)
        x = np.clip(prototypes[y] * rng.random((6000, num_features)) + 0.3 * rng.random((6000, num_features)) ** 3, 0, 1).astype(np.float32)
        x = x.reshape(6000, *shape)
        return (x[:5000], y[:5000]), (x[5000:], y[5000:]), SYNTHETIC_SOURCE

    return load


def synthetic_topics(_: Path | None) -> TrainAndTest:
    """Sparse examples with as many features as RCV1; each topic has its own frequent words."""
    rng = generator(0, "stand-in topics")
    num_examples, words_per_example = 1500, 60
    words = rng.zipf(1.3, (reuters.NUM_LABELS, 400)) * 97 % reuters.NUM_FEATURES

    def draw_words(topics: np.ndarray) -> np.ndarray:
        candidates = words[rng.choice(topics, words_per_example), rng.integers(0, 400, words_per_example)]
        return rng.choice(candidates, words_per_example)

    y = (rng.random((num_examples, reuters.NUM_LABELS)) < 0.09).astype(np.float32)
    y[np.arange(num_examples), rng.integers(0, reuters.NUM_LABELS, num_examples)] = 1
    columns = np.stack([draw_words(np.flatnonzero(row)) for row in y])
    values = np.full(num_examples * words_per_example, words_per_example**-0.5, np.float32)
    ends = np.arange(num_examples + 1) * words_per_example
    x = csr_matrix((values, columns.reshape(-1), ends), (num_examples, reuters.NUM_FEATURES))
    x.sum_duplicates()
    return (x[:1200], y[:1200]), (x[1200:], y[1200:]), SYNTHETIC_SOURCE


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
