"""Batches that are neither copied nor made dense: sparse examples with their products, and examples read in place."""

from collections.abc import Callable
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from fedsieve.kernels import accelerated


class BatchSampling(StrEnum):
    """How a client draws its mini-batches."""

    SHUFFLED = "shuffled"
    """examples are shuffled once per round and used in this order (decision D2)"""
    INDEPENDENT = "independent"
    """every mini-batch is drawn from all examples, whatever the others contain (L138, L161)"""


class SparseBatch:
    """Sparse examples of one client in CSR format, over the features they contain."""

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
        """The examples as a dense matrix."""
        rows = np.zeros((len(self.row_starts) - 1, self.num_features), dtype=self.values.dtype)
        rows[np.repeat(np.arange(len(rows)), np.diff(self.row_starts)), self.columns] = self.values
        return torch.from_numpy(rows)[None]

    @property
    def row_squares(self) -> Float[np.ndarray, " b"]:
        """The squared norm of every example."""
        rows = np.repeat(np.arange(len(self.row_starts) - 1), np.diff(self.row_starts))
        return np.bincount(rows, self.values.astype(np.float64) ** 2, len(self.row_starts) - 1).astype(self.values.dtype)

    @cached_property
    def scipy_matrix(self) -> Any:
        """The examples as a matrix of SciPy."""
        assert self.scipy_class is not None, "only batches cut out of a SciPy matrix have one"
        return self.scipy_class((self.values, self.columns, self.row_starts), shape=(len(self.row_starts) - 1, self.num_features))

    def prefers_scipy(self, like: Tensor) -> bool:
        """Whether SciPy's products are faster than dense ones: on a CPU, if less than about a tenth of the entries are nonzero."""
        return self.scipy_class is not None and like.is_cpu and 10 * len(self.values) < (len(self.row_starts) - 1) * self.num_features

    @accelerated("sparse", "csr_matmul", tensors=("matrix",), size=lambda _, matrix: matrix.numel(), contiguous=False)
    def matmul(self, matrix: Float[Tensor, "1 c f"]) -> Float[Tensor, "1 c b"]:
        """The outputs of a linear model."""
        if self.prefers_scipy(matrix):
            return torch.from_numpy(self.scipy_matrix @ matrix[0].T.contiguous().numpy()).T[None]
        return torch.bmm(matrix, self.dense.to(matrix.device).transpose(1, 2))

    @accelerated(
        "sparse",
        "csr_matmul_transposed",
        tensors=("output_gradient",),
        size=lambda self, output_gradient: self.num_features * output_gradient.shape[1],
        contiguous=False,
    )
    def matmul_transposed(self, output_gradient: Float[Tensor, "1 c b"]) -> Float[Tensor, "1 f c"]:
        """The gradient in the weights, feature by feature, from the gradient in the outputs."""
        if self.prefers_scipy(output_gradient):
            return torch.from_numpy(self.scipy_matrix.T @ output_gradient[0].T.contiguous().numpy())[None]
        return torch.bmm(self.dense.to(output_gradient.device).transpose(1, 2), output_gradient.transpose(1, 2))


class IndexedRows(NamedTuple):
    """Dense examples of a stack of clients: rows of a matrix, which a kernel reads in place instead of copying them."""

    rows: Float[Tensor, "n f"]
    indices: Int64[Tensor, "k b"]


def gather(values: Tensor, indices: Int64[Tensor, "..."]) -> Tensor:
    """values[indices]; `index_select` is several times faster than advanced indexing."""
    return values.index_select(0, indices.view(-1)).view(*indices.shape, *values.shape[1:])
