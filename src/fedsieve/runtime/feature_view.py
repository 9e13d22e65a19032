"""What a client with sparse rows sees of a model: the weights of features its rows have. Of all others a step changes nothing by itself."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.types import Objective


class Sight(NamedTuple):
    """Some features of a linear model. A vector in sight stands feature by feature, (features, outputs), so that a feature is one piece
    of memory; behind them the free coordinates."""

    objective: Objective
    features: np.ndarray
    """increasing"""
    where: Tensor
    """the same, as torch wants them"""

    @classmethod
    def over(cls, objective: Objective, features: np.ndarray, device: str) -> "Sight":
        """Open the eyes."""
        return cls(objective, features, torch.from_numpy(features).to(device))

    @property
    def size(self) -> int:
        """Weights in sight."""
        return len(self.features) * self.objective.outputs

    def packet(self, packet: Packet) -> Packet:
        """A packet that speaks only of features in sight, as one of the vector in sight and one number more, of which it is silent."""
        output, feature = np.divmod(packet.support.numpy(force=True), self.objective.features)
        place = np.empty(self.objective.features, dtype=np.int64)
        place[self.features] = np.arange(len(self.features))
        support = place[feature] * self.objective.outputs + output
        return packet._replace(size=self.size + 1, support=torch.from_numpy(support).to(packet.support.device))

    def places(self, support: np.ndarray) -> np.ndarray:
        """Where entries of a vector in sight stand in the whole; the number more, behind all of it."""
        place, output = np.divmod(support, self.objective.outputs)
        return output * self.objective.features + np.append(self.features, self.objective.layout.size)[place]

    def of(self, whole: Tensor) -> Tensor:
        """The part of (1, p) that is in sight."""
        gated = self.objective.layout.gated
        matrix = whole[0, :gated].view(self.objective.outputs, -1).index_select(1, self.where)
        return self._beside(matrix.T.reshape(1, -1), whole[:, gated:])

    def back(self, whole: Tensor, part: Tensor) -> Tensor:
        """(1, p) with a changed part in its place."""
        gated, seen = self.objective.layout.gated, len(self.features) * self.objective.outputs
        changed = whole.clone()
        matrix = changed[0, :gated].view(self.objective.outputs, -1)
        matrix.index_copy_(1, self.where, part[0, :seen].view(len(self.features), -1).T)
        changed[:, gated:] = part[:, seen:]
        return changed

    def narrow(self, at: Tensor, part: Tensor) -> Tensor:
        """Of a part in sight, the features at some places among those in sight."""
        seen = len(self.features) * self.objective.outputs
        return self._beside(part[0, :seen].view(len(self.features), -1).index_select(0, at).view(1, -1), part[:, seen:])

    def widen(self, at: Tensor, part: Tensor, small: Tensor) -> Tensor:
        """The part with what `narrow` gave, changed, back in its place; in place, as nobody else holds it."""
        seen, touched = len(self.features) * self.objective.outputs, len(at) * self.objective.outputs
        part[0, :seen].view(len(self.features), -1).index_copy_(0, at, small[0, :touched].view(len(at), -1))
        part[:, seen:] = small[:, touched:]
        return part

    def coordinates(self, at: np.ndarray) -> np.ndarray:
        """Where what `narrow` gives stands in the whole vector."""
        layout = self.objective.layout
        weights = self.features[at][:, None] + np.arange(self.objective.outputs) * self.objective.features
        return np.concatenate((weights.reshape(-1), np.arange(layout.gated, layout.size)))

    @staticmethod
    def _beside(part: Tensor, free: Tensor) -> Tensor:
        return torch.cat((part, free), dim=-1) if free.shape[-1] else part
