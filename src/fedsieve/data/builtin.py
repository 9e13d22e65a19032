"""The built-in data sets, from digits (part of scikit-learn) to CIFAR-10, and synthetic replacements of the same shape."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.core.random import generator
from fedsieve.data import cifar10, heart, mnist, published
from fedsieve.data import rcv1 as reuters
from fedsieve.data.federated_dataset import FederatedDataset, Matrix, PartitionSpec, partition_dataset
from fedsieve.data.partition import partition_by_owner

Examples = tuple[Matrix, np.ndarray]
SYNTHETIC_SOURCE = "synthetic examples, not the real data"
NUM_WRITERS = 539
"""Writers of MNIST's training digits."""
CIFAR10_MEAN, CIFAR10_STD = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
"""Mean and standard deviation of each channel over the training images, for pixels in [0, 1]."""
FED_HT_FEATURES = 1000
"""Features of the simulations of Fed-HT."""
POOLED_HEART = "heart, pooled scaling"
"""The data of the task `heart` with FLamby's pooled test set."""


class TrainAndTest(NamedTuple):
    """Training examples and test examples."""

    train: Examples
    test: Examples
    source: str
    owners: np.ndarray | None = None
    """the natural client of each training example, if the data name it"""


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


class FeatureScaling(StrEnum):
    """Which training patients give mean and scale of a test patient's features."""

    HOSPITAL = "hospital"
    """those of its own hospital"""
    POOLED = "pooled"
    """those of all hospitals, as on the pooled test set of FLamby"""


@dataclass(frozen=True, kw_only=True)
class HeartFiles(BuiltinFiles):
    """Options of the task `heart`."""

    test_scaling: FeatureScaling = FeatureScaling.HOSPITAL
    """training patients that standardize the features of test patients: of the same hospital, or of all (FLamby's pooled test set)"""


def load_heart_dataset(data: HeartFiles, spec: PartitionSpec, seed: int, num_server_examples: int = 0) -> FederatedDataset:
    """Load the patients of four hospitals."""
    name = POOLED_HEART if data.test_scaling is FeatureScaling.POOLED else "heart"
    return load_builtin_dataset(name, data, spec, seed, num_server_examples)


def load_builtin_dataset(task: str, data: BuiltinFiles, spec: PartitionSpec, seed: int, num_server_examples: int = 0) -> FederatedDataset:
    """Load a data set and distribute it over clients. The seed decides only which client holds which example."""
    loader = SYNTHETIC_LOADERS[task] if data.source is Source.SYNTHETIC else LOADERS[task]
    (x, y), (test_x, test_y), source, owners = loader(data.path)
    if data.num_examples is not None:
        num_rows: int = x.shape[0]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
        subset = np.sort(generator(seed, "subset").permutation(num_rows)[: data.num_examples])
        x, y, source = x[subset], y[subset], f"{source}, a random subset of the training examples"
        owners = None if owners is None else owners[subset]
    labels = y if y.ndim == 1 else None
    rng = generator(seed, "partition")
    x, y, counts, server_x, server_y = partition_dataset(x, y, labels, spec, rng, num_server_examples, owners)
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
    return TrainAndTest(flatten_images(train), flatten_images(test), source)


@lru_cache(maxsize=1)
def load_mnist_writers(folder: Path | None) -> TrainAndTest:
    """MNIST as vectors, with the writer of each training digit."""
    train, test, _ = mnist.read_mnist(folder)
    owners, source = mnist.read_writers(folder, train[1], test[1])
    return TrainAndTest(flatten_images(train), flatten_images(test), source, owners)


@lru_cache(maxsize=1)
def load_mnist_images(folder: Path | None) -> TrainAndTest:
    """MNIST as images, for convolutional networks."""
    train, test, source = mnist.read_mnist(folder)
    return TrainAndTest(add_channel(train), add_channel(test), source)


@lru_cache(maxsize=1)
def load_emnist(folder: Path | None) -> TrainAndTest:
    """EMNIST as vectors."""
    train, test, source = mnist.read_emnist(folder)
    return TrainAndTest(flatten_images(train), flatten_images(test), source)


@lru_cache(maxsize=1)
def load_rcv1(folder: Path | None) -> TrainAndTest:
    """RCV1 as sparse matrices."""
    return TrainAndTest(*reuters.read_rcv1(folder))


