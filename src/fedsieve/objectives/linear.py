"""Linear models with gradients in closed form: linear, logistic, multi-class and multi-label regression."""

from dataclasses import dataclass, field, replace
from math import log
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional

from fedsieve.core.batches import IndexedRows, SparseBatch, gather
from fedsieve.core.random import Draw, uniform_to_normal
from fedsieve.core.types import Batch, CsrMatrix, Layout
from fedsieve.kernels import accelerated
from fedsieve.objectives.losses import Loss

MAX_INDEXED_OUTPUTS = 16
"""Outputs up to which the gradient of the softmax loss reads examples in place."""
MAX_CURVATURE = {Loss.SQUARED: 2.0, Loss.LOGISTIC: 0.25, Loss.SOFTMAX: 0.5, Loss.MULTILABEL: 0.25}
"""The largest second derivative of the loss in the logits."""


def model_size(objective: "Linear", *_: object) -> int:
    """The length that decides between kernel and reference: neither the batch nor the number of clients counts."""
    return objective.layout.size


@dataclass(frozen=True, kw_only=True)
class Linear:
    """h(x; theta) = theta x with theta a flattened (outputs, features) matrix; an intercept is optional (decision F5)."""

    has_random_layers: ClassVar[bool] = False

    loss: Loss
    num_features: int
    num_outputs: int = 1
    intercept: bool = False
    """one intercept per output after the weights: not gated, not counted"""
    group_by_feature: bool = False
    """all weights of a feature share one gate"""
    init_std: float = 0.01
    """initial theta~ is N(0, init_std^2)"""
    feature_major: bool = False
    """weights are ordered (features, outputs), for sparse examples"""
    layout: Layout = field(init=False)
    supports_indexed_rows: bool = field(init=False)
    """whether `gradient` reads examples in place; many outputs are faster as a product of matrices"""

    def __post_init__(self) -> None:
        size = self.num_features * self.num_outputs
        ungated = self.num_outputs if self.intercept else 0
        groups = None
        if self.group_by_feature:
            group = torch.arange(self.num_features)
            groups = torch.cat(
                (
                    group.repeat_interleave(self.num_outputs) if self.feature_major else group.repeat(self.num_outputs),
                    self.num_features + torch.arange(ungated),
                )
            )
        layers = {
            "weights": (
                slice(0, size),
                (self.num_features, self.num_outputs) if self.feature_major else (self.num_outputs, self.num_features),
            )
        }
        object.__setattr__(self, "layout", Layout(size + ungated, layers, ungated, groups))
        one_output, few_outputs = self.num_outputs == 1, 1 < self.num_outputs <= MAX_INDEXED_OUTPUTS and not self.feature_major
        supported = self.loss in (Loss.SQUARED, Loss.LOGISTIC) if one_output else self.loss is Loss.SOFTMAX and few_outputs
        object.__setattr__(self, "supports_indexed_rows", supported)

    @property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Slice and shape of weights and intercepts by name."""
        ungated = {"intercept": (slice(self.layout.num_gated, self.layout.size), (self.num_outputs,))} if self.intercept else {}
        return self.layout.layers | ungated

    def unflatten(self, theta: Float[Tensor, "*k p"]) -> tuple[Float[Tensor, "*k c f"], Float[Tensor, "*k c"] | None]:
        """The matrix of weights and the intercepts, if any."""
        gated = self.layout.num_gated
        if self.feature_major:
            matrix = theta[..., :gated].reshape(*theta.shape[:-1], self.num_features, self.num_outputs).transpose(-1, -2)
        else:
            matrix = theta[..., :gated].reshape(*theta.shape[:-1], self.num_outputs, self.num_features)
        return matrix, theta[..., gated:] if self.intercept else None

    def initial_weights(self, draw: Draw) -> Float[Tensor, " p"]:
        """theta~ ~ N(0, init_std^2)."""
        return self.init_std * uniform_to_normal(draw("start", self.layout.size))

    def gradient(self, theta: Float[Tensor, "k p"], batch: Batch) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        """Mean loss of the batch and its gradient. The product theta x^T is 8 times faster than x theta^T."""
        x = batch.x
        if isinstance(x, IndexedRows):
            return self._indexed_gradient(theta.contiguous(), x, batch.y)
        matrix, intercept = self.unflatten(theta)
        logits = torch.bmm(matrix, x.transpose(1, 2)) if isinstance(x, Tensor) else x.matmul(matrix)
        loss, slope = self._loss_and_gradient(logits if intercept is None else logits + intercept[..., None], batch.y)
        product = torch.bmm(slope, x) if isinstance(x, Tensor) else x.matmul_transposed(slope)
        gradient = product.flatten(1)
        return loss, gradient if intercept is None else torch.cat((gradient, slope.sum(-1)), dim=-1)

    def zero_model_loss(self, batch: Batch) -> Float[Tensor, " k"]:
        """The mean loss of a batch for zero weights: the mean squared target, or the loss of equal probabilities."""
        y = batch.y
        if self.loss is Loss.SQUARED:
            return (y * y).mean(-1) if y.ndim == 2 else (y * y).sum(-1).mean(-1)
        return torch.full((len(y),), log(self.num_outputs if self.loss is Loss.SOFTMAX else 2), device=y.device)

    @accelerated("linear", "indexed_rows_gradient", tensors=("theta", "x.rows"))
    def _indexed_gradient(
        self, theta: Float[Tensor, "k p"], x: IndexedRows, y: Shaped[Tensor, "k b"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        return self.gradient(theta, Batch(gather(*x), y.long() if self.loss is Loss.SOFTMAX else y))

    def _loss_and_gradient(self, logits: Float[Tensor, "k c b"], y: Tensor) -> tuple[Float[Tensor, " k"], Float[Tensor, "k c b"]]:
        """The mean loss over the last axis and its derivative in the logits."""
        num_examples = logits.shape[-1]
        match self.loss:
            case Loss.SQUARED:
                residual = logits - (y[:, None] if y.ndim == 2 else y.transpose(1, 2))
                return (residual * residual).sum((1, 2)) / num_examples, residual * (2 / num_examples)
            case Loss.LOGISTIC:
                target = y[:, None]
                loss = (functional.softplus(logits) - target * logits).sum((1, 2)) / num_examples
                return loss, (torch.sigmoid(logits) - target) / num_examples
            case Loss.SOFTMAX:
                return self._softmax_loss(logits, y)
            case Loss.MULTILABEL:
                loss, slope = self._multilabel_loss(logits.transpose(1, 2), y)
                return loss, slope.transpose(1, 2)

    @accelerated("linear", "softmax_loss", tensors=("logits",), size=model_size)
    def _softmax_loss(
        self, logits: Float[Tensor, "k c b"], labels: Int64[Tensor, "k b"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k c b"]]:
        target, num_examples = labels[:, None], logits.shape[-1]
        log_probabilities = torch.log_softmax(logits, dim=1)
        slope = log_probabilities.exp().scatter_add(1, target, torch.full_like(log_probabilities[:, :1], -1.0))
        return -log_probabilities.gather(1, target).sum((1, 2)) / num_examples, slope / num_examples

    @accelerated("sparse", "binary_loss", tensors=("logits", "y"), size=model_size)
    def _multilabel_loss(
        self, logits: Float[Tensor, "k b c"], y: Float[Tensor, "k b c"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k b c"]]:
        num_labels = y[0].numel()
        loss = (functional.softplus(logits) - y * logits).sum((1, 2)) / num_labels
        return loss, (torch.sigmoid(logits) - y) / num_labels

    def with_features(self, num_features: int) -> "Linear":
        """The same model over some features, with its weights ordered by feature."""
        return replace(self, num_features=num_features, feature_major=True)

    def predict(self, theta: Float[Tensor, " p"], x: Float[Tensor, "n f"] | CsrMatrix) -> Float[Tensor, "n c"]:
        """Predictions or logits. If examples are stored by feature, a sparse model reads only the features it uses."""
        matrix, intercept = self.unflatten(theta)
        if not isinstance(x, Tensor):
            logits = torch.from_numpy(x @ np.ascontiguousarray(matrix.T.numpy(force=True))).to(theta)
        else:
            used = matrix.any(0).nonzero()[:, 0]
            if x.stride(0) != 1:
                logits = x @ matrix.T
            elif len(used) > self.num_features // 2:
                logits = (matrix @ x.T).T  # six times faster than x @ matrix.T for this memory order
            else:
                logits = (matrix.index_select(1, used) @ x.T.index_select(0, used)).T
        return logits if intercept is None else logits + intercept

    def smoothness(self, examples: Batch, batch_size: int, num_iterations: int = 8) -> Float[Tensor, ""]:
        """Expected smoothness of a mini-batch (Gower 2019): between L of all examples (power iteration) and of the worst one."""
        x = examples.x
        if isinstance(x, Tensor):
            x = x.flatten(1)
            squares, multiply, multiply_transposed = (x * x).sum(-1), x.__matmul__, x.T.__matmul__
        else:
            assert isinstance(x, SparseBatch), "clients hold dense or sparse examples"
            squares, multiply = torch.from_numpy(x.row_squares), lambda v: x.matmul(v[None, None])[0, 0]
            multiply_transposed = lambda u: x.matmul_transposed(u[None, None])[0, :, 0]  # noqa: E731
        n, constant = len(squares), 1.0 if self.intercept else 0.0
        image = torch.ones_like(squares)
        image[0] += 1  # the sum of centred examples is zero
        eigenvalue, smallest = image.new_zeros(()), torch.finfo(image.dtype).tiny
        for _ in range(num_iterations):
            direction, mean = multiply_transposed(image), constant * image.sum()
            norm = (direction.square().sum() + mean.square()).sqrt().clamp_min(smallest)
            image = multiply(direction / norm) + constant * mean / norm
            eigenvalue = image.square().sum()
        taken = min(batch_size, n)
        share = (n - taken) / (taken * max(n - 1, 1))
        curvature = MAX_CURVATURE[self.loss] / (self.num_outputs if self.loss is Loss.MULTILABEL else 1)
        return curvature * ((1 - share) * eigenvalue / n + share * (squares.amax() + constant))

    def local_smoothness(self, smoothness: Float[Tensor, " k"], loss_fraction: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """L of the squared loss, whose curvature is constant; other losses are flatter than their bound, the more so the smaller (F13)."""
        return smoothness if self.loss is Loss.SQUARED else smoothness * loss_fraction
