"""What a client with sparse rows sees of a model: the weights of features its rows have. Of all others a step changes nothing by itself."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.types import Objective


class FeatureView(NamedTuple):
    """Some features of a linear model. A vector in sight stands feature by feature, (features, outputs), so that a feature is one piece
    of memory; behind them the free coordinates."""

    objective: Objective
    features: np.ndarray
    """increasing"""
    feature_index: Tensor
    """the same, as torch wants them"""

    @classmethod
    def create(cls, objective: Objective, features: np.ndarray, device: str) -> "FeatureView":
        """Open the eyes."""
        return cls(objective, features, torch.from_numpy(features).to(device))

    @property
    def size(self) -> int:
        """Weights in sight."""
        return len(self.features) * self.objective.num_outputs

    def restrict_packet(self, packet: Packet) -> Packet:
        """A packet that speaks only of features in sight, as one of the vector in sight and one number more, of which it is silent."""
        output, feature = np.divmod(packet.support.numpy(force=True), self.objective.num_features)
        place = np.empty(self.objective.num_features, dtype=np.int64)
        place[self.features] = np.arange(len(self.features))
        support = place[feature] * self.objective.num_outputs + output
        return packet._replace(size=self.size + 1, support=torch.from_numpy(support).to(packet.support.device))

    def global_indices(self, support: np.ndarray) -> np.ndarray:
        """Where entries of a vector in sight stand in the whole; the number more, behind all of it."""
        place, output = np.divmod(support, self.objective.num_outputs)
        return output * self.objective.num_features + np.append(self.features, self.objective.layout.size)[place]

    def gather(self, whole: Tensor) -> Tensor:
        """The part of (1, p) that is in sight."""
        gated = self.objective.layout.num_gated
        matrix = whole[0, :gated].view(self.objective.num_outputs, -1).index_select(1, self.feature_index)
        return self._append_ungated(matrix.T.reshape(1, -1), whole[:, gated:])

    def scatter(self, whole: Tensor, part: Tensor) -> Tensor:
        """(1, p) with a changed part in its place."""
        gated, seen = self.objective.layout.num_gated, len(self.features) * self.objective.num_outputs
        changed = whole.clone()
        matrix = changed[0, :gated].view(self.objective.num_outputs, -1)
        matrix.index_copy_(1, self.feature_index, part[0, :seen].view(len(self.features), -1).T)
        changed[:, gated:] = part[:, seen:]
        return changed

    def select(self, at: Tensor, part: Tensor) -> Tensor:
        """Of a part in sight, the features at some places among those in sight."""
        seen = len(self.features) * self.objective.num_outputs
        return self._append_ungated(part[0, :seen].view(len(self.features), -1).index_select(0, at).view(1, -1), part[:, seen:])

    def assign(self, at: Tensor, part: Tensor, small: Tensor) -> Tensor:
        """The part with what `narrow` gave, changed, back in its place; in place, as nobody else holds it."""
        seen, touched = len(self.features) * self.objective.num_outputs, len(at) * self.objective.num_outputs
        part[0, :seen].view(len(self.features), -1).index_copy_(0, at, small[0, :touched].view(len(at), -1))
        part[:, seen:] = small[:, touched:]
        return part

    def coordinate_indices(self, at: np.ndarray) -> np.ndarray:
        """Where what `narrow` gives stands in the whole vector."""
        layout = self.objective.layout
        weights = self.features[at][:, None] + np.arange(self.objective.num_outputs) * self.objective.num_features
        return np.concatenate((weights.reshape(-1), np.arange(layout.num_gated, layout.size)))

    @staticmethod
    def _append_ungated(part: Tensor, free: Tensor) -> Tensor:
        return torch.cat((part, free), dim=-1) if free.shape[-1] else part
