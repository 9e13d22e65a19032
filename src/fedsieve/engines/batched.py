"""The default: the whole cohort at once, one batched product for all clients; bytes are counted by encoding for real."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.streams import drawer
from fedsieve.core.types import Algorithm, Batch, Bytes, Clock, Exchanged, Objective, Reply
from fedsieve.engines.loop import stacked, weigh
from fedsieve.engines.rows import Rows, deal
from fedsieve.train import first_broadcast

CACHED_NUMBERS = 640_000
"""Rows times features of the clients stepped together: more than this no longer stays in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class Batched:
    """An exchange that steps stacks of clients."""

    algorithm: Algorithm
    objective: Objective
    rows: Rows
    seed: int
    fingerprint: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    sample_bytes: bool = False
    """encode one reply an exchange and count it for all: their sizes differ only where supports do"""

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> Exchanged:
        """Send, let the cohort compute, collect."""
        address = wire.Address(self.fingerprint, clock.round, clock.exchange)
        sent = packet
        if packet.seed is not None:
            packet = first_broadcast(self.algorithm, self.objective, packet.seed, clock, self.dtype, self.device)
        received = self.algorithm.client_init(packet, self.objective.layout, clock, self.dtype)
        replies: list[Reply] = []
        rejected: list[tuple[int, str]] = []
        down, up = weigh(wire.encode(sent, address)).times(len(clients)), Bytes()
        for chunk in self._chunks(clients):
            packets = self._answers(clock, received, chunk)
            for i, (client, finite) in enumerate(zip(chunk, packets.finite().tolist(), strict=True)):
                reply = packets.at(i)
                if not self.sample_bytes:
                    up = up.plus(weigh(wire.encode(reply, address, packet.support)))
                elif up == Bytes():
                    up = weigh(wire.encode(reply, address, packet.support)).times(len(clients))
                if finite:
                    replies.append(Reply(client, reply, self.rows.examples(client)))
                else:
                    rejected.append((client, "a value is not finite"))
        return Exchanged(replies, rejected, down, up)

    def _chunks(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """Clients that can be stacked (as many rows a step) and fit the cache together, in order."""
        size = self.algorithm.batch_rows
        for rows, group in groupby(clients, key=lambda client: size or self.rows.examples(client)):
            members = list(group)
            width = max(1, CACHED_NUMBERS // (rows * self.rows.all.x[0].numel()))
            yield from (members[i : i + width] for i in range(0, len(members), width))

    def _answers(self, clock: Clock, received: object, clients: list[int]) -> Packet:
        """What a stack of clients makes of the broadcast."""
        algorithm, rows = self.algorithm, self.rows
        state = stacked(received, len(clients))
        decks = [deal(self.seed, clock, client, rows.examples(client)) for client in clients]
        smoothness = rows.smoothness(clients) if algorithm.needs_smoothness else None
        for step in range(algorithm.local_steps):
            hands = [deck(algorithm.batch_rows, step, algorithm.local_steps) for deck in decks]
            order = np.concatenate([hand + rows.offsets[c] for hand, c in zip(hands, clients, strict=True)])
            picked = torch.from_numpy(order).to(rows.all.x.device)
            shape = (len(clients), len(hands[0]))
            x = rows.all.x.index_select(0, picked).view(*shape, *rows.all.x.shape[1:])
            y = rows.all.y.index_select(0, picked).view(*shape, *rows.all.y.shape[1:])
            draw = drawer(self.seed, clock.round, clock.exchange, step, clients, self.dtype, self.device)
            state = algorithm.client_step(self.objective, state, Batch(x, y, smoothness), clock, draw)
        draw = drawer(self.seed, clock.round, clock.exchange, algorithm.local_steps, clients, self.dtype, self.device)
        return algorithm.client_reply(state, clock, draw)
