"""fedht: hard thresholding of the averaged weights."""

from collections.abc import Iterable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedsieve.core.topk import top_k_mask


def hard_threshold(weights: np.ndarray, num_kept: int) -> np.ndarray:
    """Return H_m(weights): the m largest magnitudes, zeros elsewhere; ties go to the lowest index."""
    mask = top_k_mask(torch.from_numpy(weights).abs().view(1, -1), num_kept).view(weights.shape)
    return np.where(mask.numpy(), weights, np.zeros_like(weights))


class FedHT(FedAvg):
    """FedAvg whose weights are thresholded after averaging (Fed-HT; with thresholding clients FedIter-HT)."""

    def __init__(self, num_kept: int, **kwargs) -> None:  # noqa: ANN003
        super().__init__(**kwargs)
        self.num_kept = num_kept

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies and keep the largest weights of the array `weight`; other arrays are kept whole."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            arrays["weight"] = Array(hard_threshold(arrays["weight"].numpy(), self.num_kept))
        return arrays, metrics
