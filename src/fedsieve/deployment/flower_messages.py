"""The records of Flower's messages: what broadcasts and replies contain, and how they are read. It imports flwr.

A broadcast contains a packet and the clock. A reply contains a packet, the client's number and its number of examples n_k.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedsieve import wire
from fedsieve.core.types import ClientMemory, Clock

PACKET_TYPE, MEMORY_TYPE = "fedsieve.packet.v1", "fedsieve.memory.v1"
MEMORY_KEY = "memory"
"""In a broadcast, the round of the memory on which it builds; in a reply, the rounds of the memories that the node has."""
TRAIN_MESSAGE, ANNOUNCE_MESSAGE = "train", "query.announce"
FLOWER_ERRORS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "it did not reply in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply came too late",
    ErrorCode.NODE_UNAVAILABLE: "its node is offline",
}
"""Errors that Flower returns for a node without a reply, and how we report them."""
MAX_ROUNDS = 1 << 31
POLL_SECONDS = 0.25
"""Seconds between two requests for replies."""


def to_memory_record(memories: Sequence[ClientMemory]) -> ArrayRecord:
    """Return the memories of one client as Flower's record; an array is named by its round and vector, such as "7.residual"."""
    arrays = {f"{memory.round}.{name}": vector.numpy(force=True) for memory in memories for name, vector in memory.vectors.items()}
    return ArrayRecord(
        {name: Array(dtype=str(one.dtype), shape=one.shape, stype=MEMORY_TYPE, data=one.tobytes()) for name, one in arrays.items()}
    )


def load_memories(state: RecordDict, record_key: str = MEMORY_KEY) -> dict[int, ClientMemory]:
    """Return the memories in the state of a node, by round."""
    memories: dict[int, ClientMemory] = {}
    for key, array in state.array_records.get(record_key, ArrayRecord()).items():
        round, _, name = key.partition(".")
        vector = torch.from_numpy(np.frombuffer(array.data, array.dtype).copy())
        memories.setdefault(int(round), ClientMemory(int(round), {})).vectors[name] = vector
    return memories


def to_array_record(data: bytes) -> ArrayRecord:
    """Wrap a packet's bytes in Flower's record."""
    return ArrayRecord({"packet": Array(dtype="uint8", shape=(len(data),), stype=PACKET_TYPE, data=data)})


def packet_bytes(message: Message) -> bytes:
    """Return the packet in a message, empty if there is none."""
    record = message.content.get("packet") if message.has_content() else None
    array = record.get("packet") if isinstance(record, ArrayRecord) else None
    return b"" if array is None or (array.stype, array.dtype) != (PACKET_TYPE, "uint8") else array.data


def parse_reply(reply: Message) -> tuple[int, int]:
    """Return the client that sent a reply, and its n_k."""
    if reply.has_error() and reply.error.code in FLOWER_ERRORS:
        raise wire.PacketError(FLOWER_ERRORS[reply.error.code])
    if reply.has_error():
        raise wire.PacketError(f"it failed: {' '.join(str(reply.error.reason).split())}")
    record = reply.content.config_records.get("reply", ConfigRecord())
    client, num_examples = record.get("client"), record.get("examples")
    if not (is_count(client) and is_count(num_examples)):
        raise wire.PacketError("its reply lacks the client's number or its number of examples")
    return client, num_examples


def parse_shape(reply: Message) -> tuple[int, ...]:
    """Return the shape of one example of a node."""
    record = reply.content.config_records["reply"].get("row")
    if not isinstance(record, list) or not all(is_count(length) and length > 0 for length in record):
        raise wire.PacketError("its reply lacks the shape of its examples")
    return tuple(length for length in record if is_count(length))


def clock_record(clock: Clock, memory: ClientMemory | None) -> ConfigRecord:
    """Return the clock of a broadcast, and the round of the memory on which it builds if there is one."""
    return ConfigRecord(clock._asdict() | ({} if memory is None else {MEMORY_KEY: memory.round}))


def parse_clock(message: Message) -> Clock:
    """Return the clock of a broadcast."""
    record = message.content.config_records.get("clock", ConfigRecord()) if message.has_content() else ConfigRecord()
    fields = {name: value for name in Clock._fields if is_count(value := record.get(name))}
    if len(fields) < len(Clock._fields):
        raise wire.PacketError("the broadcast lacks its clock")
    clock = Clock(**fields)
    if not clock.round < clock.num_rounds <= MAX_ROUNDS or clock.exchange >= MAX_ROUNDS:
        raise wire.PacketError(f"the clock of the broadcast is impossible: {clock}")
    return clock


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value of a record is a whole number of at least 0; a bool is none."""
    return type(value) is int and value >= 0


class PendingReplies:
    """Replies that are still to come, by the keys of their messages."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[int, str] = {}
        """the identifiers of the messages without a reply"""

    def send(self, messages: Mapping[int, Message]) -> None:
        """Send messages and wait for their replies. Flower may reject a message; then no reply comes."""
        accepted = set(self.grid.push_messages(list(messages.values()))) if messages else set()
        self.waiting |= {key: message.metadata.message_id for key, message in messages.items() if message.metadata.message_id in accepted}

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Yield the replies that have arrived, each with the key of its message."""
        for key, identifier in list(self.waiting.items()):
            for reply in self.grid.pull_messages(
                [identifier]
            ):  # one by one, so that a reply that Flower cannot unpack does not lose the others
                del self.waiting[key]
                yield key, reply


def pause() -> None:
    """Wait between two requests for replies."""
    time.sleep(POLL_SECONDS)


def serialized_size(part: Any) -> int:
    """Return the bytes of a message as Flower serializes it, without HTTP and TLS."""
    return len(part.deflate()) + sum(serialized_size(child) for child in (part.children or {}).values())
