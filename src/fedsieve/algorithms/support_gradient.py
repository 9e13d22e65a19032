"""One message of the final refit: the kept weights down, and the gradient of all examples of a client at these weights up.

Positions are not sent again: the support is part of the run's context. Not an algorithm that a user can choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core import topk
from fedsieve.core.optimizers import StepRule
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Server(NamedTuple):
    """The weights, zero off the support; after the replies, their mean gradient."""

    theta: Tensor
    support: Tensor


class Client(NamedTuple):
    """The weights of a stack of clients; after the step, the gradient at these weights."""

    theta: Tensor
    support: Tensor


@dataclass(frozen=True, kw_only=True)
class SupportGradient(BaseAlgorithm):
    """Gradients of all examples on a fixed support, in single precision."""

    batch_size: int | Literal["all"] = "all"
    local_steps: int = 1
    step_rule: StepRule = StepRule.CONSTANT
    bits: Literal[32, 16, 8, 4] = 32

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights; nonzero ones and ungated coordinates are the support."""
        kept = weights != 0
        kept[layout.num_gated :] = True
        return Server(weights, topk.mask_to_indices(kept))

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the weights on the support."""
        return sparse_packet(server.support, {"theta": server.theta}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        support = torch.arange(packet.size) if packet.support is None else packet.support
        return Client(packet.field_dense("theta", dtype), support)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """Replace theta by the gradient."""
        return client._replace(theta=objective.gradient(client.theta, batch)[1])

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the gradient on the support."""
        return sparse_packet(client.support, {"gradient": client.theta}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Replace theta by the mean gradient."""
        return server._replace(theta=self.aggregate_replies(packet, replies, server.theta, clock, draw, limit=False)["gradient"])

    def parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return the weights."""
        return server.theta

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return the weights."""
        return server.theta

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """Return the support of the broadcast."""
        return packet.support

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The gradient."""
        return frozenset({"gradient"})

    @property
    def engine_support(self) -> EngineSupport:
        """The gradient of a feature that no example has is zero; all replies have the same support."""

        def zero_skipped(client: Any, num_skipped: Float[Tensor, "k p"], _clock: Clock) -> Any:
            return client._replace(theta=torch.where(num_skipped > 0, torch.zeros_like(client.theta), client.theta))

        return EngineSupport(vector_fields=("theta",), replies_have_equal_length=lambda _: True, apply_skipped_steps=zero_skipped)
