"""A star over the ranks of a cluster: rank 0 is the server, and all ranks train a part of each cohort.

An exchange is one message to every rank and one back: the encoded broadcast, then the encoded replies of its clients. What clients keep
between their rounds is part of the run's state at rank 0, and goes with these messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import NO_MEMORIES, ClientMemories, ClientMemory, Clock, ExchangeResult, Reply, Traffic
from fedsieve.runtime.batched import cache_sized_chunks
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import Message, choose_messages
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.local_training import ClientEngine
from fedsieve.runtime.ranks import Ranks, Tensors, join_bytes, split_bytes
from fedsieve.runtime.sparse_training import SparseClientEngine, make_client_engine
from fedsieve.runtime.workers import split_evenly


@dataclass(frozen=True, kw_only=True)
class ClusterExchange:
    """An exchange whose clients are trained by all ranks."""

    context: RunContext
    data: ClientData
    ranks: Ranks

    @cached_property
    def client_engine(self) -> ClientEngine | SparseClientEngine:
        """The engine that trains the clients of this rank."""
        return make_client_engine(self.context, self.data)

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories = NO_MEMORIES) -> ExchangeResult:
        """Send the packet to the clients at all ranks and return their replies, in the order of the clients."""
        context, message_id = self.context, self.context.message_id(clock)
        support = context.resolve_seed(packet, clock).support
        messages = choose_messages(context, clock, packet, clients, memories)
        downlink = Traffic()
        for group in context.message_groups(clients):
            downlink = downlink + wire.measure_traffic([messages[group[0]].encoded] * len(group))
        parts = split_evenly(clients, [1] * len(clients), self.ranks.count)
        tasks = [join_task(clock, part, messages, memories.by_client) for part in parts]
        sending = self.ranks.start(dict(enumerate(tasks[1:], 1)))
        answers = [self.train_part(tasks[0]), *(self.ranks.receive(rank) for rank in range(1, len(parts)))]
        self.ranks.finish(sending)
        replies, rejected, uplink, kept = [], [], Traffic(), {}
        for part, answer in zip(parts, answers, strict=True):
            uplink = uplink + Traffic(*answer["traffic"].tolist())
            kept |= split_memories(answer)
            for client, data in zip(part, split_bytes(answer), strict=True):
                try:
                    reply = wire.decode(data, message_id, context.objective.layout.size, support)
                    replies.append(Reply(client, reply, self.data.claimed_examples[client]))
                except wire.PacketError as error:
                    rejected.append((client, str(error)))
        return ExchangeResult(replies, rejected, downlink, uplink, kept)

    def train_part(self, task: Tensors) -> dict[str, Tensor]:
        """Return the encoded replies of the clients of one rank, their traffic, and what these clients keep."""
        context, clients = self.context, task["clients"].tolist()
        clock, kept = Clock(*task["clock"].tolist()), split_memories(task)
        message_id, encoded, uplink = context.message_id(clock), [], Traffic()
        messages = dict(zip(clients, (split_bytes(task)[i] for i in task["message"].tolist()), strict=True))
        for group in context.message_groups(clients):
            received = wire.decode(messages[group[0]], message_id, context.objective.layout.size, context.known_support, accept_lists=True)
            packet = context.receive(received, clock, kept.get(group[0]))
            for replies in self.client_engine.train(packet, clock, cache_sized_chunks(context, self.data, group), kept):
                stack = wire.encode_stack(replies, replies.stack_size, message_id, packet.support)
                encoded, uplink = encoded + stack, uplink + wire.measure_traffic(stack)
        return {
            "traffic": torch.tensor(list(vars(uplink).values())),
            **join_bytes([each.to_bytes() for each in encoded]),
            **join_memories(kept),
        }

    def serve(self) -> None:
        """Train the clients that rank 0 sends, until it ends the run."""
        while True:
            self.ranks.answer(self.train_part(self.ranks.receive(0)))


def join_task(clock: Clock, clients: Sequence[int], messages: Mapping[int, Message], memories: Mapping[int, ClientMemory]) -> Tensors:
    """Return the message to one rank: clock, clients, the number of each client's downlink message, these messages, and memories."""
    distinct = {id(messages[client].encoded): messages[client].encoded for client in clients}
    numbers = {key: number for number, key in enumerate(distinct)}
    return {
        "clock": torch.tensor(clock),
        "clients": torch.tensor(clients),
        "message": torch.tensor([numbers[id(messages[client].encoded)] for client in clients]),
        **join_bytes([encoded.to_bytes() for encoded in distinct.values()]),
        **join_memories({client: memories[client] for client in clients if client in memories}),
    }


def join_memories(memories: Mapping[int, ClientMemory]) -> dict[str, Tensor]:
    """Return what clients keep as tensors named by their round, client and vector."""
    return {
        f"{memory.round}.{client}.{name}": vector.contiguous()
        for client, memory in memories.items()
        for name, vector in memory.vectors.items()
    }


def split_memories(message: Tensors) -> dict[int, ClientMemory]:
    """Return what clients keep."""
    memories: dict[int, ClientMemory] = {}
    for key in sorted(key for key in message if "." in key):
        round, client, name = key.split(".", 2)
        memories.setdefault(int(client), ClientMemory(int(round), {})).vectors[name] = message[key]
    return memories
