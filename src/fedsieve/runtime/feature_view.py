"""A linear model restricted to some features: the only part that a client with sparse examples computes with."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.protocols import LinearObjective


class FeatureView(NamedTuple):
    """Some features of a linear model, called active.

    A vector over active features is stored feature by feature, (features, outputs), so that a feature is contiguous in memory; ungated
    coordinates follow.
    """

    objective: LinearObjective
    features: np.ndarray
    """increasing"""
    feature_index: Tensor
    """the same as a tensor"""

    @classmethod
    def create(cls, objective: LinearObjective, features: np.ndarray, device: str) -> "FeatureView":
        """Restrict `objective` to `features`."""
        return cls(objective, features, torch.from_numpy(features).to(device))

    @property
    def size(self) -> int:
        """The number of weights of active features."""
        return len(self.features) * self.objective.num_outputs

    def restrict_packet(self, packet: Packet) -> Packet:
        """Return a packet whose support has only active features, as one over the active coordinates and one extra coordinate."""
        assert packet.support is not None
        output, feature = np.divmod(packet.support.numpy(force=True), self.objective.num_features)
        rank = np.empty(self.objective.num_features, dtype=np.int64)
        rank[self.features] = np.arange(len(self.features))
        support = rank[feature] * self.objective.num_outputs + output
        return packet._replace(size=self.size + 1, support=torch.from_numpy(support).to(packet.support.device))

    def global_indices(self, indices: np.ndarray) -> np.ndarray:
        """Return the indices in the whole vector of entries of an active vector; the extra coordinate follows all of them."""
        rank, output = np.divmod(indices, self.objective.num_outputs)
        return output * self.objective.num_features + np.append(self.features, self.objective.layout.size)[rank]

    def gather(self, whole: Tensor) -> Tensor:
        """Return the active part of a vector (1, p)."""
        num_gated = self.objective.layout.num_gated
        matrix = whole[0, :num_gated].view(self.objective.num_outputs, -1).index_select(1, self.feature_index)
        return self._append_ungated(matrix.T.reshape(1, -1), whole[:, num_gated:])

    def scatter(self, whole: Tensor, active: Tensor) -> Tensor:
        """Return a vector (1, p) with its active part replaced."""
        num_gated, result = self.objective.layout.num_gated, whole.clone()
        matrix = result[0, :num_gated].view(self.objective.num_outputs, -1)
        matrix.index_copy_(1, self.feature_index, active[0, : self.size].view(len(self.features), -1).T)
        result[:, num_gated:] = active[:, self.size :]
        return result

    def select(self, indices: Tensor, active: Tensor) -> Tensor:
        """Return the part of an active vector that belongs to some of the active features."""
        matrix = active[0, : self.size].view(len(self.features), -1)
        return self._append_ungated(matrix.index_select(0, indices).view(1, -1), active[:, self.size :])

    def assign(self, indices: Tensor, active: Tensor, selected: Tensor) -> Tensor:
        """Write a part that `select` returned back into the active vector, in place, and return it."""
        num_selected = len(indices) * self.objective.num_outputs
        matrix = active[0, : self.size].view(len(self.features), -1)
        matrix.index_copy_(0, indices, selected[0, :num_selected].view(len(indices), -1))
        active[:, self.size :] = selected[:, num_selected:]
        return active

    def nonzero_features(self, active: Tensor) -> np.ndarray:
        """Return the indices of active features with a nonzero weight."""
        return active[0, : self.size].view(len(self.features), -1).any(1).nonzero()[:, 0].numpy(force=True)

    def coordinate_indices(self, indices: np.ndarray) -> np.ndarray:
        """Return the indices in the whole vector of the entries that `select` returns."""
        layout = self.objective.layout
        weights = self.features[indices][:, None] + np.arange(self.objective.num_outputs) * self.objective.num_features
        return np.concatenate((weights.reshape(-1), np.arange(layout.num_gated, layout.size)))

    @staticmethod
    def _append_ungated(weights: Tensor, ungated: Tensor) -> Tensor:
        return torch.cat((weights, ungated), dim=-1) if ungated.shape[-1] else weights
