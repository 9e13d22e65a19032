"""The default: the whole cohort at once, one batched product for all clients; bytes are counted on real messages, all or a sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fedsieve import wire
from fedsieve.core.packets import Packet, joined
from fedsieve.core.types import Bytes, Clock, Exchanged, Reply, Stack
from fedsieve.runtime.loop import Loop, weigh

CACHED_NUMBERS = 800_000
"""Numbers of the clients stepped together, rows and a few vectors as long as the model: more no longer stay in a core's cache."""
VECTORS = 8
"""Vectors as long as the model that a step of one client passes through."""


@dataclass(frozen=True, kw_only=True)
class Batched(Loop):
    """An exchange that steps stacks of clients and passes tensors."""

    sample_bytes: bool = False
    """encode one reply an exchange and count it for all: their sizes differ only where supports do"""

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> Exchanged:
        """Send, let the cohort compute, collect."""
        address = self.address(clock)
        received = self.opened(packet, clock)
        begun = self.begin(received, clock)
        stacks: list[Packet] = []
        down, up = weigh(wire.encode(packet, address)).times(len(clients)), Bytes()
        for chunk in self._chunks(clients):
            packets = self.answer(begun, clock, chunk)
            stacks.append(packets)
            if not self.sample_bytes:
                up = up.plus(weigh(*wire.encode_stack(packets, len(chunk), address, received.support)))
            elif up == Bytes():
                up = weigh(wire.encode(packets.at(0), address, received.support)).times(len(clients))
        counts = [self.rows.examples(client) for client in clients]
        if (together := joined(stacks)) is not None:
            return Exchanged(Stack(clients, together, counts), [], down, up)
        parts = [part for stack in stacks for part in stack.split()]
        return Exchanged([Reply(*each) for each in zip(clients, parts, counts, strict=True)], [], down, up)

    def _chunks(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """Clients that can be stacked (as many rows a step) and fit the cache together, in order; sparse rows differ, so one by one."""
        size = self.algorithm.batch_rows
        alone = self.rows.sparse or not self.algorithm.stackable(self.objective.layout)
        for rows, group in groupby(clients, key=lambda client: size or self.rows.examples(client)):
            members = list(group)
            width = 1 if alone else max(1, CACHED_NUMBERS // (rows * self.rows.width + VECTORS * self.objective.layout.size))
            yield from (members[i : i + width] for i in range(0, len(members), width))
