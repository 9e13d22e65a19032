"""Thresholding once per round on both sides, with what was left out kept at the server (decision D4)."""

from dataclasses import dataclass

from fedsieve.algorithms.averaging import Client
from fedsieve.algorithms.fed_ht import Thresholding
from fedsieve.core.packets import Packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Clock


@dataclass(frozen=True, kw_only=True)
class FedRoundHT(Thresholding):
    """Dense local steps; the largest m weights travel, both ways."""

    learning_rate: float = 1.5
    residual_decay: float = 0.9

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """H_m(theta_k)."""
        return self.encode_top(client.theta, client.layout, clock, draw)
