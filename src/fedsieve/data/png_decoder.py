"""Decode PNG files of 8-bit RGB pixels, the kind that CIFAR-10 is distributed in, without a library for images."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from fedsieve.data.downloads import DataError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = 3
SUPPORTED_FORMAT = (8, 2, 0, 0, 0)
"""Bits per channel, colour type RGB, compression, filter method, not interlaced."""


def read_png(path: Path) -> UInt8[np.ndarray, "h w 3"]:
    """The pixels of a PNG file; raises DataError if it is damaged or has another pixel format."""
    try:
        data = path.read_bytes()
        chunks = list(read_chunks(data)) if data.startswith(SIGNATURE) else []
        width, height, *pixel_format = struct.unpack(">IIBBBBB", dict(chunks)[b"IHDR"])
        lines = np.frombuffer(zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT")), np.uint8)
        lines = lines.reshape(height, 1 + CHANNELS * width)
    except (OSError, KeyError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path} is not a complete PNG file: {error or type(error).__name__}; download it again") from None
    if tuple(pixel_format) != SUPPORTED_FORMAT:
        raise DataError(f"{path} must have 8-bit RGB pixels that are not interlaced; its format is {tuple(pixel_format)}")
    return undo_filters(lines[:, 0], lines[:, 1:].reshape(height, width, CHANNELS), path)


def read_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The kind and the body of each chunk."""
    at = len(SIGNATURE)
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        if zlib.crc32(kind + body) != checksum:
            raise ValueError(f"the checksum of chunk {kind.decode('latin1')} is wrong")
        yield kind, body
        at += 12 + length


def undo_filters(filters: UInt8[np.ndarray, " h"], lines: UInt8[np.ndarray, "h w 3"], path: Path) -> UInt8[np.ndarray, "h w 3"]:
    """The pixels of filtered lines (PNG specification, section 9). Arithmetic is modulo 256."""
    pixels = np.empty_like(lines)
    above = np.zeros_like(lines[0])
    for row, (kind, line) in enumerate(zip(filters.tolist(), lines, strict=True)):
        if kind == 0:
            pixels[row] = line
        elif kind == 1:  # a difference to the pixel on the left
            pixels[row] = np.cumsum(line, axis=0, dtype=np.uint8)
        elif kind == 2:  # a difference to the pixel above
            pixels[row] = line + above
        elif kind in (3, 4):
            pixels[row] = undo_prediction(line, above, use_mean=kind == 3)
        else:
            raise DataError(f"{path} has the unknown filter {kind} in line {row + 1}; download it again")
        above = pixels[row]
    return pixels


def undo_prediction(line: UInt8[np.ndarray, "w 3"], above: UInt8[np.ndarray, "w 3"], *, use_mean: bool) -> UInt8[np.ndarray, "w 3"]:
    """A line of differences to a prediction from its neighbours: their mean, or the nearest to left + above - corner (Paeth)."""
    found = np.empty_like(line)
    for channel in range(line.shape[1]):
        left = corner = 0
        for at, (difference, up) in enumerate(zip(line[:, channel].tolist(), above[:, channel].tolist(), strict=True)):
            estimate = left + up - corner
            guess = (left + up) // 2 if use_mean else min((left, up, corner), key=lambda value, e=estimate: abs(e - value))
            left, corner = (difference + guess) % 256, up
            found[at, channel] = left
    return found
