"""Parameter averaging: the round that FedAvg, thresholding, pruning, L1 and masks share. A method says only where it differs."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm, project_to_budget, server_update
from fedsieve.core import optimizers
from fedsieve.core.optimizers import Moments
from fedsieve.core.packets import Packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Objective, Reply


class Server(NamedTuple):
    """theta as the server holds it, before any selection."""

    theta: Tensor
    moments: Moments
    layout: Layout


class Client(NamedTuple):
    """A stack of clients: their weights, and what the broadcast spoke of."""

    theta: Tensor
    mask: Tensor
    """1 where the broadcast spoke, 0 elsewhere"""
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Averaging(BaseAlgorithm, ABC):
    """Broadcast, local SGD, average. `broadcast`, `project` and `client_reply` are where methods differ."""

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """The start, dense."""
        return Server(weights, optimizers.initial_moments(weights), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """All of theta."""
        return self.encode_dense(server.theta, draw)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Begin at the broadcast."""
        theta = packet.field_dense("theta", dtype)
        return Client(theta, packet.support_mask(dtype), layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta <- project(theta - eta g)."""
        gradient, size = self.gradient_and_step_size(objective, client.theta, batch, clock)
        return client._replace(theta=self.project(client.theta - size * gradient, client, objective.layout, clock))

    def project(self, theta: Float[Tensor, "k p"], client: Client, layout: Layout, clock: Clock) -> Float[Tensor, "k p"]:
        """What a method does to the weights after every local step: nothing."""
        return theta

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """All of theta."""
        return self.encode_dense(client.theta, draw)

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """sent + server step towards the mean + memory * (what the broadcast left out)."""
        sent = packet.field_dense("theta", server.theta.dtype)
        theta, moments = server_update(
            self, server.moments, sent, self.aggregate_replies(packet, replies, server.theta, clock, draw)["theta"]
        )
        return server._replace(theta=theta + self.residual_decay * (server.theta - sent), moments=moments)

    def end_round(self, server: Server, clock: Clock) -> Server:
        """Nothing is left to do at the end of a round."""
        return server

    def parameters(self, server: Server) -> Float[Tensor, " p"]:
        """The largest m weights."""
        return project_to_budget(self.final_budget(server.layout), server.theta, server.layout)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """All weights."""
        return server.theta

    def diagnostics(self, server: Server) -> dict[str, Tensor]:
        """No gates, nothing to say."""
        return {}
