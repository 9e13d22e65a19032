"""Packets as bytes, near the entropy limit: lossless, strict, no pickle. docs/wire-format.md is the specification.

packet    = header  positions  scalars  fields  crc32
positions = nothing (dense) | a subset of n | dropped and added against a support both sides hold
subset    = Golomb-Rice gaps with the best parameter near the typical gap, or a bitmap, whichever is shorter
"""

from collections.abc import Callable
from functools import partial
from math import log2
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch

from fedsieve.core.packets import Packet
from fedsieve.core.quantization import SCALED_CODINGS, Coding, QuantizedField
from fedsieve.core.random import derive_key
from fedsieve.core.types import Layout, Traffic

MAGIC = b"fS"
VERSION = 1
FIELD_NAMES = ("theta", "gates", "log_alpha", "weights", "gradient", "gate_gradient", "update")
GATE_TRAFFIC_FIELDS = frozenset({"gates", "log_alpha", "gate_gradient"})
"""Fields about gates; the others are about weights."""
SCALAR_NAMES = ("default_gate", "multiplier", "kept_gate", "signs", "spread", "width", "pace")
KIND_SEED, KIND_DENSE, KIND_SUBSET, KIND_DIFF = range(4)
BITMAP_MARKER = 255
CHECKSUM_BYTES = 4
MAX_RICE_PARAMETER = 31
MAX_SIZE = 1 << 31
NUMPY_DTYPES = {Coding.FLOAT32: "<f4", Coding.FLOAT16: "<f2", Coding.UNIT8: "u1"}


class PacketError(ValueError):
    """Bytes that are not a packet for this model and round; the message says what was wrong."""


class MessageId(NamedTuple):
    """Which message this is: a packet for another model, round or exchange is refused."""

    fingerprint: int
    round: int
    exchange: int


def compute_fingerprint(algorithm: str, layout: Layout) -> int:
    """Of model and method: a packet of another one is refused."""
    return derive_key(0, algorithm, *layout.layers, layout.size) & 0xFFFFFFFF


class EncodedPacket(NamedTuple):
    """The bytes of a packet, by part."""

    header: bytes
    positions: bytes
    scalars: bytes
    fields: dict[str, bytes]
    paper_bytes: int
    """what the paper would have counted: four bytes a value, nothing for positions (L303)"""

    @property
    def payload(self) -> int:
        """Bytes of positions and values, without header and checksum."""
        return len(self.positions) + len(self.scalars) + sum(map(len, self.fields.values()))

    def to_bytes(self) -> bytes:
        """What crosses."""
        body = b"".join((self.header, self.positions, self.scalars, *self.fields.values()))
        return body + crc32(body).to_bytes(CHECKSUM_BYTES, "little")

    @property
    def length(self) -> int:
        """len(join()), without joining."""
        return len(self.header) + self.payload + CHECKSUM_BYTES


# Encoding


def encode(packet: Packet, message_id: MessageId, reference: torch.Tensor | None = None) -> EncodedPacket:
    """The shortest form of `packet`; `reference` is a support the receiver already holds (the broadcast's)."""
    return encode_stack(packet, 1, message_id, reference)[0]


def encode_stack(packets: Packet, num_packets: int, message_id: MessageId, reference: torch.Tensor | None = None) -> list[EncodedPacket]:
    """The shortest form of each of `count` packets in a stack."""
    supports = None if packets.support is None else packets.support.numpy(force=True).reshape(num_packets, -1)
    names = bytes(FIELD_NAMES.index(name) << 4 | values.coding for name, values in packets.fields.items())
    rest = b"".join(
        (
            message_id.fingerprint.to_bytes(4, "little"),
            *map(_encode_varint, (message_id.round, message_id.exchange, packets.size)),
            *((_encode_varint(packets.seed),) if packets.seed is not None else ()),
            *((_encode_varint(supports.shape[-1]),) if supports is not None else ()),
            bytes((len(names) << 4 | len(packets.scalars),)),
            names,
            bytes(SCALAR_NAMES.index(name) for name in packets.scalars),
        )
    )
    fields = {name: _encode_values(values, num_packets) for name, values in packets.fields.items()}
    scalars = [s.numpy(force=True).reshape(num_packets) for s in packets.scalars.values()]
    numbers = _row_bytes(np.stack(scalars, axis=-1).astype("<f4", copy=False)) if scalars else [b""] * num_packets
    if supports is None:
        placed = [(KIND_DENSE if packets.seed is None else KIND_SEED, b"")] * num_packets
    else:
        held = None if reference is None else reference.numpy(force=True)
        placed = [_encode_positions(support, packets.size, held) for support in supports]
    headers = {kind: MAGIC + bytes((VERSION, kind)) + rest for kind, _ in placed}
    formula = packets.paper_bytes // num_packets
    return [
        EncodedPacket(headers[kind], positions, numbers[i], {name: each[i] for name, each in fields.items()}, formula)
        for i, (kind, positions) in enumerate(placed)
    ]


