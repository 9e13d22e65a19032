"""FedIter-HT (Tong et al. 2022): hard thresholding after every local step and after averaging."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.averaging import Client
from fedsieve.algorithms.fed_ht import Thresholding
from fedsieve.core import budgets, topk
from fedsieve.core.packets import Packet, SparseVector
from fedsieve.core.random import Draw
from fedsieve.core.types import Clock, Layout


@dataclass(frozen=True, kw_only=True)
class FedIterHT(Thresholding):
    """theta <- H_m(theta - eta g) at every local step; sparse messages both ways (requirement 37)."""

    learning_rate: float = 1.5
    batch_size: int | Literal["all"] = 64

    @property
    def needs_all_nonzero_weights(self) -> bool:
        """H_m compares all weights."""
        return True

    def project(self, theta: Float[Tensor, "k p"], client: Client, layout: Layout, clock: Clock) -> Float[Tensor, "k p"]:
        """H_m; where only some coordinates are in sight (sparse rows), all others are zero and m is the same."""
        parts = self.message_budget(client.layout, clock)
        if layout.size != client.layout.size:
            parts = budgets.restrict_budget(parts, layout.num_gated, layout.num_ungated)
        kept = topk.top_mask(theta.abs(), parts, layout.groups)
        return torch.where(kept, theta, torch.zeros_like(theta))

    def decode_sparse(self, packet: Packet, dtype: torch.dtype) -> dict[str, SparseVector]:
        """A reply is all that a client holds: what it dropped is zero, not unchanged, also in a difference."""
        return {
            name: part._replace(default=torch.zeros_like(part.values[..., 0]))
            for name, part in super().decode_sparse(packet, dtype).items()
        }

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """The m weights that are left."""
        return self.encode_top(client.theta, client.layout, clock, draw)
