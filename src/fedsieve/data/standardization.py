"""Federated standardization: clients send means of their columns, never examples."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_matrix
from torch import Tensor

from fedsieve.data.federated_dataset import Matrix


class Scale(NamedTuple):
    """The transformation (x - mean) / scale of each column."""

    mean: Float[np.ndarray, " f"]
    scale: Float[np.ndarray, " f"]
    num_floats_each_way: int = 0
    """float32 numbers that each client sent and received to compute it"""

    def apply(self, x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """The standardized columns."""
        return (x - self.mean) / self.scale


def identity_scale(num_columns: int) -> Scale:
    """The scale that changes nothing."""
    return Scale(np.zeros(num_columns), np.ones(num_columns))


def federated_standardization(x: Float[np.ndarray, "n f"], counts: np.ndarray, *, center: bool) -> Scale:
    """Mean and standard deviation of each column over all clients; mean 0 and the root mean square if `center` is false.

    Each client sends the means of its columns. The server sends back their mean, weighted by examples. Each client then sends its root mean
    square deviation from it. (One exchange of mean squares would lose precision for a column far from zero.) A constant column has scale 1.
    """
    means = client_means(x, counts).astype(np.float32)
    mean = weighted_mean(means, counts) if center else np.zeros(x.shape[1])
    deviation = np.sqrt(client_means((x - mean) ** 2, counts)).astype(np.float32)
    scale = np.sqrt(weighted_mean(deviation.astype(np.float64) ** 2, counts))
    return Scale(mean, np.where(scale <= 1e-6 * np.abs(mean), 1.0, scale), x.shape[1] * (2 if center else 1))


def client_means(x: Float[np.ndarray, "n f"], counts: np.ndarray) -> Float[np.ndarray, "k f"]:
    """The mean of each column on each client that has examples; `x` is ordered by client."""
    nonempty = counts[counts > 0]
    starts = np.concatenate(([0], np.cumsum(nonempty)[:-1]))
    return np.add.reduceat(x, starts, axis=0, dtype=np.float64) / nonempty[:, None]


def weighted_mean(means: Float[np.ndarray, "k f"], counts: np.ndarray) -> Float[np.ndarray, " f"]:
    """The mean over all examples, computed from the clients' means."""
    return np.average(means, axis=0, weights=counts[counts > 0])


class Standardizer(NamedTuple):
    """Standardization of features and target, and the conversion of linear models. A zero weight stays zero."""

    features: Scale
    target: Scale

    @property
    def bytes_each_way(self) -> int:
        """Bytes that each client sent, and as many that it received, to compute the standardization."""
        return 4 * (self.features.num_floats_each_way + self.target.num_floats_each_way)

    def apply(self, x: Matrix, y: np.ndarray) -> tuple[Matrix, np.ndarray]:
        """Standardized examples and targets in single precision; class indices do not change."""
        examples = self.features.apply(x).astype(np.float32) if isinstance(x, np.ndarray) else csr_matrix(x, dtype=np.float32)
        return examples, y if y.dtype.kind == "i" else self.target.apply(y).astype(np.float32)

    def to_original(self, matrix: Tensor, intercept: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients (outputs, features) and intercepts (outputs,) for examples that are not standardized."""
        coef = matrix.double().numpy() * self.target.scale[:, None] / self.features.scale
        offset = np.zeros(len(coef)) if intercept is None else intercept.double().numpy() * self.target.scale + self.target.mean
        return coef, offset - coef @ self.features.mean

    def to_standardized(self, coef: np.ndarray, intercept: np.ndarray | None) -> Tensor:
        """The parameter vector for standardized examples; `intercept` is None if the model has none."""
        matrix = coef * self.features.scale / self.target.scale[:, None]
        offset = [] if intercept is None else (intercept + coef @ self.features.mean - self.target.mean) / self.target.scale
        return torch.from_numpy(np.concatenate((matrix.reshape(-1), offset)).astype(np.float32))


def fit_standardizer(
    x: Matrix, y: np.ndarray, counts: np.ndarray, *, scale_features: bool, scale_target: bool, center: bool
) -> Standardizer:
    """Compute the standardization of dense features and of numeric targets. Without an intercept `center` must be false."""
    num_features: int = x.shape[1]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
    return Standardizer(
        federated_standardization(x, counts, center=center)
        if scale_features and isinstance(x, np.ndarray)
        else identity_scale(num_features),
        federated_standardization(y.reshape(len(y), -1), counts, center=center) if scale_target else identity_scale(1),
    )
