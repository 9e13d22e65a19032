"""Metrics of predictions and of support recovery; they agree with scikit-learn's."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from fedsieve.objectives.losses import Loss


def regression_metrics(prediction: Float[Tensor, "n c"], y: Float[Tensor, "n *c"]) -> dict[str, float]:
    """Return MSE and R2; of several targets the means over them."""
    if y.ndim == 2:
        parts = [regression_metrics(prediction[:, [i]], y[:, i]) for i in range(y.shape[1])]
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    error = ((prediction[:, 0] - y) ** 2).mean()
    return {"r2": float(1 - error / ((y - y.mean()) ** 2).mean()), "mse": float(error)}


def binary_metrics(logits: Float[Tensor, "n 1"], y: Float[Tensor, " n"]) -> dict[str, float]:
    """Return accuracy and cross-entropy of two classes."""
    hit = (logits[:, 0] > 0) == (y > 0.5)
    return {"accuracy": float(hit.double().mean()), "ce": float(functional.binary_cross_entropy_with_logits(logits[:, 0], y))}


def multiclass_metrics(logits: Float[Tensor, "n c"], y: Tensor) -> dict[str, float]:
    """Return accuracy and cross-entropy."""
    return {"accuracy": float((logits.argmax(1) == y).double().mean()), "ce": float(functional.cross_entropy(logits, y))}


def multilabel_metrics(logits: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> dict[str, float]:
    """Return micro-averaged F1 and binary cross-entropy."""
    predicted, true = logits > 0, y > 0.5
    hits = (predicted & true).sum()
    return {
        "micro_f1": float(2 * hits / (predicted.sum() + true.sum()).clamp_min(1)),
        "bce": float(functional.binary_cross_entropy_with_logits(logits, y)),
    }


def support_recovery(kept: Bool[Tensor, "c f"], truth: Bool[Tensor, "c f"]) -> dict[str, float]:
    """Support recovery: TDR is precision over entries, `tdr_features` over features, and recall (L213, decision F2)."""
    hits = (kept & truth).sum()
    rows, true_rows = kept.any(0), truth.any(0)
    return {
        "tdr": float(hits / kept.sum().clamp_min(1)),
        "tdr_features": float((rows & true_rows).sum() / rows.sum().clamp_min(1)),
        "recall": float(hits / truth.sum().clamp_min(1)),
    }


def soft_iou(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """sum min / sum max of two gate vectors; of two masks, their intersection over union; 0/0 is 1 (decision F6)."""
    union = torch.maximum(a, b).sum()
    return float(torch.minimum(a, b).sum() / union) if union > 0 else 1.0


METRICS_BY_LOSS: dict[Loss, tuple[Callable[[Tensor, Tensor], dict[str, float]], str]] = {
    Loss.SQUARED: (regression_metrics, "r2"),
    Loss.LOGISTIC: (binary_metrics, "accuracy"),
    Loss.SOFTMAX: (multiclass_metrics, "accuracy"),
    Loss.MULTILABEL: (multilabel_metrics, "micro_f1"),
}
"""For each loss the function (outputs, targets) -> metrics, and the name of the metric that is compared."""
