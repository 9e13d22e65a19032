"""The readable reference: one client after another, every message really turned into bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.streams import drawer
from fedsieve.core.types import Algorithm, Batch, Bytes, Clock, Exchanged, Objective, Reply
from fedsieve.engines.rows import Rows, deal
from fedsieve.train import first_broadcast


def stacked(client: Any, k: int) -> Any:
    """k copies of a client's state along a new first axis."""
    return type(client)(*(part.expand(k, *part.shape) if isinstance(part, torch.Tensor) else part for part in client))


def weigh(encoded: wire.Encoded) -> Bytes:
    """A message's three sizes."""
    return Bytes(encoded.formula, encoded.payload, encoded.length)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """An exchange that visits each client in turn and passes bytes."""

    algorithm: Algorithm
    objective: Objective
    rows: Rows
    seed: int
    fingerprint: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> Exchanged:
        """Send, let each client compute, collect."""
        address = wire.Address(self.fingerprint, clock.round, clock.exchange)
        encoded = wire.encode(packet, address)
        message = encoded.join()
        support = self._opened(packet, clock).support
        down, up, replies, rejected = Bytes(), Bytes(), [], []
        for client in clients:
            answer = self.answer(clock, message, address, client)
            down, up = down.plus(weigh(encoded)), up.plus(weigh(answer))
            try:
                reply = wire.decode(answer.join(), address, self.objective.layout.size, support)
                replies.append(Reply(client, reply, self.rows.examples(client)))
            except wire.PacketError as problem:
                rejected.append((client, str(problem)))
        return Exchanged(replies, rejected, down, up)

    def answer(self, clock: Clock, message: bytes, address: wire.Address, client: int) -> wire.Encoded:
        """What one client does with a message."""
        packet = self._opened(wire.decode(message, address, self.objective.layout.size), clock)
        state = stacked(self.algorithm.client_init(packet, self.objective.layout, clock, self.dtype), 1)
        rows = self.rows.of(client)
        deck = deal(self.seed, clock, client, len(rows.x))
        smoothness = self.rows.smoothness([client]) if self.algorithm.needs_smoothness else None
        for step in range(self.algorithm.local_steps):
            picked = deck(self.algorithm.batch_rows, step, self.algorithm.local_steps)
            batch = Batch(rows.x[picked][None], rows.y[picked][None], smoothness)
            draw = drawer(self.seed, clock.round, clock.exchange, step, [client], self.dtype, self.device)
            state = self.algorithm.client_step(self.objective, state, batch, clock, draw)
        draw = drawer(self.seed, clock.round, clock.exchange, self.algorithm.local_steps, [client], self.dtype, self.device)
        return wire.encode(self.algorithm.client_reply(state, clock, draw).at(0), address, packet.support)

    def _opened(self, packet: Packet, clock: Clock) -> Packet:
        if packet.seed is None:
            return packet
        return first_broadcast(self.algorithm, self.objective, packet.seed, clock, self.dtype, self.device)
