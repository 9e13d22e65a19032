"""Sign-HT: signs of the largest updates up, an m-sparse broadcast down, the residual at the server. It is sieve without learned gates.

1. The server sends the top m of its weights.
2. A client sends the signs of the k largest entries of its update and their mean magnitude, the uplink of STC (Sattler et al. 2019,
   arXiv 1903.02891), without STC's residual at the client.
3. theta <- sent + server_rate * mean update + residual_decay * (theta - sent): error feedback (Karimireddy et al. 2019, arXiv 1901.09847).
4. In the last rounds the support is fixed, and replies hold values of m weights without positions, as in sieve.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.error_feedback import ErrorFeedback
from fedsieve.algorithms.option_rules import require_positive
from fedsieve.core import budgets, topk
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.quantization import quantize_signs
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Server(NamedTuple):
    """All weights: those of the next broadcast and the residual."""

    weights: Tensor
    layout: Layout


class Client(NamedTuple):
    """The weights of a stack of clients, and the broadcast from which all of them started."""

    weights: Tensor
    packet: Packet
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class SignHT(ErrorFeedback):
    """Signs of the largest updates, error feedback at the server, m-sparse broadcasts."""

    learning_rate: float = 2.0
    batch_size: int | Literal["all"] = 64
    client_weighting: ClientWeighting = field(default=ClientWeighting.SQRT, metadata={"section": "federation"})
    server_learning_rate: float = 2.0
    reply_entries: float = 2.0
    """k: number of signs in a reply while searching, relative to m"""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        require_positive(reply_entries=self.reply_entries)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights."""
        return Server(weights, layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the top m weights."""
        mask = topk.top_mask(server.weights.abs(), self.message_budget(server.layout, clock), server.layout.groups)
        return sparse_packet(topk.mask_to_indices(mask), {"weights": server.weights}, self.broadcast_bits(clock), draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        return Client(packet.field_dense("weights", dtype), packet, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        gradient, step_size = self.gradient_and_step_size(objective, client.weights, batch, clock)
        return client._replace(weights=client.weights - step_size * gradient)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the signs of the k largest entries of the update while searching, then its values on the support of the broadcast."""
        update = client.weights - client.packet.field_dense("weights", client.weights.dtype)
        if not self.is_searching(clock):
            return self.encode_on_support(client.packet, update, draw)
        mask = topk.top_mask(update.abs(), self.allocate(client.layout, self.num_signs(client.layout, clock)), client.layout.groups)
        support = topk.mask_to_indices(mask)
        is_dense = support.shape[-1] == client.layout.size
        return Packet(client.layout.size, None if is_dense else support, {"update": quantize_signs(update.gather(-1, support))}, {})

    def num_signs(self, layout: Layout, clock: Clock) -> int:
        """Return k, at most all weights that the density counts."""
        num_kept = budgets.num_kept(self.message_density(clock), layout.num_gated)
        return min(max(int(self.reply_entries * num_kept), 1), layout.num_gated)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta <- sent + server_rate * mean update + residual_decay * (theta - sent)."""
        update = self.aggregate_updates(packet, replies, server.weights, clock, draw)["update"]
        return server._replace(weights=self.apply_update(server.weights, packet, update, clock))

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return all weights."""
        return server.weights

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The update."""
        return frozenset({"update"})

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change."""
        return EngineSupport(vector_fields=("weights",), replies_have_equal_length=self.replies_have_equal_length)
