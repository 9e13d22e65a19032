"""RCV1: 47,236 tf-idf features, the 34 most frequent of its topics (L369). Rows stay sparse from the file to the step."""

import bz2
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from fedsieve.data.downloads import DataError, DataFile, find_file

NUM_FEATURES, NUM_TOPICS, NUM_LABELS = 47_236, 103, 34
NUM_SKLEARN_TRAIN_EXAMPLES = 23_149
"""Rows of scikit-learn's copy that are its training part."""

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


def read_rcv1(folder: Path | None) -> tuple[tuple[csr_matrix, np.ndarray], tuple[csr_matrix, np.ndarray], str | None]:
    """Training and test rows with a 0/1 column for each of the 34 most frequent topics (of the training rows)."""
    note = None
    for pair in TRAIN_TEST_FILES:
        try:
            files = [find_file(folder, known) for known in pair]
        except DataError as problem:
            missing = problem
            continue
        train, test = (read_topics(path) for path in files)
        if pair is TRAIN_TEST_FILES[1]:
            note = "a sample of RCV1: the distinct documents of LIBSVM's five topic subsets"
        break
    else:
        cached = read_sklearn_cache(folder)
        if cached is None:
            raise missing
        train, test = cached
    frequent = np.sort(np.argsort(-train[1].sum(0), kind="stable")[:NUM_LABELS])
    return (train[0], train[1][:, frequent]), (test[0], test[1][:, frequent]), note


def read_topics(path: Path) -> tuple[csr_matrix, np.ndarray]:
    """LIBSVM's multi-label format: `label,label id:value ...`, labels from 0, ids from 1."""
    from sklearn.datasets import load_svmlight_file

    try:
        with bz2.open(path) if path.suffix == ".bz2" else path.open("rb") as file:
            x, topics = load_svmlight_file(file, n_features=NUM_FEATURES, multilabel=True, zero_based=False, dtype=np.float32)
    except (OSError, EOFError, ValueError) as problem:
        raise DataError(f"{path} cannot be read as svmlight rows of {NUM_FEATURES} features: {problem}") from None
    y = np.zeros((x.shape[0], NUM_TOPICS), dtype=np.float32)
    for row, labels in enumerate(topics):
        for label in labels:
            if not 0 <= label < NUM_TOPICS:
                raise DataError(f"{path} has a topic {label:g} in row {row + 1}; topics are 0 to {NUM_TOPICS - 1}")
            y[row, int(label)] = 1
    return csr_matrix(x), y


def read_sklearn_cache(folder: Path | None) -> tuple[tuple[csr_matrix, np.ndarray], tuple[csr_matrix, np.ndarray]] | None:
    """scikit-learn's own cache of the whole collection, if it is there."""
    from sklearn.datasets import fetch_rcv1

    try:
        whole = fetch_rcv1(data_home=folder, download_if_missing=False)
    except OSError:
        return None
    x, y = csr_matrix(whole.data, dtype=np.float32), np.asarray(whole.target.todense(), dtype=np.float32)
    return (x[:NUM_SKLEARN_TRAIN_EXAMPLES], y[:NUM_SKLEARN_TRAIN_EXAMPLES]), (
        x[NUM_SKLEARN_TRAIN_EXAMPLES:],
        y[NUM_SKLEARN_TRAIN_EXAMPLES:],
    )
