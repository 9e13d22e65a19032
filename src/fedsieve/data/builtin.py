"""Tasks on real files: digits (shipped with scikit-learn), MNIST, EMNIST, RCV1; and stand-ins where there are no files."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.core.random import stream
from fedsieve.data import mnist
from fedsieve.data import rcv1 as reuters
from fedsieve.data.federated_dataset import Drawn, Matrix, Spread, spread_rows

Pair = tuple[Matrix, np.ndarray]
Loaded = tuple[Pair, Pair, str | None]


class Source(StrEnum):
    """Where rows come from."""

    FILES = "files"
    STAND_IN = "stand-in"
    """generated rows of the same shape, for trying things out; results say so"""


@dataclass(frozen=True, kw_only=True)
class Files:
    """A task that reads known files."""

    path: Path | None = None
    """folder with the data files (default: FEDSIEVE_DATA, else a cache folder in your home)"""
    source: Source = Source.FILES
    """the files, or generated stand-ins of the same shape"""
    rows: int | None = None
    """use only this many training rows"""

    def __post_init__(self) -> None:
        """Refuse what no file could satisfy."""
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"data.rows must be at least 1; got {self.rows}")
        if self.path is not None and not Path(self.path).is_dir():
            raise ValueError(f"data.path {self.path} is not a folder")


def draw(task: str, data: Files, spread: Spread, seed: int, server_rows: int = 0) -> Drawn:
    """The task's rows on their clients. The files are what they are: the seed decides only who holds which row."""
    loader = STAND_INS[task] if data.source is Source.STAND_IN else LOADERS[task]
    (x, y), (test_x, test_y), note = loader(data.path)
    if data.rows is not None:
        chosen = np.sort(stream(seed, "subset").permutation(x.shape[0])[: data.rows])
        x, y = x[chosen], y[chosen]
    labels = y if y.ndim == 1 else None
    placed = spread_rows(x, y, labels, spread, stream(seed, "partition"), server_rows)
    return Drawn(*placed[:3], test_x, test_y, *placed[3:], note=note)


def flat(pair: tuple[np.ndarray, np.ndarray]) -> Pair:
    """Images as rows of pixels in [0, 1]."""
    return pair[0].reshape(len(pair[0]), -1).astype(np.float32) / np.float32(255), pair[1].astype(np.int64)


def channels(pair: tuple[np.ndarray, np.ndarray]) -> Pair:
    """Images with one channel, pixels in [0, 1]."""
    x, y = flat(pair)
    return x.reshape(-1, 1, 28, 28), y


@lru_cache(maxsize=1)
def load_mnist(folder: Path | None) -> Loaded:
    """Flat MNIST."""
    train, test, note = mnist.mnist(folder)
    return flat(train), flat(test), note


@lru_cache(maxsize=1)
def load_mnist_images(folder: Path | None) -> Loaded:
    """MNIST for convolutions."""
    train, test, note = mnist.mnist(folder)
    return channels(train), channels(test), note


@lru_cache(maxsize=1)
def load_emnist(folder: Path | None) -> Loaded:
    """Flat EMNIST."""
    train, test, note = mnist.emnist(folder)
    return flat(train), flat(test), note


@lru_cache(maxsize=1)
def load_rcv1(folder: Path | None) -> Loaded:
    """RCV1, sparse."""
    return reuters.rcv1(folder)


@lru_cache(maxsize=1)
def load_digits(_: Path | None) -> Loaded:
    """1,797 digits of 8 x 8 pixels, shipped with scikit-learn; a fixed fifth is the test set."""
    from sklearn.datasets import load_digits as shipped

    x, y = shipped(return_X_y=True)
    order = stream(0, "digits").permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    return (x[360:], y[360:]), (x[:360], y[:360]), None


def stand_in(features: int, classes: int, shape: tuple[int, ...]) -> Callable[[Path | None], Loaded]:
    """Images that are noisy copies of one prototype a class."""

    def load(_: Path | None) -> Loaded:
        rng = stream(0, "stand-in", features, classes)
        prototypes = (rng.random((classes, features)) < 0.15).astype(np.float32)
        y = rng.integers(0, classes, 6000)
        x = np.clip(prototypes[y] * rng.random((6000, features)) + 0.3 * rng.random((6000, features)) ** 3, 0, 1).astype(np.float32)
        x = x.reshape(6000, *shape)
        return (x[:5000], y[:5000]), (x[5000:], y[5000:]), "generated stand-in, not the real data"

    return load


def stand_in_topics(_: Path | None) -> Loaded:
    """Sparse rows whose features speak for topics, of RCV1's width."""
    rng = stream(0, "stand-in topics")
    rows, per_row = 1500, 60
    words = rng.zipf(1.3, (reuters.LABELS, 400)) * 97 % reuters.FEATURES
    y = (rng.random((rows, reuters.LABELS)) < 0.09).astype(np.float32)
    y[np.arange(rows), rng.integers(0, reuters.LABELS, rows)] = 1
    columns = np.stack([rng.choice(words[rng.choice(np.flatnonzero(row), per_row), rng.integers(0, 400, per_row)], per_row) for row in y])
    x = csr_matrix(
        (np.full(rows * per_row, per_row**-0.5, np.float32), columns.reshape(-1), np.arange(rows + 1) * per_row), (rows, reuters.FEATURES)
    )
    x.sum_duplicates()
    return (x[:1200], y[:1200]), (x[1200:], y[1200:]), "generated stand-in, not the real data"


LOADERS: dict[str, Callable[[Path | None], Loaded]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "mnist-cnn": load_mnist_images,
    "emnist": load_emnist,
    "rcv1": load_rcv1,
}
STAND_INS: dict[str, Callable[[Path | None], Loaded]] = {
    "digits": load_digits,
    "mnist": stand_in(784, 10, (784,)),
    "mnist-cnn": stand_in(784, 10, (1, 28, 28)),
    "emnist": stand_in(784, 62, (784,)),
    "rcv1": stand_in_topics,
}
