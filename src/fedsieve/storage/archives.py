"""Read .npz archives of unknown origin: nothing is unpacked before its size is known. Does not import torch."""

import zlib
from math import prod
from pathlib import Path
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy_format

MIN_UNPACKED_LIMIT, MAX_UNPACKED_RATIO = 1 << 28, 100
"""An archive may unpack to 256 MiB, or to this multiple of its own size if that is more."""
READ_ERRORS = (OSError, EOFError, ValueError, KeyError, RuntimeError, BadZipFile, zlib.error)
"""What zipfile and NumPy raise for damaged archives; NotImplementedError is a RuntimeError."""


class ArchiveError(ValueError):
    """An archive is damaged, too large, or not an .npz file."""


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file by name; raises ArchiveError. Python objects are never loaded."""
    try:
        with ZipFile(path) as archive:
            check_unpacked_size(archive.infolist(), path.stat().st_size)
            return {entry.filename.removesuffix(".npy"): _read_array(archive, entry) for entry in archive.infolist()}
    except ArchiveError:
        raise
    except READ_ERRORS as error:
        raise ArchiveError(f"it is not an .npz archive, or it is damaged: {error or type(error).__name__}") from None


def check_unpacked_size(entries: list[ZipInfo], packed_size: int) -> None:
    """Raise ArchiveError if the entries of an archive unpack to more than the limit."""
    unpacked, limit = sum(entry.file_size for entry in entries), max(MIN_UNPACKED_LIMIT, MAX_UNPACKED_RATIO * packed_size)
    if unpacked > limit:
        raise ArchiveError(
            f"its {packed_size} bytes unpack to {unpacked}, more than the limit of {limit}, which protects the memory of this machine; "
            f"write it without compression, with numpy.savez"
        )


def _read_array(archive: ZipFile, entry: ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        version = npy_format.read_magic(file)
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise ArchiveError(f"array {entry.filename} holds Python objects; save it as numbers or strings")
        if prod(shape) * dtype.itemsize != entry.file_size - file.tell():  # NumPy allocates the shape before it reads
            raise ArchiveError(f"array {entry.filename} is damaged: its shape {shape} does not fit its {entry.file_size} bytes")
    with archive.open(entry) as file:
        return npy_format.read_array(file, allow_pickle=False)
