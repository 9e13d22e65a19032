"""A step on the features a batch of sparse rows touches, in tables (features, outputs) of theta~ and phi that hold more of them."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core import constraint, gates
from fedsieve.core.constraint import Form
from fedsieve.core.gates import LOG_ALPHA_LIMIT, HardConcrete
from fedsieve.kernels import flat, passes_over, sparse_passes


class Opened(NamedTuple):
    """Of each touched coordinate: theta = theta~ z, the gate z at its median, and theta~ dz/dphi."""

    theta: Tensor
    value: Tensor
    lever: Tensor


class Tables(NamedTuple):
    """theta~ and phi, feature by feature."""

    weights: Float[Tensor, "f c"]
    log_alpha: Float[Tensor, "f c"]

    def compiled(self) -> bool:
        """Whether passes over them are."""
        return passes_over(*self, size=self.weights.numel()) is not None

    def opened(self, shape: HardConcrete, at: Int64[Tensor, " n"]) -> Opened:
        """The features at some places."""
        if self.compiled():
            found = Opened(*(torch.empty(1, len(at) * self.weights.shape[1]) for _ in range(3)))
            sparse_passes().touched_gates(*(part.numpy() for part in (*self, at)), *shape, *map(flat, found))
            return found
        weights, log_alpha = self._at(at)
        gate = gates.deterministic(shape, log_alpha)
        return Opened(weights * gate.value, gate.value, gate.slope.mul_(weights))

    def step(
        self,
        shape: HardConcrete,
        at: Int64[Tensor, " n"],
        by_weight: Float[Tensor, "1 m"],
        by_gate: tuple[Float[Tensor, "1 m"], Float[Tensor, "1 m"]],
        size: Float[Tensor, "1 1"],
        multiplier: Float[Tensor, " 1"],
        form: Form,
        count: int,
        rate: float,
    ) -> None:
        """theta~ - eta g z, and `constraint.descend` of phi along the product of `by_gate`: in place."""
        if self.compiled():
            scale = float(multiplier) / (1 if form is Form.COUNT else count)
            tables, moves = (part.numpy() for part in (*self, at)), map(flat, (by_weight, *by_gate))
            sparse_passes().touched_step(*tables, *moves, float(size), shape.offset, scale, rate, LOG_ALPHA_LIMIT)
            return
        weights, log_alpha = self._at(at)
        turned = constraint.descend(shape, log_alpha, torch.mul(*by_gate), multiplier, form, count, rate)
        self.weights.index_copy_(0, at, weights.addcmul_(size, by_weight, value=-1).view(len(at), -1))
        self.log_alpha.index_copy_(0, at, turned.view(len(at), -1))

    def _at(self, at: Int64[Tensor, " n"]) -> list[Float[Tensor, "1 m"]]:
        return [table.index_select(0, at).view(1, -1) for table in self]
