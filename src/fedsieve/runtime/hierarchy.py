"""A tree of aggregators between the clients and the server, as a wrapper around any exchange.

Down, an aggregator receives each message once and passes it on. Up, it joins the replies below it into one bundle, in client order. The
root averages the replies as the server of a star does: the model has the same bits, in any precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import NO_MEMORIES, ClientMemories, Clock, ExchangeResult, StackedReplies
from fedsieve.runtime.context import RunContext

BUNDLE_ENTRY_BYTES = 8
"""Bytes of the client's number and of the length of its reply in a bundle."""


def branching_factor(num_clients: int, levels: int) -> int:
    """Return how many children each aggregator has at most, so that all nodes of the tree have about as many."""
    return max(2, ceil(num_clients ** (1 / (levels + 1)) - 1e-9))


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """An exchange over a tree; level 1 are the links of the root."""

    exchange: Any
    num_clients: int
    levels: int

    @property
    def context(self) -> RunContext:
        """What server and clients share."""
        return self.exchange.context

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories = NO_MEMORIES) -> ExchangeResult:
        """Exchange messages with the clients, and count the bytes of every link between aggregators."""
        result = self.exchange(clock, packet, clients, memories)
        message_id = self.context.message_id(clock)
        broadcast = wire.encode(packet, message_id).length
        lengths = self.reply_lengths(clock, packet, result)
        branching, links = branching_factor(self.num_clients, self.levels), {}
        for level in range(1, self.levels + 1):
            width = branching ** (self.levels + 1 - level)
            for client in clients:
                links[f"{level}.{client // width}"] = broadcast
            for client, length in lengths.items():
                links[f"{level}.{client // width}"] += length + BUNDLE_ENTRY_BYTES
        return result._replace(links=links)

    def reply_lengths(self, clock: Clock, packet: Packet, result: ExchangeResult) -> dict[int, int]:
        """Return the bytes of each client's reply."""
        message_id, support = self.context.message_id(clock), self.context.resolve_seed(packet, clock).support
        if isinstance(result.replies, StackedReplies):
            encoded = wire.encode_stack(result.replies.packet, len(result.replies), message_id, support)
        else:
            encoded = [wire.encode(reply.packet, message_id, support) for reply in result.replies]
        return {client: message.length for client, message in zip(result.clients, encoded, strict=True)}