@lru_cache(maxsize=1)
def load_heart(folder: Path | None) -> TrainAndTest:
    """Patients of four hospitals; test patients are scaled like the training patients of their hospital."""
    return TrainAndTest(*heart.read_heart(folder))


@lru_cache(maxsize=1)
def load_heart_pooled(folder: Path | None) -> TrainAndTest:
    """Patients of four hospitals; test patients are scaled like the training patients of all hospitals."""
    return TrainAndTest(*heart.read_heart(folder, pooled_test=True))


def standardize_images(pair: tuple[np.ndarray, np.ndarray]) -> Examples:
    """Images of shape (3, 32, 32), each channel with mean 0 and standard deviation 1 over the training images, and their labels."""
    x = pair[0].astype(np.float32)
    x -= np.reshape(255 * np.array(CIFAR10_MEAN, np.float32), (1, 3, 1, 1))
    x /= np.reshape(255 * np.array(CIFAR10_STD, np.float32), (1, 3, 1, 1))
    return x, pair[1].astype(np.int64)


@lru_cache(maxsize=1)
def load_cifar10_images(folder: Path | None) -> TrainAndTest:
    """CIFAR-10 as images, for convolutional networks."""
    train, test, source = cifar10.read_cifar10(folder)
    return TrainAndTest(standardize_images(train), standardize_images(test), source)


@lru_cache(maxsize=1)
def load_cifar10(folder: Path | None) -> TrainAndTest:
    """CIFAR-10 as vectors."""
    (x, y), (test_x, test_y), source, _ = load_cifar10_images(folder)
    return TrainAndTest((x.reshape(len(y), -1), y), (test_x.reshape(len(test_y), -1), test_y), source)


def simulated_fed_ht(num_samples: int, spread: float, *, logistic: bool) -> Callable[[Path | None], TrainAndTest]:
    """A loader of Simulation I or II of Fed-HT."""

    @lru_cache(maxsize=1)
    def load(_: Path | None) -> TrainAndTest:
        train, test, owners = published.simulate_fed_ht(num_samples, FED_HT_FEATURES, spread, logistic=logistic)
        return TrainAndTest(train, test, f"Simulation {'II' if logistic else 'I'} of Fed-HT as in Flower's pull request 7076", owners)

    return load


@lru_cache(maxsize=1)
def load_fed_ht_mnist(folder: Path | None) -> TrainAndTest:
    """MNIST on 100 clients with two classes each, as in Flower's pull request 7076; a tenth of each client's digits is not used."""
    (x, y), test, _, _ = load_mnist(folder)
    rng = generator(0, "two classes")
    owners = published.assign_two_classes(y, published.NUM_MNIST_CLIENTS, rng)
    used = np.concatenate([part[published.held_out(len(part)) :] for part in partition_by_owner(owners, rng)])
    source = "MNIST, nine tenths of its training file on clients with two classes each, and its test file"
    return TrainAndTest((x[used], y[used]), test, source, owners[used])


@lru_cache(maxsize=1)
def load_heterofl_mnist(folder: Path | None) -> TrainAndTest:
    """MNIST as images on 100 clients with two classes each, as in HeteroFL."""
    (x, y), test, source, _ = load_mnist_images(folder)
    return TrainAndTest((x, y), test, source, published.assign_two_classes(y, published.NUM_MNIST_CLIENTS, generator(0, "two classes")))


@lru_cache(maxsize=1)
def load_fedml_mnist(folder: Path | None) -> TrainAndTest:
    """MNIST on 1000 clients with two digits each, as in FedProx and FedML."""
    (x, y), (test_x, test_y), _, _ = load_mnist(folder)
    train, test, owners = published.split_power_law(np.concatenate((np.asarray(x), np.asarray(test_x))), np.concatenate((y, test_y)))
    return TrainAndTest(train, test, "MNIST, both files on FedProx's clients, a tenth of each for testing", owners)


