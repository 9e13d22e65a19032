"""Rows of a batch that are not copied out or made dense, and their two products with a linear model."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from fedsieve.kernels import at, passes, passes_over, sparse_passes


class SparseBatch:
    """One client's rows over the features they have: CSR, cut out of a longer matrix of some class of SciPy's."""

    def __init__(
        self,
        starts: Int[np.ndarray, " rows"],
        columns: Int[np.ndarray, " n"],
        values: Float[np.ndarray, " n"],
        features: int,
        kind: Callable[..., Any] | None = None,
    ) -> None:
        self.starts = np.ascontiguousarray(starts - starts[0], dtype=np.int32)
        self.columns = np.ascontiguousarray(columns, dtype=np.int32)
        self.values = np.ascontiguousarray(values)
        self.features = features
        self.kind = kind

    @cached_property
    def dense(self) -> Float[Tensor, "1 b f"]:
        """The same rows with their zeros."""
        rows = np.zeros((len(self.starts) - 1, self.features), dtype=self.values.dtype)
        rows[np.repeat(np.arange(len(rows)), np.diff(self.starts)), self.columns] = self.values
        return torch.from_numpy(rows)[None]

    @cached_property
    def matrix(self) -> Any:
        """The same rows as SciPy's."""
        return self.kind((self.values, self.columns, self.starts), shape=(len(self.starts) - 1, self.features))

    def thin(self, like: Tensor) -> bool:
        """Whether SciPy's products are faster than torch's with the zeros: up to about a tenth of all cells, on a CPU."""
        return self.kind is not None and like.is_cpu and 10 * len(self.values) < (len(self.starts) - 1) * self.features

    def times(self, matrix: Float[Tensor, "1 c f"]) -> Float[Tensor, "1 c b"]:
        """The model's outputs."""
        by_feature = matrix[0].T.contiguous()
        if passes_over(by_feature, size=by_feature.numel()):
            out = torch.empty(len(self.starts) - 1, matrix.shape[1])
            sparse_passes().sparse_product(self.starts, self.columns, self.values, by_feature.numpy(), out.numpy())
            return out.T[None]
        if self.thin(matrix):
            return torch.from_numpy(self.matrix @ by_feature.numpy()).T[None]
        return torch.bmm(matrix, self.dense.to(matrix.device).transpose(1, 2))

    def back(self, slope: Float[Tensor, "1 c b"]) -> Float[Tensor, "1 f c"]:
        """The gradient, feature by feature, of a loss whose derivative in the outputs is `slope`."""
        out = slope.new_empty(self.features, slope.shape[1])
        if passes_over(out, size=out.numel()):
            sparse_passes().sparse_product_back(self.starts, self.columns, self.values, slope[0].T.contiguous().numpy(), out.numpy())
            return out[None]
        if self.thin(slope):
            return torch.from_numpy(self.matrix.T @ slope[0].T.contiguous().numpy())[None]
        return torch.bmm(self.dense.to(slope.device).transpose(1, 2), slope.transpose(1, 2))


class PickedRows:
    """Dense rows for a stack of clients, left where they are."""

    def __init__(self, rows: Float[Tensor, "n f"], places: Int64[Tensor, "k b"]) -> None:
        self.rows = rows
        self.places = places

    @staticmethod
    def suits(rows: Tensor, size: int) -> bool:
        """Whether a model of that size can read rows in their place."""
        return rows.ndim == 2 and passes_over(rows, size=size) is not None

    def gradient(
        self, theta: Float[Tensor, "k p"], outputs: int, y: Shaped[Tensor, "k b"], *, logistic: bool
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        """The mean loss and its derivative in weights, output by output, and intercepts, if there are some behind them.

        Of one output squared or logistic, of several softmax.
        """
        y, loss, out = y.to(theta.dtype).contiguous(), theta.new_empty(len(theta)), torch.empty_like(theta)
        places = self.places.contiguous()
        sizes = (tuple(self.rows.shape), tuple(places.shape), theta.shape[1], outputs)
        passes().row_gradient(*at(self.rows, places, theta, y, loss, out), *sizes, logistic)
        return loss, out
