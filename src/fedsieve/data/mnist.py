"""MNIST and EMNIST from their original IDX files, and the writers of MNIST's digits from the files of QMNIST."""

import gzip
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from fedsieve.data.downloads import DataError, DataFile, find_file

IMAGES_MAGIC, LABELS_MAGIC, TABLE_MAGIC = 2051, 2049, 3074
TABLE_COLUMNS, CLASS_COLUMN, WRITER_COLUMN = 8, 0, 2
"""Columns of QMNIST's tables of integers, one row per digit in the order of MNIST."""
MAX_IDX_BYTES = 1 << 30
"""More than the largest file, the 697,932 training images of EMNIST."""
MAX_EMNIST_TRAIN_EXAMPLES = 100_000
"""If only the test files of EMNIST are present, their first examples are used for training (the order in the file is random)."""


def read_gzipped(path: Path) -> bytes:
    """The bytes of a file, gzipped or not."""
    try:
        with path.open("rb") as file:
            is_zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_zipped else path.open("rb") as file:
            data = file.read(MAX_IDX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if len(data) > MAX_IDX_BYTES:
        raise DataError(f"{path} unpacks to more than {MAX_IDX_BYTES} bytes, which no file of this data set does; download it again")
    return data


def read_idx(path: Path) -> UInt8[np.ndarray, "n"] | UInt8[np.ndarray, "n 28 28"]:
    """The array in an IDX file of bytes, gzipped or not; raises DataError if its length is not the one in the header."""
    data = read_gzipped(path)
    header = np.frombuffer(data[:16], ">i4") if len(data) >= 16 else np.zeros(4, ">i4")
    if len(data) >= 8 and int.from_bytes(data[:4], "big") == LABELS_MAGIC:
        count, begin, shape = int.from_bytes(data[4:8], "big"), 8, ()
    elif header[0] == IMAGES_MAGIC and tuple(header[2:4]) == (28, 28):
        count, begin, shape = int(header[1]), 16, (28, 28)
    else:
        raise DataError(f"{path} is not an IDX file of labels or of 28 x 28 images: its first bytes are {data[:4].hex() or 'missing'}")
    expected = begin + count * int(np.prod(shape, dtype=int))
    if len(data) != expected:
        raise DataError(
            f"{path} should have {count} items in {expected} bytes, but has {len(data)}: it is truncated or damaged; download it again"
        )
    return np.frombuffer(data, np.uint8, offset=begin).reshape(count, *shape)


def read_pair(images: Path, labels: Path, num_classes: int) -> tuple[UInt8[np.ndarray, "n 28 28"], UInt8[np.ndarray, " n"]]:
    """Images and their labels from two files."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1:
        raise DataError(f"{images} must hold images and {labels} labels; they hold {x.ndim}- and {y.ndim}-dimensional items")
    if len(x) != len(y):
        raise DataError(f"{images} has {len(x)} images, {labels} has {len(y)} labels")
    if len(y) and y.max() >= num_classes:
        raise DataError(f"{labels} has a label {y.max()}; this task has classes 0 to {num_classes - 1}")
    return x, y


def read_mnist(folder: Path | None) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], str]:
    """The 60,000 training and 10,000 test digits, and their source."""
    files = [find_file(folder, data_file) for data_file in MNIST_FILES]
    return read_pair(files[0], files[1], 10), read_pair(files[2], files[3], 10), "MNIST, its training and test files"


def read_table(path: Path) -> Int[np.ndarray, "n 8"]:
    """The rows of a table of QMNIST, an IDX file of integers."""
    data = read_gzipped(path)
    header = np.frombuffer(data[:12], ">i4") if len(data) >= 12 else np.zeros(3, ">i4")
    if header[0] != TABLE_MAGIC or header[2] != TABLE_COLUMNS:
        raise DataError(f"{path} is not an IDX table of {TABLE_COLUMNS} integers a row: its first bytes are {data[:4].hex() or 'missing'}")
    if len(data) != 12 + 4 * TABLE_COLUMNS * int(header[1]):
        raise DataError(f"{path} should have {header[1]} rows, but has {len(data)} bytes: it is truncated or damaged; download it again")
    return np.frombuffer(data, ">i4", offset=12).reshape(-1, TABLE_COLUMNS).astype(np.int64)


def read_writers(folder: Path | None, labels: np.ndarray, test_labels: np.ndarray) -> tuple[Int[np.ndarray, " n"], str]:
    """The writer of each training digit of MNIST, and the source; no writer of a test digit may be among them."""
    writers = []
    for data_file, known in zip(QMNIST_FILES, (labels, test_labels), strict=True):
        path = find_file(folder, data_file)
        table = read_table(path)[: len(known)]
        if not np.array_equal(table[:, CLASS_COLUMN], known):
            raise DataError(f"{path} and MNIST have other labels: they are not in the same order; fetch both again")
        writers.append(table[:, WRITER_COLUMN])
    if shared := len(np.intersect1d(*writers)):
        raise DataError(f"{shared} writers have training and test digits, so that the test would not be on new writers; fetch QMNIST again")
    counts = [len(np.unique(part)) for part in writers]
    return writers[0], f"MNIST, its training digits by their {counts[0]} writers (QMNIST) and its test digits by {counts[1]} others"


def read_emnist(folder: Path | None) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], str]:
    """Characters of 62 classes, and their source. If only the test files are present they are split in two."""
    test = read_pair(find_file(folder, EMNIST_FILES[2]), find_file(folder, EMNIST_FILES[3]), 62)
    test = (np.ascontiguousarray(test[0].transpose(0, 2, 1)), test[1])  # the files store images transposed
    try:
        images, labels = find_file(folder, EMNIST_FILES[0]), find_file(folder, EMNIST_FILES[1])
    except DataError:
        cut = min(MAX_EMNIST_TRAIN_EXAMPLES, len(test[1]) * 6 // 7)
        source = "EMNIST by class, only the official test file, its first examples for training"
        return (test[0][:cut], test[1][:cut]), (test[0][cut:], test[1][cut:]), source
    x, y = read_pair(images, labels, 62)
    return (np.ascontiguousarray(x.transpose(0, 2, 1)), y), test, "EMNIST by class, its training and test files"


_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_QMNIST_URL = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_EMNIST_URL = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
MNIST_FILES = tuple(
    DataFile(name, "mnist", ("", "mnist", "MNIST/raw", "raw"), sha256, _MNIST_URL + name + ".gz")
    for name, sha256 in (
        ("train-images-idx3-ubyte", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    )
)
QMNIST_FILES = tuple(
    DataFile(name, "mnist-writers", ("", "mnist-writers", "qmnist", "QMNIST/raw", "raw"), sha256, _QMNIST_URL + name + ".gz")
    for name, sha256 in (
        ("qmnist-train-labels-idx2-int", "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f"),
        ("qmnist-test-labels-idx2-int", "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06"),
    )
)
EMNIST_FILES = tuple(
    DataFile(name, "emnist", ("", "emnist", "EMNIST/raw", "raw", "gzip"), sha256, _EMNIST_URL, f"gzip/{name}.gz")
    for name, sha256 in (
        ("emnist-byclass-train-images-idx3-ubyte", "9e21987f03a6eb8b870187e785883ddad96947299587908f1a7ec2ca0f4be5f0"),
        ("emnist-byclass-train-labels-idx1-ubyte", "f7ef403d48dc18a89dae0d83d11ee69cecb6e1c12c3a961d03712e495c02a8fa"),
        ("emnist-byclass-test-images-idx3-ubyte", "5ec835bd5d5b1a66378a132e727fef20fe994b3cc666899befcca5ac766f50cd"),
        ("emnist-byclass-test-labels-idx1-ubyte", "501e305eeeacb093b162592d80e8a2632040872360fa6d85cfcb2200d91ca92a"),
    )
)
