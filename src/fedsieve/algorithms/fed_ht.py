"""Fed-HT (Tong et al. 2022): hard thresholding at the server only. The uplink is dense (decision D4)."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.averaging import Averaging, Server
from fedsieve.core import topk
from fedsieve.core.packets import Packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Clock, Layout


@dataclass(frozen=True, kw_only=True)
class Thresholding(Averaging):
    """The server sends the largest m weights."""

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """H_m(theta)."""
        return self.encode_top(server.theta, server.layout, clock, draw)

    def encode_top(self, theta: Float[Tensor, "*k p"], layout: Layout, clock: Clock, draw: Draw) -> Packet:
        """The largest weights of the round's budget as a message."""
        parts = self.message_budget(layout, clock)
        return self.encode_sparse(theta, topk.top_mask(theta.abs(), parts, layout.groups), draw)


@dataclass(frozen=True, kw_only=True)
class FedHT(Thresholding):
    """Sparse downlink, dense uplink."""

    learning_rate: float = 1.5
    batch_size: int | Literal["all"] = 64
