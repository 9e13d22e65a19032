"""Known data files: where people keep them, what they must hash to, and where their originals live. No torch here."""

import hashlib
import io
import os
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

DATA_FOLDER_VARIABLE = "FEDSIEVE_DATA"
SUFFIXES = {".gz": ("", ".gz"), ".bz2": ("", ".bz2")}


class DataError(ValueError):
    """Data that is missing, damaged or not what it should be; the message says what to do."""


class DataFile(NamedTuple):
    """A file of a public data set."""

    name: str
    """without a suffix of compression"""
    task: str
    folders: tuple[str, ...]
    """below the data folder, where it may lie"""
    sha256: str
    """of the compressed original; `first...last` where only its ends are known"""
    url: str
    archive_member: str | None = None
    """inside the archive at that address"""
    suffix: str = ".gz"


def default_folder() -> Path:
    """Where files are looked for and fetched to unless a path is given."""
    named = os.environ.get(DATA_FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "fedsieve"


def candidate_paths(folder: Path | None, data_file: DataFile) -> list[Path]:
    """Every path the file may have."""
    top = folder or default_folder()
    return [top / inner / (data_file.name + suffix) for inner in data_file.folders for suffix in SUFFIXES[data_file.suffix]]


def find_file(folder: Path | None, data_file: DataFile) -> Path:
    """The file, or what to do about its absence."""
    for path in candidate_paths(folder, data_file):
        if path.is_file():
            return path
    top = folder or default_folder()
    raise DataError(
        f"{data_file.name} not found in {top}; run `fedsieve data fetch {data_file.task}`, or put {data_file.name}{data_file.suffix} "
        f"from {data_file.url} into {top / data_file.task}"
    )


def checksum_ok(path: Path, data_file: DataFile) -> bool | None:
    """Whether a file is the known one; None where it is uncompressed and has no known sum."""
    if path.suffix != data_file.suffix:
        return None
    return hash_matches(file_sha256(path), data_file.sha256)


def hash_matches(digest: str, expected: str) -> bool:
    """Whether a hash is the wanted one, of which perhaps only the ends are known."""
    first, _, last = expected.partition("...")
    return digest.startswith(first) and digest.endswith(last or first[-8:])


def file_sha256(path: Path) -> str:
    """The file's hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(data_file: DataFile, folder: Path, progress: Callable[[int, int], None]) -> Path:
    """Download the original, check its hash, then put it in place whole; an archive is opened and only the member kept."""
    target = folder / data_file.task / (data_file.name + data_file.suffix)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = download(data_file.url, folder, progress)
    if data_file.archive_member is not None:
        try:
            data = zipfile.ZipFile(io.BytesIO(data)).read(data_file.archive_member)
        except (zipfile.BadZipFile, KeyError) as problem:
            raise DataError(f"{data_file.url} is not the expected archive: {problem}") from None
    found = hashlib.sha256(data).hexdigest()
    if data_file.sha256 and not hash_matches(found, data_file.sha256):
        raise DataError(
            f"{data_file.name} from {data_file.url} hashes to {found[:12]}..., expected {data_file.sha256[:12]}...; nothing was kept"
        )
    part = target.with_name(target.name + ".part")
    part.write_bytes(data)
    part.replace(target)
    return target


def download(url: str, folder: Path, progress: Callable[[int, int], None]) -> bytes:
    """The bytes at an address."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            data = bytearray()
            while piece := answer.read(1 << 18):
                data += piece
                progress(len(data), total)
            return bytes(data)
    except (urllib.error.URLError, OSError) as problem:
        reason = getattr(problem, "reason", problem)
        raise DataError(f"{url} cannot be reached ({reason}); fetch it elsewhere and put it into {folder}") from None
