"""Atomic and durable file writes that never follow a symbolic link.

All system calls of a write are in this module, so that tests can interrupt each of them.
"""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

PART_PREFIX, PART_SUFFIX = ".fedsieve-", ".part"
"""A temporary file has a random name between these, so that nobody can put a link in its place."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag, and only administrators create links there


def atomic_write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically: write a temporary file, sync it, rename it and sync the folder. The old file remains until the rename.

    If `path` is a symbolic link, the link itself is replaced, and the file it points to stays as it is.
    """
    temporary = path.with_name(f"{PART_PREFIX}{token_hex(8)}{PART_SUFFIX}")
    try:
        descriptor = open_own_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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


def open_own_file(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file and return its descriptor; raises OSError if it is a symbolic link."""
    return os.open(path, flags | NO_FOLLOW, mode)


def remove_parts(folder: Path) -> None:
    """Remove the temporary files that a killed process left in a folder."""
    for path in folder.glob(f"{PART_PREFIX}*{PART_SUFFIX}"):
        os.unlink(path)


def fsync_directory(folder: Path) -> None:
    """Sync the entries of a folder to the disk."""
    if os.name != "posix":  # Windows cannot open a folder and needs no separate sync of its entries
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
