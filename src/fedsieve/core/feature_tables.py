"""A gated step on the features of a sparse batch, in place in tables (features, outputs) of theta~ and phi that hold more features."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core import constraint, gates
from fedsieve.core.constraint import ConstraintScale
from fedsieve.core.gates import LOG_ALPHA_LIMIT, NOISE_MARGIN, HardConcrete
from fedsieve.kernels import accelerated


class ActiveGates(NamedTuple):
    """Of each touched coordinate: theta = theta~ z, the gate z, and theta~ dz/dphi."""

    theta: Tensor
    value: Tensor
    weighted_derivative: Tensor


TABLES = ("self.weights", "self.log_alpha")


class FeatureTables(NamedTuple):
    """theta~ and phi, feature by feature."""

    weights: Float[Tensor, "f c"]
    log_alpha: Float[Tensor, "f c"]

    @accelerated("sparse", "active_gates", tensors=(*TABLES, "noise"), size=lambda self, *_: self.weights.numel(), returns=ActiveGates)
    def active_gates(
        self,
        shape: HardConcrete,
        feature_indices: Int64[Tensor, " n"],
        noise: Float[Tensor, "1 m"] | None = None,
        noise_margin: float = NOISE_MARGIN,
    ) -> ActiveGates:
        """The gates of some features at their medians, or sampled with uniform noise."""
        weights, log_alpha = self._select_features(feature_indices)
        gate = gates.median_gates(shape, log_alpha) if noise is None else gates.sample(shape, log_alpha, noise, noise_margin)
        return ActiveGates(weights * gate.value, gate.value, gate.derivative.mul_(weights))

    @accelerated("sparse", "gated_step", tensors=TABLES, size=lambda self, *_: self.weights.numel())
    def gated_step(
        self,
        shape: HardConcrete,
        feature_indices: Int64[Tensor, " n"],
        weight_gradient: Float[Tensor, "1 m"],
        gate_gradient_factors: tuple[Float[Tensor, "1 m"], Float[Tensor, "1 m"]],
        step_size: Float[Tensor, "1 1"],
        multiplier: Float[Tensor, " 1"],
        constraint_scale: ConstraintScale,
        num_weights: int,
        rate: float,
        limit: float = LOG_ALPHA_LIMIT,
    ) -> None:
        """theta~ - eta g z, and `constraint.descend` of phi along the product of `by_gate`: in place."""
        weights, log_alpha = self._select_features(feature_indices)
        turned = constraint.step_log_alpha(
            shape, log_alpha, torch.mul(*gate_gradient_factors), multiplier, constraint_scale, num_weights, rate, limit
        )
        self.weights.index_copy_(0, feature_indices, weights.addcmul_(step_size, weight_gradient, value=-1).view(len(feature_indices), -1))
        self.log_alpha.index_copy_(0, feature_indices, turned.view(len(feature_indices), -1))

    def _select_features(self, feature_indices: Int64[Tensor, " n"]) -> list[Float[Tensor, "1 m"]]:
        return [table.index_select(0, feature_indices).view(1, -1) for table in self]
