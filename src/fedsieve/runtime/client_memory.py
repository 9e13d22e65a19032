"""What clients keep between their rounds: how engines use it, which message a client with memory receives, and how large it is."""

import os
from collections.abc import MutableMapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.protocols import Algorithm, MemorySupport
from fedsieve.core.types import ClientMemories, ClientMemory, Clock, Layout
from fedsieve.formatting import format_bytes
from fedsieve.runtime.context import RunContext


class Message(NamedTuple):
    """A downlink message, and its bytes."""

    packet: Packet
    encoded: wire.EncodedPacket


def choose_messages(
    context: RunContext, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories
) -> dict[int, Message]:
    """Return the shortest message for each client: the broadcast, or one that builds on the client's memory."""
    message_id = context.message_id(clock)
    known_support = () if context.known_support is None else (context.known_support,)
    broadcast = Message(packet, wire.encode(packet, message_id, *known_support))
    if not context.has_catch_up:
        return dict.fromkeys(clients, broadcast)
    by_round: dict[int | None, Message] = {}
    messages = {}
    for client in clients:
        memory = memories.by_client.get(client)
        known = None if memory is None else memory.round
        if known not in by_round:
            catch_up = (each._replace(buffers=packet.buffers) for each in memories.catch_up(known))
            shorter = (Message(each, wire.encode(each, message_id)) for each in catch_up)
            by_round[known] = min((broadcast, *shorter), key=lambda message: message.encoded.length)
        messages[client] = by_round[known]
    return messages


def restore_memory(context: RunContext, client: Any, clients: Sequence[int], memories: MutableMapping[int, ClientMemory]) -> Any:
    """Return a stack of clients with the vectors that each of them kept."""
    support = context.support.memory
    assert support is not None, "only clients of an algorithm with memory have memories"
    return client._replace(**{name: _stack_kept(getattr(client, name), name, clients, memories) for name in support.vectors})


def _stack_kept(initial: Tensor, name: str, clients: Sequence[int], memories: MutableMapping[int, ClientMemory]) -> Tensor:
    return torch.stack([memories[each].vectors[name].to(initial) if each in memories else initial[i] for i, each in enumerate(clients)])


def store_memory(
    support: MemorySupport,
    client: Any,
    replies: Packet,
    clock: Clock,
    clients: Sequence[int],
    memories: MutableMapping[int, ClientMemory],
) -> None:
    """Replace the memories of a stack of clients by those after their replies."""
    kept = support.after_reply(client, replies)
    if support.catch_up is not None:
        kept[support.catch_up.model_field] = getattr(client, support.catch_up.model_field)
    for i, each in enumerate(clients):
        memories[each] = ClientMemory(clock.round, {name: vectors[i].clone() for name, vectors in kept.items()})


def memory_bytes(algorithm: Algorithm, layout: Layout, num_clients: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of what `num_clients` clients keep: clients x vectors x p x bytes per number, or p = 1 for a number."""
    support = algorithm.engine_support.memory
    return 0 if support is None else num_clients * len(support.names) * (1 if support.one_number else layout.size) * dtype.itemsize


def require_memory(algorithm: Algorithm, layout: Layout, num_clients: int, dtype: torch.dtype) -> None:
    """Raise ValueError if the vectors that `num_clients` clients keep do not fit into this machine's memory."""
    needed, available = memory_bytes(algorithm, layout, num_clients, dtype), physical_memory()
    if needed > available:
        raise ValueError(
            f"{describe_memory(algorithm, layout, num_clients, dtype)}, more than the {format_bytes(available)} of this machine; "
            f"use fewer clients, or an algorithm whose clients keep nothing, such as sieve"
        )


def describe_memory(algorithm: Algorithm, layout: Layout, num_clients: int, dtype: torch.dtype) -> str:
    """Return what the clients keep between their rounds, in words."""
    support = algorithm.engine_support.memory
    assert support is not None
    numbers = "1 number" if support.one_number else f"{layout.size} weights"
    return (
        f"the clients keep {format_bytes(memory_bytes(algorithm, layout, num_clients, dtype))} between their rounds "
        f"({num_clients} clients x {' and '.join(support.names)} x {numbers} x {dtype.itemsize} bytes)"
    )


def physical_memory() -> float:
    """Return the bytes of this machine's memory, infinite if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return inf