def _row_bytes(rows: np.ndarray) -> list[bytes]:
    """The bytes of each row."""
    whole, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    return [whole[i * width : (i + 1) * width] for i in range(len(rows))]


def _encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _encode_positions(support: np.ndarray, size: int, reference: np.ndarray | None) -> tuple[int, bytes]:
    """The shorter of all positions, and of the dropped as a subset of the reference with the added as a subset of the rest."""
    plain, write = _plan_subset(support, size)
    if reference is None:
        return KIND_SUBSET, write()
    member = np.zeros(size, dtype=bool)
    member[support] = True
    held = member[reference]
    dropped = np.flatnonzero(~held)
    member[reference] = False
    added = np.flatnonzero(member)
    added -= np.searchsorted(reference, added)
    count = _encode_varint(len(dropped))
    (less, write_dropped), (more, write_added) = _plan_subset(dropped, len(reference)), _plan_subset(added, size - len(reference))
    return (KIND_DIFF, count + write_dropped() + write_added()) if len(count) + less + more < plain else (KIND_SUBSET, write())


def _plan_subset(indices: np.ndarray, size: int) -> tuple[int, Callable[[], bytes]]:
    """Strictly increasing indices below `size`, their number is sent elsewhere: how many bytes they take, and these when asked for."""
    count = len(indices)
    if count in (0, size):
        return 0, bytes
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + 1
    typical = max(int(log2(max(size / count * 0.6931, 1.0))), 0)
    candidates = np.arange(max(typical - 1, 0), min(typical + 2, MAX_RICE_PARAMETER) + 1)
    bits = np.add.reduce(gaps >> candidates[:, None], axis=1) + count * (1 + candidates)
    best = int(bits.argmin())
    bitmap, rice = (size + 7) // 8, (int(bits[best]) + 7) // 8
    return 1 + min(bitmap, rice), partial(_encode_bitmap, indices, size) if bitmap <= rice else partial(
        _encode_rice, gaps, int(candidates[best])
    )


def _encode_bitmap(indices: np.ndarray, size: int) -> bytes:
    bits = np.zeros(size, dtype=bool)
    bits[indices] = True
    return bytes((BITMAP_MARKER,)) + np.packbits(bits).tobytes()


def _encode_rice(gaps: np.ndarray, parameter: int) -> bytes:
    ends = np.cumsum((gaps >> parameter) + 1)
    bits = np.zeros(ends[-1] + len(gaps) * parameter, dtype=np.uint8)
    bits[ends - 1] = 1
    bits[ends[-1] :].reshape(len(gaps), parameter)[:] = gaps[:, None] >> np.arange(parameter) & 1
    return bytes((parameter,)) + np.packbits(bits).tobytes()


def _encode_values(field: QuantizedField, num_packets: int) -> list[bytes]:
    codes = field.codes.numpy(force=True).reshape(num_packets, -1)
    if field.coding in (Coding.LEVELS4, Coding.MIDPOINT4):
        nibbles = np.zeros((num_packets, codes.shape[1] + codes.shape[1] % 2), dtype=np.uint8)
        nibbles[:, : codes.shape[1]] = codes.view(np.uint8) & 0xF
        rows = nibbles[:, 0::2] << 4 | nibbles[:, 1::2]
    elif field.coding is Coding.SIGNS:
        rows = np.packbits(codes > 0, axis=-1)
    else:
        rows = codes.astype(NUMPY_DTYPES.get(field.coding, "i1"), copy=False)
    if field.scale is None:
        return _row_bytes(rows)
    scales = field.scale.numpy(force=True).reshape(num_packets, 1).astype("<f4", copy=False)
    return [scale + row for scale, row in zip(_row_bytes(scales), _row_bytes(rows), strict=True)]


