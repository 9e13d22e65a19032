"""The rows of one client's batch over the features they have, in compressed form, and their two products with a linear model."""

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedsieve.core.compiled import passes_over


class SparseBatch:
    """CSR, cut out of a longer matrix."""

    def __init__(
        self, starts: Int[np.ndarray, " rows"], columns: Int[np.ndarray, " n"], values: Float[np.ndarray, " n"], features: int
    ) -> None:
        self.starts = np.ascontiguousarray(starts - starts[0], dtype=np.int32)
        self.columns = np.ascontiguousarray(columns, dtype=np.int64)
        self.values = np.ascontiguousarray(values)
        self.features = features

    @cached_property
    def dense(self) -> Float[Tensor, "1 b f"]:
        """The same rows with their zeros."""
        rows = np.zeros((len(self.starts) - 1, self.features), dtype=self.values.dtype)
        rows[np.repeat(np.arange(len(rows)), np.diff(self.starts)), self.columns] = self.values
        return torch.from_numpy(rows)[None]

    def times(self, matrix: Float[Tensor, "1 c f"]) -> Float[Tensor, "1 c b"]:
        """The model's outputs."""
        by_feature = matrix[0].T.contiguous()
        if fast := passes_over(by_feature, size=by_feature.numel()):
            out = torch.empty(len(self.starts) - 1, matrix.shape[1])
            fast.sparse_product(self.starts, self.columns, self.values, by_feature.numpy(), out.numpy())
            return out.T[None]
        return torch.bmm(matrix, self.dense.to(matrix.device).transpose(1, 2))

    def back(self, slope: Float[Tensor, "1 c b"]) -> Float[Tensor, "1 f c"]:
        """The gradient, feature by feature, of a loss whose derivative in the outputs is `slope`."""
        out = slope.new_empty(self.features, slope.shape[1])
        if fast := passes_over(out, size=out.numel()):
            fast.sparse_product_back(self.starts, self.columns, self.values, slope[0].T.contiguous().numpy(), out.numpy())
            return out[None]
        return torch.bmm(self.dense.to(slope.device).transpose(1, 2), slope.transpose(1, 2))
