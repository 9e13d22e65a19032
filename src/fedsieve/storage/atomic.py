"""Atomic and durable file writes. All system calls of a write are in this module, so that tests can interrupt each of them."""

import os
from contextlib import suppress
from pathlib import Path


def atomic_write(path: Path, content: bytes) -> None:
    """Replace a file atomically: write a temporary file, sync it, rename it and sync the folder. The old file remains until the rename."""
    temporary = path.with_name(path.name + ".part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            remaining = memoryview(content)
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(path.parent)


def fsync_directory(folder: Path) -> None:
    """Sync the entries of a folder to the disk."""
    if os.name != "posix":  # Windows cannot open a folder and needs no separate sync of its entries
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
