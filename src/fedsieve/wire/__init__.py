"""Packets as bytes: lossless, strict, no pickle. docs/wire-format.md is the specification.

packet = header  positions  scalars  fields  buffers  crc32
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch

from fedsieve.core.packets import GATE_FIELDS, SCALAR_NAMES, Packet
from fedsieve.core.quantization import SCALED_CODINGS, Coding, QuantizedField
from fedsieve.core.random import derive_key
from fedsieve.core.types import Layout, Traffic
from fedsieve.wire.positions import (
    KIND_DENSE,
    KIND_DIFF,
    KIND_LIST,
    KIND_SEED,
    KIND_SUBSET,
    PacketError,
    Reader,
    encode_positions,
    encode_varint,
    read_positions,
    read_subset,
)

MAGIC = b"fS"
VERSION = 1
FIELD_NAMES = ("theta", "gates", "log_alpha", "weights", "gradient", "gate_gradient", "update", "saliency")
BUFFERS_FLAG = 0x80
"""Added to the kind of a packet with buffers."""
MAX_BUFFERS = 1 << 20
CHECKSUM_BYTES = 4
MAX_SIZE = 1 << 31
NUMPY_DTYPES = {Coding.FLOAT32: "<f4", Coding.FLOAT16: "<f2", Coding.UNIT8: "u1"}


class MessageId(NamedTuple):
    """Identifies a message: a packet of another model, round or exchange is rejected."""

    fingerprint: int
    round: int
    exchange: int


@contextmanager
def refuse_incomplete(packet: Packet) -> Iterator[None]:
    """Raise PacketError if the code inside needs a field or scalar that the packet lacks."""
    try:
        yield
    except KeyError as error:
        name = error.args[0]
        if name in (*FIELD_NAMES, *SCALAR_NAMES) and name not in packet.fields and name not in packet.scalars:
            raise PacketError(f"the packet has no {name}, which its receiver needs") from None
        raise


def compute_fingerprint(algorithm: str, layout: Layout) -> int:
    """Return a hash of model and algorithm, by which packets of other runs are rejected."""
    return derive_key(0, algorithm, *layout.layers, layout.size) & 0xFFFFFFFF


class EncodedPacket(NamedTuple):
    """The bytes of a packet, by part."""

    header: bytes
    positions: bytes
    scalars: bytes
    fields: dict[str, bytes]
    paper_bytes: int
    """the paper's formula: four bytes per value, nothing for positions (L303)"""
    buffers: bytes = b""

    @property
    def payload(self) -> int:
        """The number of bytes of positions and values, without header and checksum."""
        return len(self.positions) + len(self.scalars) + sum(map(len, self.fields.values())) + len(self.buffers)

    def to_bytes(self) -> bytes:
        """Return the encoded message."""
        body = b"".join((self.header, self.positions, self.scalars, *self.fields.values(), self.buffers))
        return body + crc32(body).to_bytes(CHECKSUM_BYTES, "little")

    @property
    def length(self) -> int:
        """The length of `to_bytes()`."""
        return len(self.header) + self.payload + CHECKSUM_BYTES


# Encoding


def encode(packet: Packet, message_id: MessageId, reference: torch.Tensor | None = None) -> EncodedPacket:
    """Return the shortest encoding; `reference` is a support that the receiver already has (that of the broadcast).

    A packet with several supports is a list of vectors with equally many entries, in one message.
    """
    if packet.support is not None and packet.support.ndim == 2:
        return _encode_list(packet, message_id)
    return encode_stack(packet, 1, message_id, reference)[0]


def encode_stack(packets: Packet, num_packets: int, message_id: MessageId, reference: torch.Tensor | None = None) -> list[EncodedPacket]:
    """Return the shortest encoding of each packet in a stack."""
    supports = None if packets.support is None else packets.support.numpy(force=True).reshape(num_packets, -1)
    rest = _encode_header(packets, message_id, () if supports is None else (supports.shape[-1],))
    fields = {name: _encode_values(values, num_packets) for name, values in packets.fields.items()}
    scalars = [s.numpy(force=True).reshape(num_packets) for s in packets.scalars.values()]
    numbers = [row.tobytes() for row in np.stack(scalars, axis=-1).astype("<f4", copy=False)] if scalars else [b""] * num_packets
    if supports is None:
        coded = [(KIND_DENSE if packets.seed is None else KIND_SEED, b"")] * num_packets
    else:
        known = None if reference is None else reference.numpy(force=True)
        coded = [encode_positions(support, packets.size, known) for support in supports]
    flag = BUFFERS_FLAG * bool(packets.buffers)
    buffers = _encode_buffers(packets, num_packets) if packets.buffers else [b""] * num_packets
    headers = {kind: MAGIC + bytes((VERSION, kind | flag)) + rest for kind, _ in coded}
    sizes = [values.codes.numel() for values in packets.fields.values()] + [values.numel() for values in packets.buffers.values()]
    formula = 4 * sum(sizes) // num_packets
    return [
        EncodedPacket(headers[kind], positions, numbers[i], {name: each[i] for name, each in fields.items()}, formula, buffers[i])
        for i, (kind, positions) in enumerate(coded)
    ]


