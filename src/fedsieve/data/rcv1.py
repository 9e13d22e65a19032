"""RCV1: 47,236 tf-idf features and the 34 most frequent topics (L369), as sparse matrices."""

import bz2
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data.downloads import DataError, DataFile, find_file

NUM_FEATURES, NUM_TOPICS, NUM_LABELS = 47_236, 103, 34
NUM_SKLEARN_TRAIN_EXAMPLES = 23_149
"""The first examples of scikit-learn's copy are the training set."""
SOURCE = "RCV1, its training and test documents"
SAMPLE_SOURCE = "a sample of RCV1, the distinct documents of LIBSVM's five topic subsets"
Examples = tuple[csr_matrix, np.ndarray]

_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multilabel/"
_FOLDERS = ("", "rcv1")
TRAIN_TEST_FILES = tuple(
    tuple(DataFile(name, "rcv1", _FOLDERS, sha256, _URL + name + ".bz2", suffix=".bz2") for name, sha256 in pair)
    for pair in (
        (("rcv1_topics_train.svm", ""), ("rcv1_topics_combined_test.svm", "")),
        (
            ("rcv1_subsets_train.svm", "d06c2f3e35e5335544743500c6174e48705b8609b057eb8ec9b3095313686686"),
            ("rcv1_subsets_test.svm", "90ebb6a92615b15fdefb3541f9022d7d13576dc04488db7fae88c9985e6cc869"),
        ),
    )
)


def read_rcv1(folder: Path | None) -> tuple[Examples, Examples, str]:
    """Training and test examples with a 0/1 target for each of the 34 topics that are most frequent in the training set."""
    (train_x, train_y), (test_x, test_y), source = read_all_topics(folder)
    frequent = np.sort(np.argsort(-train_y.sum(0), kind="stable")[:NUM_LABELS])
    return (train_x, train_y[:, frequent]), (test_x, test_y[:, frequent]), source


def read_all_topics(folder: Path | None) -> tuple[Examples, Examples, str]:
    """Examples with all topics: of the whole collection, of its subsets, or of scikit-learn's cache, the first that is present."""
    whole, subsets = TRAIN_TEST_FILES
    try:
        train, test, source = *(find_file(folder, data_file) for data_file in whole), SOURCE
    except DataError:
        try:
            train, test, source = *(find_file(folder, data_file) for data_file in subsets), SAMPLE_SOURCE
        except DataError:
            cached = read_sklearn_cache(folder)
            if cached is None:
                raise
            return *cached, SOURCE
    return read_topics(train), read_topics(test), source


def read_topics(path: Path) -> Examples:
    """Features and 0/1 topics of a file in LIBSVM's multi-label format: `label,label id:value ...`, labels from 0, ids from 1."""
    from sklearn.datasets import load_svmlight_file

    options: dict[str, Any] = {"zero_based": False, "dtype": np.float32}  # scikit-learn has no stubs
    try:
        with bz2.open(path) if path.suffix == ".bz2" else path.open("rb") as file:
            x, topics = load_svmlight_file(file, n_features=NUM_FEATURES, multilabel=True, **options)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a svmlight file of {NUM_FEATURES} features: {error}") from None
    y = np.zeros((x.shape[0], NUM_TOPICS), dtype=np.float32)
    for row, labels in enumerate(topics):
        for label in labels:
            if not 0 <= label < NUM_TOPICS:
                raise DataError(f"{path} has a topic {label:g} in row {row + 1}; topics are 0 to {NUM_TOPICS - 1}")
            y[row, int(label)] = 1
    return csr_matrix(x), y


def download(folder: Path) -> None:
    """Download the whole collection with scikit-learn, which verifies the checksums of its files; those of LIBSVM's are not known."""
    from sklearn.datasets import fetch_rcv1

    try:
        fetch_rcv1(data_home=folder)
    except OSError as error:
        raise DataError(
            f"RCV1 cannot be downloaded with scikit-learn: {error}; call sklearn.datasets.fetch_rcv1(data_home=...) on another machine and "
            f"copy its folder into {folder}"
        ) from None


def has_sklearn_cache(folder: Path) -> bool:
    """Whether scikit-learn's cache in the folder has the collection."""
    return any(folder.glob("RCV1/samples*.pkl"))


def read_sklearn_cache(folder: Path | None) -> tuple[Examples, Examples] | None:
    """The whole collection from scikit-learn's cache, or None if it is not there."""
    from sklearn.datasets import fetch_rcv1

    try:
        whole: Any = fetch_rcv1(data_home=folder, download_if_missing=False)
    except OSError:
        return None
    x, y = csr_matrix(whole.data, dtype=np.float32), np.asarray(whole.target.todense(), dtype=np.float32)
    cut = NUM_SKLEARN_TRAIN_EXAMPLES
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])
