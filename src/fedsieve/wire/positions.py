"""Positions of a sparse message as bytes, near the entropy limit.

subset    = Golomb-Rice coded gaps, with the best parameter near the typical gap, or a bitmap, whichever is shorter
positions = nothing (dense) | a subset of all coordinates | entries dropped from and added to a support that both sides have
"""

from collections.abc import Callable
from functools import partial
from math import log2

import numpy as np

KIND_SEED, KIND_DENSE, KIND_SUBSET, KIND_DIFF, KIND_LIST = range(5)
BITMAP_MARKER = 255
MAX_RICE_PARAMETER = 31
CHUNK = 1 << 12
"""Bytes or positions that are unpacked at once, so that decoding needs little memory beyond its result."""


class PacketError(ValueError):
    """Bytes that are not a valid packet for this model and round; the message names the defect."""


class Reader:
    """A cursor over bytes that never reads past the end; allocations are bounded by the number of bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def read(self, num_bytes: int, what: str) -> bytes:
        """Return the next bytes; `what` names them in errors."""
        if num_bytes > len(self.data) - self.position:
            raise PacketError(f"truncated: {what} needs {num_bytes} bytes, {len(self.data) - self.position} are left")
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def read_varint(self, max_value: int, what: str) -> int:
        """Return the next number, which must be in its shortest form and at most `max_value`."""
        number = 0
        for shift in range(0, 70, 7):
            byte = self.read(1, what)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise PacketError(f"{what} is not encoded in its shortest form")
                if number > max_value:
                    raise PacketError(f"{what} is {number}, more than {max_value}")
                return number
        raise PacketError(f"{what} is a number of more than ten bytes")


def encode_varint(number: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def encode_positions(support: np.ndarray, size: int, reference: np.ndarray | None) -> tuple[int, bytes]:
    """Return the shorter of two encodings: all positions, or those dropped from and added to the reference."""
    plain, write = _plan_subset(support, size)
    if reference is None:
        return KIND_SUBSET, write()
    member = np.zeros(size, dtype=bool)
    member[support] = True
    kept = member[reference]
    dropped = np.flatnonzero(~kept)
    member[reference] = False
    added = np.flatnonzero(member)
    added -= np.searchsorted(reference, added)
    count = encode_varint(len(dropped))
    (less, write_dropped), (more, write_added) = _plan_subset(dropped, len(reference)), _plan_subset(added, size - len(reference))
    return (KIND_DIFF, count + write_dropped() + write_added()) if len(count) + less + more < plain else (KIND_SUBSET, write())


def _plan_subset(indices: np.ndarray, size: int) -> tuple[int, Callable[[], bytes]]:
    """Return the encoded length of increasing indices below `size`, and a function that encodes them. Their number is encoded elsewhere."""
    count = len(indices)
    if count in (0, size):
        return 0, bytes
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + 1
    candidates = np.array(rice_parameters(count, size))
    bits = np.add.reduce(gaps >> candidates[:, None], axis=1) + count * (1 + candidates)
    best = int(bits.argmin())
    bitmap, rice = (size + 7) // 8, (int(bits[best]) + 7) // 8
    parameter = BITMAP_MARKER if bitmap <= rice else int(candidates[best])
    return 1 + min(bitmap, rice), partial(_encode_subset, indices, gaps, size, parameter)


def rice_parameters(count: int, size: int) -> range:
    """Return the parameters for `count` of `size` positions, near the typical gap; another one would only lengthen the packet."""
    typical = max(int(log2(max(size / count * 0.6931, 1.0))), 0)
    return range(max(typical - 1, 0), min(typical + 2, MAX_RICE_PARAMETER) + 1)


def _encode_subset(indices: np.ndarray, gaps: np.ndarray, size: int, parameter: int) -> bytes:
    """Return the indices as a bitmap, or their gaps as Rice codes with this parameter: first all quotients, then all remainders."""
    if parameter == BITMAP_MARKER:
        bits = np.zeros(size, dtype=bool)
        bits[indices] = True
    else:
        ends = np.cumsum((gaps >> parameter) + 1)
        bits = np.zeros(ends[-1] + len(gaps) * parameter, dtype=np.uint8)
        bits[ends - 1] = 1
        bits[ends[-1] :].reshape(len(gaps), parameter)[:] = gaps[:, None] >> np.arange(parameter) & 1
    return bytes((parameter,)) + np.packbits(bits).tobytes()


def read_positions(reader: Reader, kind: int, count: int, size: int, reference: np.ndarray | None) -> np.ndarray | None:
    """Return the support of a packet of this kind, or None if it is dense."""
    if kind in (KIND_SEED, KIND_DENSE):
        return None
    if kind == KIND_SUBSET:
        return read_subset(reader, count, size)
    if reference is None:
        raise PacketError("encoded relative to a support, but none was broadcast")
    dropped = reader.read_varint(len(reference), "number dropped")
    added = count - len(reference) + dropped
    if not 0 <= added <= size - len(reference):
        raise PacketError(f"{count} kept and {dropped} of {len(reference)} dropped do not add up")
    kept = np.ones(len(reference), dtype=bool)
    kept[read_subset(reader, dropped, len(reference))] = False
    # The r-th coordinate outside the reference is r plus the reference entries at or below it.
    outside = read_subset(reader, added, size - len(reference))
    outside = outside + np.searchsorted(reference - np.arange(len(reference)), outside, side="right")
    return np.sort(np.concatenate((reference[kept], outside)))


def read_subset(reader: Reader, count: int, size: int) -> np.ndarray:
    """Return `count` increasing indices below `size`."""
    if count in (0, size):
        return np.arange(count, dtype=np.int64)
    parameter = reader.read(1, "coding of positions")[0]
    if parameter == BITMAP_MARKER:
        bits = np.unpackbits(np.frombuffer(reader.read((size + 7) // 8, "bitmap"), np.uint8))
        if (num_marked := int(np.count_nonzero(bits))) != count:
            raise PacketError(f"the bitmap marks {num_marked} positions, {count} were expected")
        indices = np.flatnonzero(bits)
        if indices[-1] >= size:
            raise PacketError(f"the bitmap marks position {indices[-1]}, which is not below {size}")
        return indices
    if parameter not in (allowed := rice_parameters(count, size)):
        raise PacketError(f"Rice parameter {parameter} is not near the typical gap, {allowed[0]} to {allowed[-1]}")
    longest = (size >> parameter) + count + count * parameter
    data = np.frombuffer(reader.data, np.uint8)[reader.position : reader.position + (longest + 7) // 8]
    indices = _read_unary(data, count)
    unary = int(indices[-1]) + 1
    total = unary + count * parameter
    if total > 8 * len(data):
        raise PacketError("truncated: positions end early")
    for start in reversed(range(0, count, CHUNK)):
        part = indices[start : start + CHUNK]
        part[start == 0 :] -= indices[max(start - 1, 0) : start + len(part) - 1] + 1  # from the last to the first: quotients of the gaps
        part <<= parameter
        low = _read_bits(data, unary + start * parameter, len(part) * parameter).reshape(len(part), parameter)
        for bit in range(parameter):
            part += low[:, bit].astype(np.int64) << bit
    indices += 1
    np.cumsum(indices, out=indices)
    indices -= 1
    if indices[-1] >= size:
        raise PacketError(f"position {indices[-1]} is not below {size}")
    if _read_bits(data, total, -total % 8).any():
        raise PacketError("padding is not zero")
    reader.position += (total + 7) // 8
    return indices


def _read_unary(data: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the first `count` one bits; parts of the data are unpacked one after the other."""
    if count > 8 * len(data):
        raise PacketError(f"truncated: {count} positions need as many bits, {8 * len(data)} are left")
    found, num_found = np.empty(count, np.int64), 0
    for start in range(0, len(data), CHUNK):
        ones = np.flatnonzero(np.unpackbits(data[start : start + CHUNK]))[: count - num_found]
        np.add(ones, 8 * start, out=found[num_found : num_found + len(ones)])
        num_found += len(ones)
        if num_found == count:
            return found
    raise PacketError(f"truncated: {num_found} of {count} positions")


def _read_bits(data: np.ndarray, start: int, num_bits: int) -> np.ndarray:
    """Return bits from position `start` on."""
    return np.unpackbits(data[start // 8 : (start + num_bits + 7) // 8])[start % 8 : start % 8 + num_bits]