def _encode_header(packet: Packet, message_id: MessageId, counts: tuple[int, ...]) -> bytes:
    """Return what follows magic, version and kind; `counts` are the numbers of entries and of vectors that this kind states."""
    names = bytes(FIELD_NAMES.index(name) << 4 | values.coding for name, values in packet.fields.items())
    seed = () if packet.seed is None else (packet.seed,)
    return b"".join(
        (
            message_id.fingerprint.to_bytes(4, "little"),
            *map(encode_varint, (message_id.round, message_id.exchange, packet.size, *seed, *counts)),
            bytes((len(names) << 4 | len(packet.scalars),)),
            names,
            bytes(SCALAR_NAMES.index(name) for name in packet.scalars),
        )
    )


def _encode_list(packet: Packet, message_id: MessageId) -> EncodedPacket:
    """Return the encoding of a list: one header, then the positions of every vector, then the values of every vector."""
    assert packet.support is not None
    assert not packet.scalars
    num_vectors, count = packet.support.shape
    kind = KIND_LIST | BUFFERS_FLAG * bool(packet.buffers)
    header = MAGIC + bytes((VERSION, kind)) + _encode_header(packet, message_id, (count, num_vectors))
    parts = encode_stack(packet._replace(buffers={}), num_vectors, message_id) if num_vectors else []
    fields = {name: b"".join(part.fields[name] for part in parts) for name in packet.fields}
    positions, buffers = b"".join(part.positions for part in parts), _encode_buffers(packet, 1)[0] if packet.buffers else b""
    paper_bytes = sum(part.paper_bytes for part in parts) + 4 * sum(values.numel() for values in packet.buffers.values())
    return EncodedPacket(header, positions, b"", fields, paper_bytes, buffers)


def _encode_buffers(packets: Packet, num_packets: int) -> list[bytes]:
    """Return the number of buffers, and of each its number, its length and its values as float32."""
    arrays = {number: values.numpy(force=True).reshape(num_packets, -1).astype("<f4") for number, values in packets.buffers.items()}
    heads = {number: encode_varint(number) + encode_varint(array.shape[1]) for number, array in arrays.items()}
    count = encode_varint(len(arrays))
    return [count + b"".join(heads[number] + array[i].tobytes() for number, array in arrays.items()) for i in range(num_packets)]


def _encode_values(field: QuantizedField, num_packets: int) -> list[bytes]:
    codes = field.codes.numpy(force=True).reshape(num_packets, -1)
    if field.coding in (Coding.LEVELS4, Coding.MIDPOINT4):
        nibbles = np.zeros((num_packets, codes.shape[1] + codes.shape[1] % 2), dtype=np.uint8)
        nibbles[:, : codes.shape[1]] = codes.view(np.uint8) & 0xF
        rows = nibbles[:, 0::2] << 4 | nibbles[:, 1::2]
    elif field.coding is Coding.SIGNS:
        rows = np.packbits(codes > 0, axis=-1)
    elif field.coding is Coding.NORMAL2:
        rows = np.packbits(((codes + 2)[..., None] >> np.array((1, 0)) & 1).reshape(num_packets, -1), axis=-1)
    else:
        rows = codes.astype(NUMPY_DTYPES.get(field.coding, "i1"), copy=False)
    if field.scale is None:
        return [row.tobytes() for row in rows]
    scales = field.scale.numpy(force=True).reshape(num_packets, 1).astype("<f4", copy=False)
    return [scale.tobytes() + row.tobytes() for scale, row in zip(scales, rows, strict=True)]


# Decoding


