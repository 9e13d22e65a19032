"""FedAvg (McMahan et al. 2017, arXiv 1602.05629): dense messages, local SGD, weighted averaging. To add an algorithm, copy this file.

The class has the methods of the `Algorithm` protocol in the order in which a round calls them. Options and helpers that all algorithms
share are in `base.py`. Register a new algorithm in `__init__.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.common_options import DENSITY_SCHEDULE_OPTIONS
from fedsieve.core.optimizers import Moments, initial_moments
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Server(NamedTuple):
    """The server's weights and the state of its optimizer."""

    theta: Tensor
    moments: Moments
    layout: Layout


class Client(NamedTuple):
    """The weights of a stack of clients."""

    theta: Tensor


@dataclass(frozen=True, kw_only=True)
class FedAvg(BaseAlgorithm):
    """Only the final model is projected to m weights (requirement 38)."""

    unsupported_options: ClassVar[frozenset[str]] = DENSITY_SCHEDULE_OPTIONS

    residual_decay: float = 1.0
    """fraction of the quantization error of a broadcast that the server keeps for the next round"""

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start from the given weights."""
        return Server(weights, initial_moments(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send all weights."""
        return dense_packet({"theta": server.theta}, self.bits, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast."""
        return Client(packet.field_dense("theta", dtype))

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- theta - eta g."""
        gradient, step_size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return Client(client.theta - step_size * gradient)

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send all weights."""
        return dense_packet({"theta": client.theta}, self.bits, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """Step from the broadcast towards the mean of the replies."""
        return average_weights(self, server, packet, replies, clock, draw)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return all weights."""
        return server.theta

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The weights."""
        return frozenset({"theta"})

    @property
    def engine_support(self) -> EngineSupport:
        """A weight whose gradient is zero does not change."""
        return EngineSupport(vector_fields=("theta",), replies_have_equal_length=self.replies_have_equal_length)


def average_weights(algorithm: BaseAlgorithm, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
    """theta <- sent + server step towards the mean + residual_decay * (theta - sent)."""
    sent = packet.field_dense("theta", server.theta.dtype)
    mean = algorithm.aggregate_replies(packet, replies, server.theta, clock, draw)["theta"]
    theta, moments = algorithm.server_update(server.moments, sent, mean)
    return server._replace(theta=theta + algorithm.residual_decay * (server.theta - sent), moments=moments)
