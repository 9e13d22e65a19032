"""How gates and supports move through the rounds of a run: overlaps between rounds, and some gates one by one."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core import gates

MAX_MAP_ROUNDS = 50
"""Rounds of a map at most."""
MAX_MAP_GATES = 50
"""Gates followed one by one: so many of those kept in the end, so many of the others."""


class GateTrace:
    """Test-time gates of each round where a method has gates, else its mask."""

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        self.algorithm = algorithm
        self.gates: list[np.ndarray] = []
        self.masks: list[np.ndarray] = []

    def record(self, server: Any, theta: Tensor) -> None:
        """One round more."""
        size = server.layout.num_gated
        self.masks.append((theta[:size] != 0).numpy(force=True))
        if hasattr(server, "log_alpha"):
            self.gates.append(gates.test_gates(self.algorithm.shape, server.log_alpha[:size]).to(torch.float16).numpy(force=True))

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers: `overlap` between stored rounds (soft IoU of gates, IoU of masks), `gates` of a few weights per round."""
        count = len(self.masks)
        kept = sorted({round(i * (count - 1) / max(min(MAX_MAP_ROUNDS, count) - 1, 1)) for i in range(min(MAX_MAP_ROUNDS, count))})
        followed = np.stack([(self.gates or self.masks)[i] for i in kept]).astype(np.float32)
        found = {
            "rounds": [i + 1 for i in kept],
            "kind": "gates" if self.gates else "masks",
            "overlap": round_entries(pairwise_overlaps(followed)),
        }
        found["mask_overlap"] = round_entries(pairwise_overlaps(np.stack([self.masks[i] for i in kept]).astype(np.float32)))
        if self.gates:
            final = self.masks[-1]
            shown = np.concatenate([np.flatnonzero(final)[:MAX_MAP_GATES], np.flatnonzero(~final)[:MAX_MAP_GATES]])
            found["gates"] = round_entries(followed[:, shown])
            found["kept"] = int(min(final.sum(), MAX_MAP_GATES))
        return found


def pairwise_overlaps(vectors: np.ndarray) -> np.ndarray:
    """sum min / sum max of every pair of rows; 0/0 is 1 (decision F6)."""
    both = np.stack([np.minimum(vectors, row).sum(1) for row in vectors])
    either = np.stack([np.maximum(vectors, row).sum(1) for row in vectors])
    return np.divide(both, either, out=np.ones_like(both), where=either > 0)


def round_entries(matrix: np.ndarray) -> list[list[float]]:
    """Three decimals are enough for a colour."""
    return [[round(float(value), 3) for value in row] for row in matrix]
