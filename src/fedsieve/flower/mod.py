"""sparse_mod: decodes the messages of SparseStrategy for a Flower client app, and encodes what its training changed."""

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode

from fedsieve import wire
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.random import client_sampler
from fedsieve.core.types import ClientMemory
from fedsieve.deployment.flower_messages import MEMORY_KEY, load_memories, to_memory_record
from fedsieve.flower.array_layout import to_numpy
from fedsieve.flower.black_box import make_reply, received_weights
from fedsieve.flower.sparse_messages import (
    SPARSE_KEY,
    Broadcast,
    bytes_record,
    model_weights,
    replace_arrays,
    single_arrays,
    sparse_record,
)

STATE_KEY = f"{SPARSE_KEY}.{MEMORY_KEY}"
"""Key of the record in the node's context with what its client keeps."""


def sparse_mod(msg: Message, ctxt: Context, call_next: ClientAppCallable) -> Message:
    """Client mod for `ClientApp(mods=[sparse_mod])`: the app receives and returns plain arrays, the network carries sparse messages.

    It needs SparseStrategy in the server app. Messages of other strategies pass unchanged. It must be the first mod, so that other mods
    see plain arrays.
    """
    record = sparse_record(msg)
    if record is None:
        return call_next(msg, ctxt)
    try:
        key, arrays = single_arrays(msg.content)
        broadcast = Broadcast.of(arrays, record)
        settings = broadcast.settings
        algorithm = settings.build_algorithm()
        with wire.refuse_incomplete(broadcast.packet):
            weights = received_weights(algorithm, broadcast.packet) if broadcast.is_training else model_weights(broadcast.packet)
    except (wire.PacketError, ValueError) as error:
        return _error_reply(msg, error)
    msg.content = replace_arrays(msg.content, key, settings.arrays.unflatten(weights, broadcast.dense))
    reply = call_next(msg, ctxt)
    if not broadcast.is_training or reply.has_error():
        return reply
    try:
        reply_key, trained = single_arrays(reply.content)
        encoded = _encode_reply(algorithm, broadcast, to_numpy(trained), ctxt)
    except (wire.PacketError, ValueError, TypeError) as error:
        return _error_reply(msg, error)
    reply.content = replace_arrays(reply.content, reply_key, encoded)
    return reply


def _encode_reply(algorithm: BaseAlgorithm, broadcast: Broadcast, trained: dict[str, np.ndarray], context: Context) -> ArrayRecord:
    """Return the record that is sent instead of the trained arrays; what the client keeps is stored in its node's context."""
    settings, clock, packet = broadcast.settings, broadcast.clock, broadcast.packet
    if (difference := settings.arrays.find_difference(trained)) is not None:
        raise wire.PacketError(f"`train` must return the arrays it received: {difference}")
    weights = settings.arrays.flatten(trained)
    if not weights.isfinite().all():
        raise wire.PacketError("`train` returned a weight that is not finite; lower its learning rate")
    draw = client_sampler(settings.seed, clock.round, clock.exchange, 0, [_client_number(context)], weights.dtype)
    memory = _load_memory(context, broadcast.memory_round)
    reply, kept = make_reply(algorithm, packet, settings.arrays.layout, weights, clock, draw, memory)
    if kept is not None:
        context.state[STATE_KEY] = to_memory_record([kept] if memory is None else [memory, kept])
    encoded = wire.encode(reply, settings.message_id(clock), packet.support)
    return bytes_record(packet=encoded.to_bytes(), dense=settings.arrays.dense_to_bytes(trained))


def _load_memory(context: Context, round: int | None) -> ClientMemory | None:
    """Return what the client kept after the last reply that the server aggregated; None if there is none, or the node has lost it."""
    return None if round is None else load_memories(context.state, STATE_KEY).get(round)


def _client_number(context: Context) -> int:
    """Return the number by which this client's rounding differs from that of others: its partition, or else its node."""
    partition = context.node_config.get("partition-id")
    return partition if type(partition) is int else context.node_id & (2**63 - 1)


def _error_reply(message: Message, error: Exception) -> Message:
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"sparse_mod: {error}"), reply_to=message)
