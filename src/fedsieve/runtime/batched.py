"""The default exchange: the cohort in stacks, on all cores; bytes are counted on encoded messages, all or one per exchange."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet, concatenate
from fedsieve.core.types import NO_MEMORIES, ClientMemories, ClientMemory, Clock, ExchangeResult, Reply, StackedReplies, Traffic
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import choose_messages
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.local_training import ClientEngine
from fedsieve.runtime.sparse_training import SparseClientEngine, make_client_engine
from fedsieve.runtime.workers import SharedWork, split_evenly

CACHE_FLOATS = 800_000
"""Numbers of the clients that train together (examples and a few vectors as long as the model) that fit into a core's cache."""
VECTORS_PER_CLIENT = 8
"""Vectors as long as the model that a local step of one client uses."""


class Job(NamedTuple):
    """Clients that train together, and the message they receive."""

    packet: Packet
    clients: list[int]


TrainedStacks = tuple[list[Packet], Traffic, dict[int, ClientMemory]]
"""Stacks of replies, the bytes of their messages, and what their clients keep."""


@dataclass(frozen=True, kw_only=True)
class BatchedEngine:
    """An exchange that trains stacks of clients and passes tensors."""

    context: RunContext
    data: ClientData
    sample_bytes: bool = False
    """encode one reply per exchange and count it for all; the sizes of replies differ only in their positions"""
    num_workers: int = 1
    """the most processes among which the stacks are divided; replies and bytes do not depend on it"""
    shared_work: SharedWork = field(default_factory=SharedWork, init=False, compare=False, repr=False)

    @cached_property
    def client_engine(self) -> ClientEngine | SparseClientEngine:
        """The engine that trains the clients."""
        return make_client_engine(self.context, self.data)

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories = NO_MEMORIES) -> ExchangeResult:
        """Send the packet to the clients and return their replies."""
        support = self.context.resolve_seed(packet, clock).support
        messages = choose_messages(self.context, clock, packet, clients, memories)
        kept = {client: memories.by_client[client] for client in clients if client in memories.by_client}
        downlink, uplink, stacks, jobs = Traffic(), Traffic(), [], []
        # a client that caught up starts from weights of its own; all others start from the broadcast
        for group in self.context.message_groups(clients):
            message = messages[group[0]]
            downlink = downlink + wire.measure_traffic([message.encoded] * len(group))
            jobs += [Job(message.packet, chunk) for chunk in cache_sized_chunks(self.context, self.data, group)]
        trained = [self._train_stacks(clock, support, jobs, kept)] if self.num_workers == 1 else self._train_all(clock, support, jobs, kept)
        for replies, traffic, memory in trained:
            stacks += replies
            uplink = uplink + traffic
            kept |= memory
        if self.sample_bytes:
            message_id = self.context.message_id(clock)
            uplink = wire.measure_traffic(wire.encode_stack(stacks[0].unstack()[0], 1, message_id, support) * len(clients))
        counts = [self.data.claimed_examples[client] for client in clients]
        if (stack := concatenate(stacks)) is not None:
            return ExchangeResult(StackedReplies(clients, stack, counts), [], downlink, uplink, kept)
        packets = [packet for stack in stacks for packet in stack.unstack()]
        return ExchangeResult([Reply(*reply) for reply in zip(clients, packets, counts, strict=True)], [], downlink, uplink, kept)

    def _train_all(
        self, clock: Clock, support: Tensor | None, jobs: list[Job], memories: Mapping[int, ClientMemory]
    ) -> list[TrainedStacks]:
        """Return what `_train_stacks` returns, computed here or, if that saves time, in parts by all workers.

        Which clients form a stack does not depend on the number of workers, and neither does any bit of a reply.
        """
        pool = self.shared_work.pool
        parts = split_evenly(jobs, [len(job.clients) for job in jobs], self.num_workers if pool is None else pool.size)
        if len(parts) == 1:
            return [self._train_stacks(clock, support, jobs, memories)]
        kept = ({client: memories[client] for job in part for client in job.clients if client in memories} for part in parts)
        return self.shared_work.map(
            self._train_stacks,
            (clock, support, jobs, memories),
            [(clock, support, part, own) for part, own in zip(parts, kept, strict=True)],
            [sum(len(job.clients) for job in part) for part in parts],
            (clock.num_rounds - clock.round - 1) * self.context.workload.exchanges,
        )

    def _train_stacks(
        self, clock: Clock, support: Tensor | None, jobs: Sequence[Job], memories: Mapping[int, ClientMemory]
    ) -> TrainedStacks:
        """Train stacks of clients, those with the same message one after another.

        With catch-up messages each client is one stack, because the broadcast that it reconstructs depends on its memory.
        """
        message_id, kept, uplink, stacks = self.context.message_id(clock), dict(memories), Traffic(), []
        for _, group in groupby(jobs, key=lambda job: (id(job.packet), job.clients[0] if self.context.has_catch_up else None)):
            same = list(group)
            received = self.context.receive(same[0].packet, clock, kept.get(same[0].clients[0]))
            for replies in self.client_engine.train(received, clock, (job.clients for job in same), kept):
                stacks.append(replies)
                if not self.sample_bytes:
                    uplink = uplink + wire.measure_traffic(wire.encode_stack(replies, replies.stack_size, message_id, support))
        return stacks, uplink, kept


def cache_sized_chunks(context: RunContext, data: ClientData, clients: Sequence[int]) -> Iterator[list[int]]:
    """Yield clients that fit into the cache together, in order; clients with sparse examples one by one."""
    batch_size, layout = context.workload.batch_size, context.objective.layout
    for size, group in groupby(clients, key=lambda client: batch_size or data.num_examples[client]):
        members = list(group)
        floats = size * data.num_features + VECTORS_PER_CLIENT * layout.size
        width = 1 if data.is_sparse else max(1, CACHE_FLOATS // floats)
        yield from (members[i : i + width] for i in range(0, len(members), width))
