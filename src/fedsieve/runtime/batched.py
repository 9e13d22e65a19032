"""The default exchange: the whole cohort at once; bytes are counted on encoded messages, all or one per exchange."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from fedsieve import wire
from fedsieve.core.packets import Packet, concatenate
from fedsieve.core.types import NO_MEMORIES, ClientMemories, Clock, ExchangeResult, Reply, StackedReplies, Traffic
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import Message, choose_messages
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.local_training import ClientEngine
from fedsieve.runtime.sparse_training import SparseClientEngine, make_client_engine

CACHE_FLOATS = 800_000
"""Numbers of the clients that train together (examples and a few vectors as long as the model) that fit into a core's cache."""
VECTORS_PER_CLIENT = 8
"""Vectors as long as the model that a local step of one client uses."""


@dataclass(frozen=True, kw_only=True)
class BatchedEngine:
    """An exchange that trains stacks of clients and passes tensors."""

    context: RunContext
    data: ClientData
    sample_bytes: bool = False
    """encode one reply per exchange and count it for all; the sizes of replies differ only in their positions"""

    @cached_property
    def client_engine(self) -> ClientEngine | SparseClientEngine:
        """The engine that trains the clients."""
        return make_client_engine(self.context, self.data)

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories = NO_MEMORIES) -> ExchangeResult:
        """Send the packet to the clients and return their replies."""
        message_id, support = self.context.message_id(clock), self.context.resolve_seed(packet, clock).support
        messages = choose_messages(self.context, clock, packet, clients, memories)
        downlink, uplink, stacks = Traffic(), Traffic(), []
        kept = {client: memories.by_client[client] for client in clients if client in memories.by_client}
        for message, group in self._group_by_message(messages):
            downlink = downlink + wire.measure_traffic([message.encoded] * len(group))
            received = self.context.receive(message.packet, clock, kept.get(group[0]))
            for replies in self.client_engine.train(received, clock, self._cache_sized_chunks(group), kept):
                stacks.append(replies)
                if not self.sample_bytes:
                    uplink = uplink + wire.measure_traffic(wire.encode_stack(replies, replies.stack_size, message_id, support))
                elif len(stacks) == 1:
                    uplink = wire.measure_traffic(wire.encode_stack(replies.unstack()[0], 1, message_id, support) * len(clients))
        counts = [self.data.num_examples(client) for client in clients]
        if (stack := concatenate(stacks)) is not None:
            return ExchangeResult(StackedReplies(clients, stack, counts), [], downlink, uplink, kept)
        packets = [packet for stack in stacks for packet in stack.unstack()]
        return ExchangeResult([Reply(*reply) for reply in zip(clients, packets, counts, strict=True)], [], downlink, uplink, kept)

    def _group_by_message(self, messages: Mapping[int, Message]) -> list[tuple[Message, list[int]]]:
        """Return the clients that start from the same weights, in order: all of them, or each alone if messages build on memories."""
        memory = self.context.support.memory
        if memory is None or memory.catch_up is None:
            return [(next(iter(messages.values())), list(messages))]
        return [(message, [client]) for client, message in messages.items()]

    def _cache_sized_chunks(self, clients: Sequence[int]) -> Iterator[list[int]]:
        """Yield clients that fit into the cache together, in order; clients with sparse examples one by one."""
        context, data = self.context, self.data
        batch_size, layout = context.workload.batch_size, context.objective.layout
        for size, group in groupby(clients, key=lambda client: batch_size or data.num_examples(client)):
            members = list(group)
            floats = size * data.num_features + VECTORS_PER_CLIENT * layout.size
            width = 1 if data.is_sparse else max(1, CACHE_FLOATS // floats)
            yield from (members[i : i + width] for i in range(0, len(members), width))
