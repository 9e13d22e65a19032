"""Matrices as small palette PNGs inside the page."""

import struct
import zlib
from base64 import b64encode

import numpy as np

CIVIDIS = np.array(
    [
        (0, 34, 78),
        (18, 53, 112),
        (59, 73, 108),
        (87, 93, 109),
        (112, 113, 115),
        (138, 134, 120),
        (165, 156, 116),
        (195, 179, 105),
        (225, 204, 85),
        (254, 232, 56),
    ]
)
"""A colour map from dark blue to yellow that is readable with colour blindness."""
POSITIVE, NEGATIVE = (0, 114, 178), (213, 94, 0)
NUM_LEVELS = 64


def png_data_uri(pixels: np.ndarray, palette: np.ndarray) -> str:
    """Return palette indices (height, width) as the data URI of a PNG; the palette is (n, 4): red, green, blue, opacity."""
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), dtype=np.uint8)
    lines[:, 1:] = pixels
    palette = palette.astype(np.uint8)
    parts = (
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        _chunk(b"PLTE", palette[:, :3].tobytes()),
        _chunk(b"tRNS", palette[:, 3].tobytes()),
        _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
        _chunk(b"IEND", b""),
    )
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def heatmap_png(matrix: np.ndarray) -> str:
    """Return numbers in [0, 1] as an image from dark blue to yellow."""
    level = np.clip(np.nan_to_num(matrix) * (NUM_LEVELS - 1) + 0.5, 0, NUM_LEVELS - 1).astype(np.uint8)
    places = np.linspace(0, len(CIVIDIS) - 1, NUM_LEVELS)
    colours = np.stack([np.interp(places, range(len(CIVIDIS)), CIVIDIS[:, i]) for i in range(3)], axis=1)
    return png_data_uri(level, np.column_stack([colours, np.full(NUM_LEVELS, 255)]))


def signed_png(matrix: np.ndarray) -> str:
    """Return signed numbers as an image: positive blue, negative vermilion, zero transparent."""
    largest = np.abs(matrix).max() or 1.0
    strength = np.ceil(np.abs(matrix) / largest * NUM_LEVELS).astype(int).clip(0, NUM_LEVELS)
    level = np.where(matrix > 0, strength, np.where(matrix < 0, NUM_LEVELS + strength, 0))
    opacity = np.linspace(90, 255, NUM_LEVELS)
    sides = [np.column_stack([np.tile(colour, (NUM_LEVELS, 1)), opacity]) for colour in (POSITIVE, NEGATIVE)]
    return png_data_uri(level.astype(np.uint8), np.concatenate([np.zeros((1, 4)), *sides]))
