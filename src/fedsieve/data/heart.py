"""Heart disease at four hospitals (Janosi et al. 1988, UCI), prepared and split as in FLamby (Terrail et al. 2022, arXiv 2210.04620)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from fedsieve.data.downloads import DataError, DataFile, find_file

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NUM_COLUMNS = 14
NUMERIC_COLUMNS = (0, 1, 3, 4, 5, 7, 8, 9)
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""Columns that are coded as 0/1 features, and their values without the first, which has none."""
NUM_FEATURES = len(NUMERIC_COLUMNS) + sum(map(len, CATEGORIES.values()))
TARGET_COLUMN = 13
MISSING = ("?", "NaN")
TEST_FRACTION, SPLIT_SEED = 0.34, 43
"""FLamby's split: scikit-learn's stratified split of each hospital with this seed."""
SOURCE = "UCI heart disease at four hospitals, FLamby's split, without slope, ca and thal and without patients who lack another value"
POOLED_SOURCE = f"{SOURCE}, test features scaled as at all hospitals together"

_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
_UCI_HASHES = (
    "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
)
_NAN_HASHES = (
    "0ad84ed1809abe7206420c0c45d77153fb82b85bbb20a2de3d34c6be1696915c",
    "b7e2781a582917c782f906d079efd9d8994fbbfaa8bd50cce0dbdfc529502551",
    "75fa4ed7943b891bc232fd36363c83a00d52c7cd3edaffae17ec99036d7021a5",
    "9a439dc875370c855c1b9c4f8f53f07a4356534f309648948d4f5d0425b5b0c4",
)
HEART_FILES = tuple(
    DataFile(
        f"processed.{hospital}", "heart", ("", "heart", "fed_heart_disease"), sha256, f"{_URL}processed.{hospital}.data", suffix=".data"
    )
    for hospital, sha256 in zip(HOSPITALS, map(" ".join, zip(_UCI_HASHES, _NAN_HASHES, strict=True)), strict=True)
)
"""The files of UCI, whose missing values are `?`, or with `NaN` in their place."""


class Patients(NamedTuple):
    """The patients of one hospital."""

    x: Float[np.ndarray, "n f"]
    y: Float[np.ndarray, " n"]
    is_test: Bool[np.ndarray, " n"]


def read_heart(
    folder: Path | None, *, pooled_test: bool = False
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], str, np.ndarray]:
    """Training patients, test patients, their source and the hospital of each training patient.

    Each hospital standardizes its features by its own training patients, so that no statistics leave it.
    With `pooled_test` the features of test patients are standardized by the training patients of all hospitals: the pooled test set of
    FLamby, on which its table reports models that were trained on the features of single hospitals.
    """
    hospitals = [read_hospital(find_file(folder, data_file)) for data_file in HEART_FILES]
    pooled = np.concatenate([part.x[~part.is_test] for part in hospitals])
    train = [standardize(part.x[~part.is_test], part.x[~part.is_test]) for part in hospitals]
    test = [standardize(part.x[part.is_test], pooled if pooled_test else part.x[~part.is_test]) for part in hospitals]
    y = [(part.y[~part.is_test], part.y[part.is_test]) for part in hospitals]
    owner = np.repeat(np.arange(len(hospitals)), [len(part) for part in train])
    train_y, test_y = (np.concatenate(parts) for parts in zip(*y, strict=True))
    return (np.concatenate(train), train_y), (np.concatenate(test), test_y), POOLED_SOURCE if pooled_test else SOURCE, owner


def read_hospital(path: Path) -> Patients:
    """The patients of one file without missing values, and which of them are test patients."""
    from sklearn.model_selection import train_test_split

    try:
        cells = [line.split(",") for line in path.read_text().split()]
        table = np.array([[np.nan if cell in MISSING else float(cell) for cell in row] for row in cells])
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a table of numbers: {error}") from None
    if table.ndim != 2 or table.shape[1] != NUM_COLUMNS:
        raise DataError(f"{path} must have {NUM_COLUMNS} columns in every row; download it again from {_URL}")
    table = table[~np.isnan(table[:, [*NUMERIC_COLUMNS, *CATEGORIES, TARGET_COLUMN]]).any(1)]
    dummies = [table[:, column] == value for column, values in CATEGORIES.items() for value in values]
    x = np.column_stack([table[:, NUMERIC_COLUMNS], *dummies])
    y = (table[:, TARGET_COLUMN] > 0).astype(np.float32)
    counts = np.bincount(y.astype(np.int64), minlength=2)
    _, test = train_test_split(
        np.arange(len(y)),
        test_size=TEST_FRACTION,
        train_size=1 - TEST_FRACTION,
        random_state=SPLIT_SEED,
        stratify=y if counts.min() > 2 else None,
    )
    return Patients(x, y, np.isin(np.arange(len(y)), test))


def standardize(x: Float[np.ndarray, "n f"], reference: Float[np.ndarray, "m f"]) -> Float[np.ndarray, "n f"]:
    """The features minus the mean of `reference`, over its standard deviation; a feature that is constant there becomes 0."""
    scale = reference.std(0, ddof=1)
    return np.where(scale > 0, (x - reference.mean(0)) / np.where(scale > 0, scale, 1), 0).astype(np.float32)
