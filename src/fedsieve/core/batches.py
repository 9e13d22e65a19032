"""Rows of a batch that are not copied out or made dense, and their two products with a linear model."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from fedsieve.kernels import addresses, available, for_tensors, load_sparse_kernels


class SparseBatch:
    """One client's rows over the features they have: CSR, cut out of a longer matrix of some class of SciPy's."""

    def __init__(
        self,
        row_starts: Int[np.ndarray, " rows"],
        columns: Int[np.ndarray, " n"],
        values: Float[np.ndarray, " n"],
        num_features: int,
        scipy_class: Callable[..., Any] | None = None,
    ) -> None:
        self.row_starts = np.ascontiguousarray(row_starts - row_starts[0], dtype=np.int32)
        self.columns = np.ascontiguousarray(columns, dtype=np.int32)
        self.values = np.ascontiguousarray(values)
        self.num_features = num_features
        self.scipy_class = scipy_class

    @cached_property
    def dense(self) -> Float[Tensor, "1 b f"]:
        """The same rows with their zeros."""
        rows = np.zeros((len(self.row_starts) - 1, self.num_features), dtype=self.values.dtype)
        rows[np.repeat(np.arange(len(rows)), np.diff(self.row_starts)), self.columns] = self.values
        return torch.from_numpy(rows)[None]

    @cached_property
    def scipy_matrix(self) -> Any:
        """The same rows as SciPy's."""
        return self.scipy_class((self.values, self.columns, self.row_starts), shape=(len(self.row_starts) - 1, self.num_features))

    def prefers_scipy(self, like: Tensor) -> bool:
        """Whether SciPy's products are faster than torch's with the zeros: up to about a tenth of all cells, on a CPU."""
        return self.scipy_class is not None and like.is_cpu and 10 * len(self.values) < (len(self.row_starts) - 1) * self.num_features

    def matmul(self, matrix: Float[Tensor, "1 c f"]) -> Float[Tensor, "1 c b"]:
        """The model's outputs."""
        by_feature = matrix[0].T.contiguous()
        if for_tensors(by_feature, size=by_feature.numel()):
            out = torch.empty(len(self.row_starts) - 1, matrix.shape[1])
            load_sparse_kernels().csr_matmul(self.row_starts, self.columns, self.values, by_feature.numpy(), out.numpy())
            return out.T[None]
        if self.prefers_scipy(matrix):
            return torch.from_numpy(self.scipy_matrix @ by_feature.numpy()).T[None]
        return torch.bmm(matrix, self.dense.to(matrix.device).transpose(1, 2))

    def matmul_transposed(self, output_gradient: Float[Tensor, "1 c b"]) -> Float[Tensor, "1 f c"]:
        """The gradient, feature by feature, of a loss whose derivative in the outputs is `slope`."""
        out = output_gradient.new_empty(self.num_features, output_gradient.shape[1])
        if for_tensors(out, size=out.numel()):
            load_sparse_kernels().csr_matmul_transposed(
                self.row_starts, self.columns, self.values, output_gradient[0].T.contiguous().numpy(), out.numpy()
            )
            return out[None]
        if self.prefers_scipy(output_gradient):
            return torch.from_numpy(self.scipy_matrix.T @ output_gradient[0].T.contiguous().numpy())[None]
        return torch.bmm(self.dense.to(output_gradient.device).transpose(1, 2), output_gradient.transpose(1, 2))


class IndexedRows:
    """Dense rows for a stack of clients, left where they are."""

    def __init__(self, rows: Float[Tensor, "n f"], indices: Int64[Tensor, "k b"]) -> None:
        self.rows = rows
        self.indices = indices

    @staticmethod
    def is_supported(rows: Tensor, size: int) -> bool:
        """Whether a model of that size can read rows in their place."""
        return rows.ndim == 2 and for_tensors(rows, size=size) is not None

    def gradient(
        self, theta: Float[Tensor, "k p"], num_outputs: int, y: Shaped[Tensor, "k b"], *, is_logistic: bool
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        """The mean loss and its derivative in weights, output by output, and intercepts, if there are some behind them.

        Of one output squared or logistic, of several softmax.
        """
        y, loss, out = y.to(theta.dtype).contiguous(), theta.new_empty(len(theta)), torch.empty_like(theta)
        places = self.indices.contiguous()
        sizes = (tuple(self.rows.shape), tuple(places.shape), theta.shape[1], num_outputs)
        available().indexed_rows_gradient(*addresses(self.rows, places, theta, y, loss, out), *sizes, is_logistic)
        return loss, out
