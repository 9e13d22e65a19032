"""Files that are whole or not there, and on the disk before anything builds on them. Every system call of a write stands here."""

import os
from contextlib import suppress
from pathlib import Path


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: beside it, to the disk, in its place, the folder to the disk. What was there stays until then."""
    temporary = path.with_name(path.name + ".part")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
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
    """Have the disk remember which files a folder holds."""
    if os.name != "posix":  # elsewhere a folder cannot be opened, and its entries need no call of their own
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
