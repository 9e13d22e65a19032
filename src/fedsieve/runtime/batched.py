"""The default: the whole cohort at once, one batched product for all clients; bytes are counted on real messages, all or a sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fedsieve import wire
from fedsieve.core.packets import Packet, concatenate
from fedsieve.core.types import Clock, ExchangeResult, Reply, StackedReplies, Traffic
from fedsieve.runtime.loop import LoopEngine, measure_traffic

CACHE_FLOATS = 800_000
"""Numbers of the clients stepped together, rows and a few vectors as long as the model: more no longer stay in a core's cache."""
VECTORS_PER_CLIENT = 8
"""Vectors as long as the model that a step of one client passes through."""


@dataclass(frozen=True, kw_only=True)
class BatchedEngine(LoopEngine):
    """An exchange that steps stacks of clients and passes tensors."""

    sample_bytes: bool = False
    """encode one reply an exchange and count it for all: their sizes differ only where supports do"""

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> ExchangeResult:
        """Send, let the cohort compute, collect."""
        address = self.message_id(clock)
        received = self.resolve_seed(packet, clock)
        begun = self.initial_state(received, clock)
        stacks: list[Packet] = []
        down, up = measure_traffic(wire.encode(packet, address)) * len(clients), Traffic()
        for chunk in self._cache_sized_chunks(clients):
            packets = self.train_and_reply(begun, clock, chunk)
            stacks.append(packets)
            if not self.sample_bytes:
                up = up + measure_traffic(*wire.encode_stack(packets, len(chunk), address, received.support))
            elif up == Traffic():
                up = measure_traffic(wire.encode(packets.unstack()[0], address, received.support)) * len(clients)
        counts = [self.data.num_examples(client) for client in clients]
        if (together := concatenate(stacks)) is not None:
            return ExchangeResult(StackedReplies(clients, together, counts), [], down, up)
        parts = [part for stack in stacks for part in stack.unstack()]
        return ExchangeResult([Reply(*each) for each in zip(clients, parts, counts, strict=True)], [], down, up)

    def _cache_sized_chunks(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """Clients that can be stacked (as many rows a step) and fit the cache together, in order; sparse rows differ, so one by one."""
        size = self.algorithm.examples_per_step
        alone = self.data.is_sparse or not self.algorithm.replies_have_equal_length(self.objective.layout)
        for rows, group in groupby(clients, key=lambda client: size or self.data.num_examples(client)):
            members = list(group)
            width = (
                1 if alone else max(1, CACHE_FLOATS // (rows * self.data.num_features + VECTORS_PER_CLIENT * self.objective.layout.size))
            )
            yield from (members[i : i + width] for i in range(0, len(members), width))