def decode(data: bytes, message_id: MessageId, size: int, reference: torch.Tensor | None = None, *, accept_lists: bool = False) -> Packet:
    """Return the packet in `data`, or raise `PacketError` if it is not valid for this model, round and exchange.

    Only the server sends lists, so a reply that is one is refused.
    """
    if len(data) < 4 + len(MAGIC) or data[: len(MAGIC)] != MAGIC:
        raise PacketError(f"not a packet: {len(data)} bytes beginning {data[:2].hex() or 'with nothing'}")
    if crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise PacketError("checksum does not match: the packet was changed or truncated")
    reader = Reader(data[len(MAGIC) : -4])
    version, kind = reader.read(2, "version and kind")
    if version != VERSION:
        raise PacketError(f"format version {version}; this reads version {VERSION}")
    has_buffers, kind = bool(kind & BUFFERS_FLAG), kind & ~BUFFERS_FLAG
    if kind > (KIND_LIST if accept_lists else KIND_DIFF):
        raise PacketError(f"unknown kind {kind}")
    fingerprint = int.from_bytes(reader.read(4, "fingerprint"), "little")
    if fingerprint != message_id.fingerprint:
        raise PacketError(f"for another model: fingerprint {fingerprint:08x}, expected {message_id.fingerprint:08x}")
    if (stamp := (reader.read_varint(MAX_SIZE, "round"), reader.read_varint(MAX_SIZE, "exchange"))) != message_id[1:]:
        raise PacketError(f"for round {stamp[0]}, exchange {stamp[1]}; expected {message_id.round}, {message_id.exchange}")
    if (stated := reader.read_varint(MAX_SIZE, "size")) != size:
        raise PacketError(f"for {stated} parameters; this model has {size}")
    seed = reader.read_varint((1 << 64) - 1, "seed") if kind == KIND_SEED else None
    count = reader.read_varint(size, "number kept") if kind in (KIND_SUBSET, KIND_DIFF, KIND_LIST) else size
    num_vectors = reader.read_varint(len(data), "number of vectors") if kind == KIND_LIST else None
    counts = reader.read(1, "number of fields")[0]
    names = [_decode_field_name(byte) for byte in reader.read(counts >> 4, "field names")]
    scalars = [_lookup(SCALAR_NAMES, byte, "scalar") for byte in reader.read(counts & 0xF, "scalar names")]
    if len({name for name, _ in names}) < len(names) or len(set(scalars)) < len(scalars):
        raise PacketError("a field or scalar appears twice")
    if kind == KIND_SEED and (counts or has_buffers):
        raise PacketError("a seed packet must have no fields and no buffers")
    if num_vectors is not None:
        packet = _read_list(reader, num_vectors, count, size, names, len(scalars))
        packet = packet._replace(buffers=_read_buffers(reader)) if has_buffers else packet
        _require_end(reader)
        return packet
    known = None if reference is None else reference.numpy(force=True)
    support = read_positions(reader, kind, count, size, known)
    numbers = _require_finite(np.frombuffer(reader.read(4 * len(scalars), "scalars"), "<f4"), "a scalar")
    fields = {name: _read_values(reader, count, coding, name) for name, coding in names}
    buffers = _read_buffers(reader) if has_buffers else {}
    _require_end(reader)
    return Packet(
        size,
        None if support is None else torch.from_numpy(support),
        fields,
        {name: torch.tensor(float(number), dtype=torch.float32) for name, number in zip(scalars, numbers, strict=True)},
        seed,
        buffers,
    )


