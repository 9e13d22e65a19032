"""Common units for columns that clients hold apart: two exchanges of means, and nobody shows a row."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_matrix, issparse
from torch import Tensor

from fedsieve.data.federated_dataset import Matrix


class Scale(NamedTuple):
    """What columns are measured by: (x - mean) / scale."""

    mean: Float[np.ndarray, " f"]
    scale: Float[np.ndarray, " f"]
    num_floats_each_way: int = 0
    """what agreeing on them cost every client, in float32 numbers, up and down alike"""

    def apply(self, x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Columns, or one column by itself, in these units."""
        return (x - self.mean) / self.scale


def identity_scale(num_columns: int) -> Scale:
    """Columns as they are."""
    return Scale(np.zeros(num_columns), np.ones(num_columns))


def federated_standardization(x: Float[np.ndarray, "n f"], counts: np.ndarray, *, center: bool) -> Scale:
    """Mean and standard deviation over all clients; without centring the root mean square.

    Every client sends the means of its columns; the server averages them by rows and sends that back; every client sends its root mean
    square distance from it. (Squares about zero, in one exchange, would lose the digits of a column far from zero.) A column that never
    changes keeps its unit.
    """
    sent = client_means(x, counts).astype(np.float32)
    mean = weighted_mean(sent, counts) if center else np.zeros(x.shape[1])
    distance = np.sqrt(client_means((x - mean) ** 2, counts)).astype(np.float32)
    scale = np.sqrt(weighted_mean(distance.astype(np.float64) ** 2, counts))
    return Scale(mean, np.where(scale <= 1e-6 * np.abs(mean), 1.0, scale), x.shape[1] * (2 if center else 1))


def client_means(x: Float[np.ndarray, "n f"], counts: np.ndarray) -> Float[np.ndarray, "k f"]:
    """The mean of each column at each client that holds rows; rows stand client after client."""
    held = counts[counts > 0]
    starts = np.concatenate(([0], np.cumsum(held)[:-1]))
    return np.add.reduceat(x, starts, axis=0, dtype=np.float64) / held[:, None]


def weighted_mean(means: Float[np.ndarray, "k f"], counts: np.ndarray) -> Float[np.ndarray, " f"]:
    """The mean over all rows, from the clients' means."""
    return np.average(means, axis=0, weights=counts[counts > 0])


class Standardizer(NamedTuple):
    """What a linear model is trained in, and the way back: a weight that is zero stays zero."""

    features: Scale
    target: Scale

    @property
    def bytes_each_way(self) -> int:
        """What agreeing on them costs a client, up and down alike."""
        return 4 * (self.features.num_floats_each_way + self.target.num_floats_each_way)

    def apply(self, x: Matrix, y: np.ndarray) -> tuple[Matrix, np.ndarray]:
        """Rows and targets in these units, in single precision; classes stay what they are."""
        rows = csr_matrix(x, dtype=np.float32) if issparse(x) else self.features.apply(x).astype(np.float32)
        return rows, y if y.dtype.kind == "i" else self.target.apply(y).astype(np.float32)

    def to_original(self, matrix: Tensor, intercept: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients (outputs, features) and intercepts (outputs,) for rows as the user has them."""
        coef = matrix.double().numpy() * self.target.scale / self.features.scale
        moved = np.zeros(len(coef)) if intercept is None else intercept.double().numpy() * self.target.scale + self.target.mean
        return coef, moved - coef @ self.features.mean

    def to_standardized(self, coef: np.ndarray, intercept: np.ndarray | None) -> Tensor:
        """The same as a parameter vector of the model under training; without an intercept nothing was moved."""
        matrix = coef * self.features.scale / self.target.scale
        free = [] if intercept is None else (intercept + coef @ self.features.mean - self.target.mean) / self.target.scale
        return torch.from_numpy(np.concatenate((matrix.reshape(-1), free)).astype(np.float32))


def fit_standardizer(
    x: Matrix, y: np.ndarray, counts: np.ndarray, *, scale_features: bool, scale_target: bool, center: bool
) -> Standardizer:
    """Units all clients share, of dense features and of numbers to predict; without an intercept nothing may be moved, only scaled."""
    return Standardizer(
        federated_standardization(x, counts, center=center) if scale_features and not issparse(x) else identity_scale(x.shape[1]),
        federated_standardization(y[:, None], counts, center=center) if scale_target else identity_scale(1),
    )
