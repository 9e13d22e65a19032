"""Messages between SparseStrategy and sparse_mod: a packet, the arrays without gates, and what a client needs to read them.

A client keeps no settings: each broadcast names the algorithm, its options and the arrays of the model, so that a node can join in any
round.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from jaxtyping import Float
from torch import Tensor

from fedsieve import wire
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Clock
from fedsieve.deployment.flower_messages import PACKET_TYPE
from fedsieve.flower.array_layout import ArrayLayout
from fedsieve.flower.black_box import build_algorithm

SPARSE_KEY = "fedsieve"
"""Key of the record that marks a message of SparseStrategy; sparse_mod removes it."""
MODEL_BITS = 16
"""Bits per value of a model that is sent to be evaluated, and of the model that a round returns."""


class RunSettings(NamedTuple):
    """What server and clients of a run share."""

    algorithm_name: str
    density: float
    options: dict[str, Any]
    seed: int
    arrays: ArrayLayout

    def build_algorithm(self) -> BaseAlgorithm:
        """Return the algorithm."""
        return build_algorithm(self.algorithm_name, self.density, self.options)

    def message_id(self, clock: Clock) -> wire.MessageId:
        """Return the identifier of the messages of one round."""
        return wire.MessageId(wire.compute_fingerprint(self.algorithm_name, self.arrays.layout), clock.round, clock.exchange)


class Broadcast(NamedTuple):
    """A message to clients."""

    settings: RunSettings
    clock: Clock
    packet: Packet
    dense: Mapping[str, np.ndarray]
    is_training: bool
    memory_round: int | None = None
    """the last round whose reply of this client was aggregated"""

    def to_records(self) -> tuple[ArrayRecord, ConfigRecord]:
        """Return the message as Flower's records: two arrays of bytes, and what is needed to read them."""
        settings = self.settings
        arrays = bytes_record(
            packet=wire.encode(self.packet, settings.message_id(self.clock)).to_bytes(), dense=settings.arrays.dense_to_bytes(self.dense)
        )
        plain = {
            "algorithm": settings.algorithm_name,
            "density": settings.density,
            "options": settings.options,
            "seed": settings.seed,
            "clock": self.clock,
            "training": self.is_training,
            "memory": self.memory_round,
        }
        described = json.dumps(plain, default=str, separators=(",", ":"))
        return arrays, ConfigRecord({"run": described, "layout": settings.arrays.to_bytes()})

    @classmethod
    def of(cls, arrays: ArrayRecord, record: ConfigRecord) -> "Broadcast":
        """Return the message in Flower's records, or raise PacketError."""
        try:
            plain, layout = json.loads(str(record["run"])), ArrayLayout.from_bytes(bytes(record["layout"]))  # type: ignore[arg-type]
            settings = RunSettings(plain["algorithm"], plain["density"], plain["options"], plain["seed"], layout)
            clock = Clock(*plain["clock"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise wire.PacketError(f"the broadcast cannot be read: {error}") from error
        packet = wire.decode(read_bytes(arrays, "packet"), settings.message_id(clock), layout.layout.size)
        dense = layout.dense_from_bytes(read_bytes(arrays, "dense"))
        return cls(settings, clock, packet, dense, plain["training"], plain["memory"])


def bytes_record(**parts: bytes) -> ArrayRecord:
    """Return bytes by name as Flower's record."""
    return ArrayRecord({name: Array("uint8", (len(data),), PACKET_TYPE, data) for name, data in parts.items()})


def read_bytes(record: ArrayRecord, name: str) -> bytes:
    """Return the bytes of a record of `bytes_record`, or raise PacketError."""
    array = record.get(name)
    if array is None or (array.stype, array.dtype) != (PACKET_TYPE, "uint8"):
        raise wire.PacketError(f"there is no {PACKET_TYPE} array {name!r}; add sparse_mod to the client: ClientApp(mods=[sparse_mod])")
    return array.data


def record_size(arrays: ArrayRecord, config: ConfigRecord | None = None) -> int:
    """Return the bytes of the values in records, without what Flower puts around them."""
    texts = [] if config is None else [value.encode() if isinstance(value, str) else value for value in config.values()]
    return sum(len(array.data) for array in arrays.values()) + sum(len(text) for text in texts if isinstance(text, bytes))


def single_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    """Return the key and the only ArrayRecord of a message, or raise PacketError."""
    if len(content.array_records) != 1:
        raise wire.PacketError(f"there must be exactly one ArrayRecord; got {len(content.array_records)}")
    return next(iter(content.array_records.items()))


def replace_arrays(content: RecordDict, key: str, arrays: ArrayRecord, config: ConfigRecord | None = None) -> RecordDict:
    """Return a copy of a message's content with other arrays and another record of SparseStrategy (None: without)."""
    records = {name: arrays if name == key else record for name, record in content.items() if name != SPARSE_KEY}
    return RecordDict(records | ({} if config is None else {SPARSE_KEY: config}))


def model_packet(weights: Float[Tensor, " p"], draw: Draw) -> Packet:
    """Return the nonzero weights of a model, rounded to 16 bits."""
    support = weights.nonzero()[:, 0] if weights.any() else torch.zeros(1, dtype=torch.int64)
    return sparse_packet(support, {"weights": weights}, MODEL_BITS, draw)


def model_weights(packet: Packet) -> Float[Tensor, " p"]:
    """Return the weights in a packet of `model_packet`."""
    return packet.field_dense("weights", torch.float32)


def sparse_record(message: Message) -> ConfigRecord | None:
    """Return the record of SparseStrategy in a message, or None."""
    return message.content.config_records.get(SPARSE_KEY) if message.has_content() else None
