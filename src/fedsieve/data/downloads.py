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

ENVIRONMENT = "FEDSIEVE_DATA"
SUFFIXES = {".gz": ("", ".gz"), ".bz2": ("", ".bz2")}


class DataError(ValueError):
    """Data that is missing, damaged or not what it should be; the message says what to do."""


class Known(NamedTuple):
    """A file of a public data set."""

    name: str
    """without a suffix of compression"""
    task: str
    folders: tuple[str, ...]
    """below the data folder, where it may lie"""
    sha256: str
    """of the compressed original; `first...last` where only its ends are known"""
    address: str
    member: str | None = None
    """inside the archive at that address"""
    suffix: str = ".gz"


def default_folder() -> Path:
    """Where files are looked for and fetched to unless a path is given."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else Path.home() / ".cache" / "fedsieve"


def places(folder: Path | None, known: Known) -> list[Path]:
    """Every path the file may have."""
    top = folder or default_folder()
    return [top / inner / (known.name + suffix) for inner in known.folders for suffix in SUFFIXES[known.suffix]]


def find(folder: Path | None, known: Known) -> Path:
    """The file, or what to do about its absence."""
    for path in places(folder, known):
        if path.is_file():
            return path
    top = folder or default_folder()
    raise DataError(
        f"{known.name} not found in {top}; run `fedsieve data fetch {known.task}`, or put {known.name}{known.suffix} "
        f"from {known.address} into {top / known.task}"
    )


def verified(path: Path, known: Known) -> bool | None:
    """Whether a file is the known one; None where it is uncompressed and has no known sum."""
    if path.suffix != known.suffix:
        return None
    return matches(sha256(path), known.sha256)


def matches(found: str, wanted: str) -> bool:
    """Whether a hash is the wanted one, of which perhaps only the ends are known."""
    first, _, last = wanted.partition("...")
    return found.startswith(first) and found.endswith(last or first[-8:])


def sha256(path: Path) -> str:
    """The file's hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(known: Known, folder: Path, progress: Callable[[int, int], None]) -> Path:
    """Download the original, check its hash, then put it in place whole; an archive is opened and only the member kept."""
    target = folder / known.task / (known.name + known.suffix)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = download(known.address, folder, progress)
    if known.member is not None:
        try:
            data = zipfile.ZipFile(io.BytesIO(data)).read(known.member)
        except (zipfile.BadZipFile, KeyError) as problem:
            raise DataError(f"{known.address} is not the expected archive: {problem}") from None
    found = hashlib.sha256(data).hexdigest()
    if known.sha256 and not matches(found, known.sha256):
        raise DataError(f"{known.name} from {known.address} hashes to {found[:12]}..., expected {known.sha256[:12]}...; nothing was kept")
    part = target.with_name(target.name + ".part")
    part.write_bytes(data)
    part.replace(target)
    return target


def download(address: str, folder: Path, progress: Callable[[int, int], None]) -> bytes:
    """The bytes at an address."""
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            data = bytearray()
            while piece := answer.read(1 << 18):
                data += piece
                progress(len(data), total)
            return bytes(data)
    except (urllib.error.URLError, OSError) as problem:
        reason = getattr(problem, "reason", problem)
        raise DataError(f"{address} cannot be reached ({reason}); fetch it elsewhere and put it into {folder}") from None