# Decoding


class _Reader:
    """A cursor that never reads past the end and never takes memory that the bytes do not pay for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def read(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > len(self.data) - self.position:
            raise PacketError(f"truncated: {what} needs {num_bytes} bytes, {len(self.data) - self.position} are left")
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def read_varint(self, max_value: int, what: str) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self.read(1, what)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise PacketError(f"{what} is not written in its shortest form")
                if number > max_value:
                    raise PacketError(f"{what} is {number}, more than {max_value}")
                return number
        raise PacketError(f"{what} is too long a number")


def decode(data: bytes, message_id: MessageId, size: int, reference: torch.Tensor | None = None) -> Packet:
    """The packet in `data`, if it is one for this model, round and exchange; else `PacketError`. Nothing is taken on trust."""
    if len(data) < 4 + len(MAGIC) or data[: len(MAGIC)] != MAGIC:
        raise PacketError(f"not a packet: {len(data)} bytes beginning {data[:2].hex() or 'with nothing'}")
    if crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise PacketError("checksum does not match: the packet was altered or cut")
    reader = _Reader(data[len(MAGIC) : -4])
    version, kind = reader.read(2, "version and kind")
    if version != VERSION:
        raise PacketError(f"format version {version}; this reads version {VERSION}")
    if kind > KIND_DIFF:
        raise PacketError(f"unknown kind {kind}")
    fingerprint = int.from_bytes(reader.read(4, "fingerprint"), "little")
    if fingerprint != message_id.fingerprint:
        raise PacketError(f"for another model: fingerprint {fingerprint:08x}, expected {message_id.fingerprint:08x}")
    if (stamp := (reader.read_varint(MAX_SIZE, "round"), reader.read_varint(MAX_SIZE, "exchange"))) != message_id[1:]:
        raise PacketError(f"for round {stamp[0]}, exchange {stamp[1]}; expected {message_id.round}, {message_id.exchange}")
    if (found := reader.read_varint(MAX_SIZE, "size")) != size:
        raise PacketError(f"for {found} parameters; this model has {size}")
    seed = reader.read_varint((1 << 64) - 1, "seed") if kind == KIND_SEED else None
    count = reader.read_varint(size, "number kept") if kind in (KIND_SUBSET, KIND_DIFF) else size
    counts = reader.read(1, "number of fields")[0]
    names = [_decode_field_name(byte) for byte in reader.read(counts >> 4, "field names")]
    scalars = [_lookup(SCALAR_NAMES, byte, "scalar") for byte in reader.read(counts & 0xF, "scalar names")]
    if len({name for name, _ in names}) < len(names) or len(set(scalars)) < len(scalars):
        raise PacketError("a field or scalar appears twice")
    if kind == KIND_SEED and counts:
        raise PacketError("a seed packet carries no fields")
    held = None if reference is None else reference.numpy(force=True)
    support = _read_positions(reader, kind, count, size, held)
    numbers = _require_finite(np.frombuffer(reader.read(4 * len(scalars), "scalars"), "<f4"), "a scalar")
    fields = {name: _read_values(reader, count, coding, name) for name, coding in names}
    if reader.position != len(reader.data):
        raise PacketError(f"{len(reader.data) - reader.position} bytes after the end")
    return Packet(
        size,
        None if support is None else torch.from_numpy(support),
        fields,
        {name: torch.tensor(float(number), dtype=torch.float32) for name, number in zip(scalars, numbers, strict=True)},
        seed,
    )


def max_packet_size(size: int, field_names: frozenset[str]) -> int:
    """Bytes no packet of these fields and scalars exceeds: header and checksum, a bitmap, four bytes a value and its scale."""
    return 128 + size // 8 + len(field_names) * (4 * size + 4)


def _lookup(table: tuple[str, ...], number: int, what: str) -> str:
    if number >= len(table):
        raise PacketError(f"unknown {what} {number}")
    return table[number]


def _decode_field_name(byte: int) -> tuple[str, Coding]:
    if byte & 0xF > max(Coding):
        raise PacketError(f"unknown coding {byte & 0xF}")
    return _lookup(FIELD_NAMES, byte >> 4, "field"), Coding(byte & 0xF)


def _read_positions(reader: _Reader, kind: int, count: int, size: int, reference: np.ndarray | None) -> np.ndarray | None:
    if kind in (KIND_SEED, KIND_DENSE):
        return None
    if kind == KIND_SUBSET:
        return _read_subset(reader, count, size)
    if reference is None:
        raise PacketError("coded against a support, but none was broadcast")
    dropped = reader.read_varint(len(reference), "number dropped")
    added = count - len(reference) + dropped
    if not 0 <= added <= size - len(reference):
        raise PacketError(f"{count} kept and {dropped} of {len(reference)} dropped do not add up")
    held = np.ones(len(reference), dtype=bool)
    held[_read_subset(reader, dropped, len(reference))] = False
    # The r-th coordinate outside the reference is r plus the reference entries at or below it.
    outside = _read_subset(reader, added, size - len(reference))
    outside = outside + np.searchsorted(reference - np.arange(len(reference)), outside, side="right")
    return np.sort(np.concatenate((reference[held], outside)))


def _read_subset(reader: _Reader, count: int, size: int) -> np.ndarray:
    if count in (0, size):
        return np.arange(count, dtype=np.int64)
    parameter = reader.read(1, "coding of positions")[0]
    if parameter == BITMAP_MARKER:
        bits = np.unpackbits(np.frombuffer(reader.read((size + 7) // 8, "bitmap"), np.uint8))
        indices = np.flatnonzero(bits)
        if len(indices) != count or indices[-1] >= size:
            raise PacketError(f"the bitmap marks {len(indices)} positions, {count} were announced")
        return indices
    if parameter > MAX_RICE_PARAMETER:
        raise PacketError(f"Rice parameter {parameter} is more than {MAX_RICE_PARAMETER}")
    longest = (size >> parameter) + count + count * parameter
    available = reader.data[reader.position : reader.position + (longest + 7) // 8]
    bits = np.unpackbits(np.frombuffer(available, np.uint8))
    ones = np.flatnonzero(bits)[:count]
    if len(ones) < count:
        raise PacketError(f"truncated: {len(ones)} of {count} positions")
    unary = int(ones[-1]) + 1
    total = unary + count * parameter
    if total > len(bits):
        raise PacketError("truncated: positions end early")
    quotients = np.diff(ones, prepend=-1) - 1
    low = bits[unary:total].reshape(count, parameter) @ (1 << np.arange(parameter, dtype=np.int64))
    indices = np.cumsum((quotients << parameter) + low + 1) - 1
    if indices[-1] >= size:
        raise PacketError(f"position {indices[-1]} is not below {size}")
    if bits[total : (total + 7) // 8 * 8].any():
        raise PacketError("padding is not zero")
    reader.position += (total + 7) // 8
    return indices


def _read_values(reader: _Reader, count: int, coding: Coding, name: str) -> QuantizedField:
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


def measure_traffic(encoded: EncodedPacket, *others: EncodedPacket) -> Traffic:
    """Return the sizes of messages with the same fields; they differ only in the lengths of their positions."""
    gates = weights = 0
    for name, values in encoded.fields.items():
        if name in GATE_TRAFFIC_FIELDS:
            gates += len(values)
        else:
            weights += len(values)
    scalars, header = len(encoded.scalars), len(encoded.header) + CHECKSUM_BYTES
    values = scalars + gates + weights
    common = Traffic(encoded.paper_bytes, values, header + values, header, 0, scalars, weights, gates) * (1 + len(others))
    positions = len(encoded.positions) + sum([len(other.positions) for other in others])
    return common + Traffic(payload=positions, total=positions, positions=positions)
