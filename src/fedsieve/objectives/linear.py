"""Linear models in closed form: LR, LG, MC and multi-label, one batched product each way for a whole cohort."""

from dataclasses import dataclass, field, replace
from math import log

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fedsieve.core.batches import PickedRows
from fedsieve.core.random import Draw, normal
from fedsieve.core.types import Batch, Layout, SparseRows
from fedsieve.kernels import passes_over, sparse_passes
from fedsieve.objectives.losses import Loss

FEW_OUTPUTS = 16
"""Softmax over so many reads its rows where they are."""
CURVATURE = {Loss.SQUARED: 2.0, Loss.LOGISTIC: 0.25, Loss.SOFTMAX: 0.5, Loss.MULTILABEL: 0.25}
"""The largest second derivative of the loss in the logits."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """h(x; theta) = theta x, theta an (outputs, features) matrix laid flat; an intercept only where asked for (decision F5)."""

    loss: Loss
    features: int
    outputs: int = 1
    intercept: bool = False
    """one more number an output, behind the weights: no gate, not counted"""
    by_feature: bool = False
    """gates are shared by all weights of a feature"""
    spread: float = 0.01
    """theta~ starts as N(0, spread^2)"""
    transposed: bool = False
    """weights stand feature by feature, (features, outputs): for sparse rows"""
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        size = self.features * self.outputs
        free = self.outputs if self.intercept else 0
        groups = None
        if self.by_feature:
            group = torch.arange(self.features)
            groups = torch.cat(
                (
                    group.repeat_interleave(self.outputs) if self.transposed else group.repeat(self.outputs),
                    self.features + torch.arange(free),
                )
            )
        layers = {"weights": (slice(0, size), (self.features, self.outputs) if self.transposed else (self.outputs, self.features))}
        object.__setattr__(self, "layout", Layout(size + free, layers, free, groups))

    @property
    def places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Where everything stands in the flat vector, by name."""
        free = {"intercept": (slice(self.layout.gated, self.layout.size), (self.outputs,))} if self.intercept else {}
        return self.layout.layers | free

    def parts(self, theta: Float[Tensor, "*k p"]) -> tuple[Float[Tensor, "*k c f"], Float[Tensor, "*k c"] | None]:
        """The matrix, and the intercepts where there are some."""
        gated = self.layout.gated
        if self.transposed:
            matrix = theta[..., :gated].reshape(*theta.shape[:-1], self.features, self.outputs).transpose(-1, -2)
        else:
            matrix = theta[..., :gated].reshape(*theta.shape[:-1], self.outputs, self.features)
        return matrix, theta[..., gated:] if self.intercept else None

    def initial(self, draw: Draw) -> Float[Tensor, " p"]:
        """theta~ ~ N(0, spread^2)."""
        return self.spread * normal(draw("start", self.layout.size))

    def gradient(self, theta: Float[Tensor, "k p"], batch: Batch) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        """Mean loss of the batch and its gradient. Orientation matters: theta (k, c, f) times x^T is 8 times faster than x theta^T."""
        x = batch.x
        if isinstance(x, PickedRows):
            return x.gradient(theta.contiguous(), self.outputs, batch.y, logistic=self.loss is Loss.LOGISTIC)
        matrix, intercept = self.parts(theta)
        logits = torch.bmm(matrix, x.transpose(1, 2)) if isinstance(x, Tensor) else x.times(matrix)
        loss, slope = self._loss(logits if intercept is None else logits + intercept[..., None], batch.y)
        product = torch.bmm(slope, x) if isinstance(x, Tensor) else x.back(slope)
        gradient = product.flatten(1)
        return loss, gradient if intercept is None else torch.cat((gradient, slope.sum(-1)), dim=-1)

    def empty_loss(self, batch: Batch) -> Float[Tensor, " k"]:
        """The mean loss of a batch where every weight is zero: of squares the targets' own, else that of a guess."""
        y = batch.y
        if self.loss is Loss.SQUARED:
            return (y * y).mean(-1)
        return torch.full((len(y),), log(self.outputs if self.loss is Loss.SOFTMAX else 2), device=y.device)

    @property
    def reads_rows(self) -> bool:
        """Whether rows need not be copied out for a gradient: many outputs are faster as a product of matrices."""
        one_output, few_outputs = self.outputs == 1, 1 < self.outputs <= FEW_OUTPUTS and not self.transposed
        return (one_output and self.loss in (Loss.SQUARED, Loss.LOGISTIC)) or (few_outputs and self.loss is Loss.SOFTMAX)

    def _loss(self, logits: Float[Tensor, "k c b"], y: Tensor) -> tuple[Float[Tensor, " k"], Float[Tensor, "k c b"]]:
        """The mean loss over the last axis and its derivative in the logits."""
        rows = logits.shape[-1]
        match self.loss:
            case Loss.SQUARED:
                residual = logits - y[:, None]
                return (residual * residual).sum((1, 2)) / rows, residual * (2 / rows)
            case Loss.LOGISTIC:
                target = y[:, None]
                loss = (functional.softplus(logits) - target * logits).sum((1, 2)) / rows
                return loss, (torch.sigmoid(logits) - target) / rows
            case Loss.SOFTMAX:
                if fast := passes_over(logits, size=self.layout.size):
                    loss, slope = logits.new_empty(len(logits)), torch.empty_like(logits)
                    fast.softmax_loss(logits.numpy(), y.numpy(), loss.numpy(), slope.numpy())
                    return loss, slope
                target = y[:, None]
                logs = torch.log_softmax(logits, dim=1)
                slope = logs.exp().scatter_add(1, target, torch.full_like(logs[:, :1], -1.0))
                return -logs.gather(1, target).sum((1, 2)) / rows, slope / rows
            case Loss.MULTILABEL:
                target, by_row = y.transpose(1, 2), logits.transpose(1, 2)
                if passes_over(by_row, y, size=self.layout.size):
                    loss, slope = logits.new_empty(len(logits)), torch.empty_like(by_row)
                    sparse_passes().binary_loss(*(part.flatten(1).numpy() for part in (by_row, y)), loss.numpy(), slope.flatten(1).numpy())
                    return loss, slope.transpose(1, 2)
                cells = rows * self.outputs
                loss = (functional.softplus(logits) - target * logits).sum((1, 2)) / cells
                return loss, (torch.sigmoid(logits) - target) / cells

    def restricted(self, features: int) -> "Linear":
        """The same model over some of the features, whose weights stand feature by feature."""
        return replace(self, features=features, transposed=True)

    def predict(self, theta: Float[Tensor, " p"], x: Float[Tensor, "n f"] | SparseRows) -> Float[Tensor, "n c"]:
        """Predictions (LR) or logits; of rows held feature by feature, a sparse model reads only the features it uses."""
        matrix, intercept = self.parts(theta)
        if not isinstance(x, Tensor):
            logits = torch.from_numpy(x @ np.ascontiguousarray(matrix.T.numpy(force=True))).to(theta)
        else:
            used = matrix.any(0).nonzero()[:, 0]
            if x.stride(0) != 1:
                logits = x @ matrix.T
            elif len(used) > self.features // 2:
                logits = (matrix @ x.T).T  # as x @ matrix.T it takes six times as long on such rows
            else:
                logits = (matrix.index_select(1, used) @ x.T.index_select(0, used)).T
        return logits if intercept is None else logits + intercept

    def smoothness(self, rows: Batch, batch: int, iterations: int = 8) -> Float[Tensor, ""]:
        """L of a mini-batch of size B: between L of all rows (power iteration) and of the worst row (expected smoothness, Gower 2019)."""
        x = torch.cat((rows.x, torch.ones_like(rows.x[:, :1])), dim=1) if self.intercept else rows.x
        n = len(x)
        curvature = CURVATURE[self.loss] / (self.outputs if self.loss is Loss.MULTILABEL else 1)
        direction = x.sum(0) + x[0]
        for _ in range(iterations):
            direction = x.T @ (x @ (direction / torch.linalg.vector_norm(direction).clamp_min(torch.finfo(x.dtype).tiny)))
        whole = torch.linalg.vector_norm(direction) / n
        worst = (x * x).sum(-1).amax()
        taken = min(batch, n)
        share = (n - taken) / (taken * max(n - 1, 1))
        return curvature * ((1 - share) * whole + share * worst)