@lru_cache(maxsize=1)
def load_digits(_: Path | None) -> TrainAndTest:
    """The 1,797 digits of 8 x 8 pixels of scikit-learn; a fixed fifth is the test set."""
    from sklearn.datasets import load_digits as sklearn_digits

    x, y = sklearn_digits(return_X_y=True)
    order = generator(0, "digits").permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int64)
    return TrainAndTest((x[360:], y[360:]), (x[:360], y[:360]), "the digits of scikit-learn, a fixed fifth for testing")


def synthetic_images(
    num_features: int, num_classes: int, shape: tuple[int, ...], *, num_examples: int = 6000, num_owners: int | None = None
) -> Callable[[Path | None], TrainAndTest]:
    """A loader of images that are noisy copies of one prototype per class; natural clients hold them in turn, if there are any."""

    def load(_: Path | None) -> TrainAndTest:
        rng = generator(0, "stand-in", num_features, num_classes)
        prototypes = (rng.random((num_classes, num_features)) < 0.15).astype(np.float32)
        y = rng.integers(0, num_classes, num_examples)
        brightness, noise = rng.random((2, num_examples, num_features))
        x = np.clip(prototypes[y] * brightness + 0.3 * noise**3, 0, 1).astype(np.float32)
        x, cut = x.reshape(num_examples, *shape), num_examples * 5 // 6
        owners = None if num_owners is None else np.arange(cut) % num_owners
        return TrainAndTest((x[:cut], y[:cut]), (x[cut:], y[cut:]), SYNTHETIC_SOURCE, owners)

    return load


def synthetic_patients(_: Path | None) -> TrainAndTest:
    """Patients of four hospitals of different size whose disease depends on a few features."""
    rng = generator(0, "stand-in patients")
    x = rng.standard_normal((740, heart.NUM_FEATURES)).astype(np.float32)
    y = (x[:, ::3].sum(1) + rng.standard_normal(740) > 0).astype(np.float32)
    owners = np.repeat(np.arange(len(heart.HOSPITALS)), (199, 172, 30, 85))
    return TrainAndTest((x[:486], y[:486]), (x[486:], y[486:]), SYNTHETIC_SOURCE, owners)


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
    return TrainAndTest((x[:1200], y[:1200]), (x[1200:], y[1200:]), SYNTHETIC_SOURCE)


LOADERS: dict[str, Callable[[Path | None], TrainAndTest]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "mnist-cnn": load_mnist_images,
    "mnist-writers": load_mnist_writers,
    "emnist": load_emnist,
    "rcv1": load_rcv1,
    "heart": load_heart,
    POOLED_HEART: load_heart_pooled,
    "cifar10": load_cifar10,
    "cifar10-cnn": load_cifar10_images,
    "fed-ht-linear": simulated_fed_ht(100, 0.1, logistic=False),
    "fed-ht-logistic": simulated_fed_ht(1000, 1.0, logistic=True),
    "fed-ht-mnist": load_fed_ht_mnist,
    "fedml-mnist": load_fedml_mnist,
    "heterofl-mnist": load_heterofl_mnist,
}
SYNTHETIC_LOADERS: dict[str, Callable[[Path | None], TrainAndTest]] = {
    "digits": load_digits,
    "mnist": synthetic_images(784, 10, (784,)),
    "mnist-cnn": synthetic_images(784, 10, (1, 28, 28)),
    "mnist-writers": synthetic_images(784, 10, (784,), num_owners=NUM_WRITERS),
    "emnist": synthetic_images(784, 62, (784,)),
    "rcv1": synthetic_topics,
    "heart": synthetic_patients,
    POOLED_HEART: synthetic_patients,
    "cifar10": synthetic_images(3072, 10, (3072,), num_examples=1200),
    "cifar10-cnn": synthetic_images(3072, 10, cifar10.IMAGE_SHAPE, num_examples=1200),
    "fed-ht-linear": simulated_fed_ht(20, 0.1, logistic=False),
    "fed-ht-logistic": simulated_fed_ht(20, 1.0, logistic=True),
    "fed-ht-mnist": synthetic_images(784, 10, (784,), num_owners=published.NUM_MNIST_CLIENTS),
    "fedml-mnist": synthetic_images(784, 10, (784,), num_owners=published.NUM_POWER_LAW_CLIENTS),
    "heterofl-mnist": synthetic_images(784, 10, (1, 28, 28), num_owners=published.NUM_MNIST_CLIENTS),
}
