"""Records gates and supports over the rounds of a run: overlaps between rounds, and some gates individually."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.gated import GatedAlgorithm
from fedsieve.algorithms.log_alpha import HasGateDistribution, HasGates
from fedsieve.core import gates
from fedsieve.core.gates import GateAtTest

MAX_MAP_ROUNDS = 50
"""Maximum number of rounds of a heatmap."""
MAX_MAP_GATES = 50
"""Maximum number of kept gates, and of other gates, that are stored individually."""


class GateTrace:
    """The test-time gates of each round if the algorithm has gates, and its masks."""

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        self.algorithm = algorithm
        self.gates: list[np.ndarray] = []
        self.masks: list[np.ndarray] = []

    def record(self, server: Any, theta: Tensor) -> None:
        """Record one round."""
        size = server.layout.num_gated
        self.masks.append((theta[:size] != 0).numpy(force=True))
        if isinstance(server, HasGates):
            assert isinstance(self.algorithm, HasGateDistribution)
            test_gate = self.algorithm.test_gate if isinstance(self.algorithm, GatedAlgorithm) else GateAtTest.MEDIAN
            test_gates = gates.compute_test_gates(self.algorithm.shape, server.log_alpha[:size], test_gate)
            self.gates.append(test_gates.to(torch.float16).numpy(force=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers: `overlap` between stored rounds (soft IoU of gates, IoU of masks), `gates` of a few weights."""
        indices = evenly_spaced(len(self.masks), MAX_MAP_ROUNDS)
        vectors = np.stack([(self.gates or self.masks)[i] for i in indices]).astype(np.float32)
        masks = np.stack([self.masks[i] for i in indices]).astype(np.float32)
        trace = {
            "rounds": [i + 1 for i in indices],
            "kind": "gates" if self.gates else "masks",
            "overlap": round_entries(pairwise_overlaps(vectors)),
            "mask_overlap": round_entries(pairwise_overlaps(masks)),
        }
        if self.gates:
            final = self.masks[-1]
            selected = np.concatenate([np.flatnonzero(final)[:MAX_MAP_GATES], np.flatnonzero(~final)[:MAX_MAP_GATES]])
            trace["gates"] = round_entries(vectors[:, selected])
            trace["num_kept"] = int(min(final.sum(), MAX_MAP_GATES))
        return trace


def evenly_spaced(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` of the indices 0 to count - 1, evenly spaced, including the first and the last."""
    selected = min(max_count, count)
    return sorted({round(i * (count - 1) / max(selected - 1, 1)) for i in range(selected)})


def pairwise_overlaps(vectors: np.ndarray) -> np.ndarray:
    """Return sum min / sum max of every pair of rows; 0/0 is 1 (decision F6)."""
    intersection = np.stack([np.minimum(vectors, row).sum(1) for row in vectors])
    union = np.stack([np.maximum(vectors, row).sum(1) for row in vectors])
    return np.divide(intersection, union, out=np.ones_like(intersection), where=union > 0)


def round_entries(matrix: np.ndarray) -> list[list[float]]:
    """Return the entries with three decimals, enough for a colour."""
    return [[round(float(value), 3) for value in row] for row in matrix]