def _read_list(reader: Reader, num_vectors: int, count: int, size: int, names: list[tuple[str, Coding]], num_scalars: int) -> Packet:
    """Return a list of ternary vectors as one stacked packet."""
    if num_scalars or not count or [coding for _, coding in names] != [Coding.SIGNS]:
        raise PacketError("a list must have entries and one field of signs, and no scalars")
    if num_vectors * (4 + (count + 7) // 8) > len(reader.data) - reader.position:  # before memory is taken for their positions
        raise PacketError(f"truncated: {num_vectors} vectors of {count} signs do not fit into the bytes that are left")
    (name, coding), supports = names[0], np.zeros((num_vectors, count), np.int64)
    for i in range(num_vectors):
        supports[i] = read_subset(reader, count, size)
    fields = [_read_values(reader, count, coding, name) for _ in range(num_vectors)]
    codes = torch.stack([field.codes for field in fields]) if fields else torch.zeros((0, count), dtype=torch.int8)
    scale = torch.stack([field.scale for field in fields if field.scale is not None]) if fields else torch.zeros(0)
    return Packet(size, torch.from_numpy(supports), {name: QuantizedField(codes, scale, coding)}, {})


def _read_buffers(reader: Reader) -> dict[int, torch.Tensor]:
    """Return the buffers of a packet by number; the numbers increase."""
    buffers: dict[int, torch.Tensor] = {}
    for _ in range(reader.read_varint(MAX_BUFFERS, "number of buffers")):
        number = reader.read_varint(MAX_BUFFERS, "a buffer's number")
        if buffers and number <= max(buffers):
            raise PacketError("the numbers of buffers do not increase")
        length = reader.read_varint(len(reader.data) // 4, "a buffer's length")
        values = _require_finite(np.frombuffer(reader.read(4 * length, "a buffer"), "<f4"), "a buffer")
        buffers[number] = torch.from_numpy(values.astype(np.float32))
    if not buffers:
        raise PacketError("a packet with buffers has none")
    return buffers


def _require_end(reader: Reader) -> None:
    if reader.position != len(reader.data):
        raise PacketError(f"{len(reader.data) - reader.position} bytes after the end")


def max_packet_size(size: int, field_names: frozenset[str], num_buffer_values: int = 0) -> int:
    """Return an upper bound for the bytes of a packet: header and checksum, a bitmap, four bytes per value, scales, buffers."""
    return 128 + size // 8 + len(field_names) * (4 * size + 4) + 12 * num_buffer_values


def _lookup(table: tuple[str, ...], number: int, what: str) -> str:
    if number >= len(table):
        raise PacketError(f"unknown {what} {number}")
    return table[number]


def _decode_field_name(byte: int) -> tuple[str, Coding]:
    if byte & 0xF > max(Coding):
        raise PacketError(f"unknown coding {byte & 0xF}")
    return _lookup(FIELD_NAMES, byte >> 4, "field"), Coding(byte & 0xF)


def _read_values(reader: Reader, count: int, coding: Coding, name: str) -> QuantizedField:
    scale = None
    if coding in SCALED_CODINGS:
        number = _require_finite(np.frombuffer(reader.read(4, f"scale of {name}"), "<f4"), f"the scale of {name}")[0]
        if number <= 0:
            raise PacketError(f"the scale of {name} is {number}, not above 0")
        scale = torch.tensor(float(number), dtype=torch.float32)
    if coding in (Coding.LEVELS4, Coding.MIDPOINT4):
        packed = np.frombuffer(reader.read((count + 1) // 2, name), np.uint8)
        nibbles = np.stack((packed >> 4, packed & 0xF), axis=-1).reshape(-1)
        if nibbles[count:].any():
            raise PacketError(f"padding of {name} is not zero")
        codes = ((nibbles[:count] ^ 8).astype(np.int8) - 8).astype(np.int8)
    elif coding is Coding.SIGNS:
        bits = np.unpackbits(np.frombuffer(reader.read((count + 7) // 8, name), np.uint8))
        if bits[count:].any():
            raise PacketError(f"padding of {name} is not zero")
        codes = (2 * bits[:count].astype(np.int8) - 1).astype(np.int8)
    elif coding is Coding.NORMAL2:
        bits = np.unpackbits(np.frombuffer(reader.read((2 * count + 7) // 8, name), np.uint8))
        if bits[2 * count :].any():
            raise PacketError(f"padding of {name} is not zero")
        codes = (2 * bits[: 2 * count : 2] + bits[1 : 2 * count : 2]).astype(np.int8) - np.int8(2)
    else:
        kind = np.dtype(NUMPY_DTYPES.get(coding, "i1"))
        codes = np.frombuffer(reader.read(count * kind.itemsize, name), kind).astype(kind.newbyteorder("="))
    if coding in (Coding.FLOAT32, Coding.FLOAT16):
        _require_finite(codes, f"a value of {name}")
    if coding in (Coding.LEVELS8, Coding.LEVELS4) and len(codes) and codes.min() == (-128 if coding is Coding.LEVELS8 else -8):
        raise PacketError(f"a level of {name} is out of range")
    return QuantizedField(torch.from_numpy(codes), scale, coding)


def _require_finite(numbers: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(numbers).all():
        raise PacketError(f"{what} is not finite")
    return numbers


def measure_traffic(messages: Sequence[EncodedPacket]) -> Traffic:
    """Return the sizes of messages with the same fields, which differ only in the lengths of their positions; none have no size."""
    if not messages:
        return Traffic()
    first, count = messages[0], len(messages)
    gates = count * sum(len(values) for name, values in first.fields.items() if name in GATE_FIELDS)
    weights = count * sum(map(len, first.fields.values())) - gates
    header, scalars = count * (len(first.header) + CHECKSUM_BYTES), count * (len(first.scalars) + len(first.buffers))
    positions = sum([len(message.positions) for message in messages])
    payload = positions + scalars + weights + gates
    return Traffic(count * first.paper_bytes, payload, header + payload, header, positions, scalars, weights, gates)
