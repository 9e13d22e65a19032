"""The files of public data sets: where they may be, their checksums and where to download them. Does not import torch."""

import hashlib
import io
import os
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fedsieve.storage.atomic import atomic_write

DATA_FOLDER_VARIABLE = "FEDSIEVE_DATA"
COMPRESSIONS = (".gz", ".bz2")
"""Suffixes that a file may also lack, if it is not compressed."""


class DataError(ValueError):
    """Data is missing, damaged or invalid; the message says what to do."""


class DataFile(NamedTuple):
    """A file of a public data set."""

    name: str
    """without the suffix of its compression"""
    task: str
    folders: tuple[str, ...]
    """where the file may be, relative to the data folder"""
    sha256: str
    """of the original, or several separated by spaces; empty if none is known, then the file is not downloaded"""
    url: str
    archive_member: str | None = None
    """name of the file inside the archive at `url`; None if `url` is the file itself"""
    suffix: str = ".gz"


def default_folder() -> Path:
    """The data folder if the user sets no path."""
    folder = os.environ.get(DATA_FOLDER_VARIABLE)
    return Path(folder) if folder else Path.home() / ".cache" / "fedsieve"


def candidate_paths(folder: Path | None, data_file: DataFile) -> list[Path]:
    """All paths where the file may be."""
    top = folder or default_folder()
    suffixes = ("", data_file.suffix) if data_file.suffix in COMPRESSIONS else (data_file.suffix,)
    return [top / inner / (data_file.name + suffix) for inner in data_file.folders for suffix in suffixes]


def find_file(folder: Path | None, data_file: DataFile) -> Path:
    """The path of the file; raises DataError with the remedy if it is missing."""
    for path in candidate_paths(folder, data_file):
        if path.is_file():
            return path
    top = folder or default_folder()
    raise DataError(
        f"{data_file.name} not found in {top}; run `fedsieve data fetch {data_file.task}`, or put {data_file.name}{data_file.suffix} "
        f"from {data_file.url} into {top / data_file.task}"
    )


def checksum_ok(path: Path, data_file: DataFile) -> bool | None:
    """Whether the file has the expected checksum; None if it is uncompressed and its checksum is not known."""
    if path.suffix != data_file.suffix:
        return None
    return file_sha256(path) in data_file.sha256.split()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(data_files: Sequence[DataFile], folder: Path, progress: Callable[[int, int], None]) -> list[Path]:
    """Download the files at one URL, verify their checksums and move them to their paths; of an archive only its members are kept."""
    data = download(data_files[0].url, folder, progress)
    return [store(data_file, data, folder) for data_file in data_files]


def store(data_file: DataFile, data: bytes, folder: Path) -> Path:
    """Write a downloaded file, or its member of an archive, if its checksum is the expected one."""
    target = folder / data_file.task / (data_file.name + data_file.suffix)
    target.parent.mkdir(parents=True, exist_ok=True)
    if data_file.archive_member is not None:
        data = read_member(data_file, data)
    digest = hashlib.sha256(data).hexdigest()
    if digest not in data_file.sha256.split():
        expected = f"expected {data_file.sha256[:12]}..." if data_file.sha256 else "none is known"
        raise DataError(f"{data_file.name} from {data_file.url} has SHA-256 {digest[:12]}..., {expected}; it was not stored")
    atomic_write(target, data)
    return target


def read_member(data_file: DataFile, archive: bytes) -> bytes:
    """The bytes of a file inside a .zip or .tgz archive."""
    assert data_file.archive_member is not None, "`store` checks it"
    try:
        if data_file.url.endswith(".zip"):
            return zipfile.ZipFile(io.BytesIO(archive)).read(data_file.archive_member)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = tar.extractfile(data_file.archive_member)
            if member is None:
                raise KeyError(f"{data_file.archive_member} is not a file")
            return member.read()
    except (zipfile.BadZipFile, tarfile.TarError, KeyError) as error:
        raise DataError(f"{data_file.url} is not the expected archive: {error}") from None


def download(url: str, folder: Path, progress: Callable[[int, int], None]) -> bytes:
    """The bytes at a URL."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            total = int(response.headers.get("Content-Length") or 0)
            data = bytearray()
            while chunk := response.read(1 << 18):
                data += chunk
                progress(len(data), total)
            return bytes(data)
    except (urllib.error.URLError, OSError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DataError(f"{url} cannot be reached ({reason}); download it on another machine and put it into {folder}") from None
