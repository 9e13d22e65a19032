"""A run directory: config.toml, run_info.json, metrics.jsonl, model.safetensors, MODEL_CARD.md, supports.npz, result.json, report.html.

During training it also has checkpoints/ and supports.bin, which resuming needs together with metrics.jsonl. Does not import torch.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from fedsieve.storage.atomic import atomic_write, open_own_file, remove_parts

if TYPE_CHECKING:  # `--help` imports this module and must not import NumPy
    import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CONFIG, METRICS, MODEL, SUPPORTS_NPZ, RESULT = "config.toml", "metrics.jsonl", "model.safetensors", "supports.npz", "result.json"
RUN_INFO, REPORT, MODEL_CARD = "run_info.json", "report.html", "MODEL_CARD.md"
CHECKPOINTS, SUPPORTS = "checkpoints", "supports.bin"
SECRET = "privacy.key"
"""The server's secret of a private run; only its owner may read it."""
WRITABLE_PROBE = ".writable"
CHECKSUM_KEY = ', "crc32": "'
"""What separates the metrics of a round from their checksum."""


class RunDirectoryError(ValueError):
    """A run directory cannot be used."""


class WriteError(RuntimeError):
    """A file of a run could not be written; existing files are unchanged."""


def create_run_dir(folder: Path, *, explicit: bool) -> Path:
    """Create a run directory; never reuse one that holds a run. An explicit folder then raises an error, others get a number."""
    try:
        if explicit and any((folder / name).exists() and (folder / name).stat().st_size for name in (CONFIG, METRICS, RESULT)):
            raise RunDirectoryError(f"--out {folder} already holds a run, which is never overwritten; choose another folder or remove it")
        number = 1
        run_dir = folder
        while not explicit and run_dir.exists():
            number += 1
            run_dir = folder.with_name(f"{folder.name}-{number}")
        run_dir.mkdir(parents=True, exist_ok=True)
        atomic_write(run_dir / WRITABLE_PROBE, b"")
        (run_dir / WRITABLE_PROBE).unlink()
    except OSError as error:
        raise RunDirectoryError(f"cannot write a run into {folder}: {error.strerror}; choose another folder with --out") from None
    return run_dir


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Prevent other processes from training in the same folder. The lock ends with the process.

    A folder with a symbolic link is refused: a run of a stranger could otherwise write to files outside it.
    """
    require_no_links(folder)
    try:
        file = os.fdopen(open_own_file(folder / METRICS, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    except OSError as error:
        raise RunDirectoryError(f"cannot write into {folder}: {error.strerror}") from None
    with file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(f"another process is training in {folder}; wait for it, or stop it") from None
        except OSError as error:
            raise RunDirectoryError(
                f"{folder} cannot be locked, so that two processes could train in it: {error.strerror}; "
                f"use a folder on a file system with locks, such as a local disk"
            ) from None
        for part in (folder, folder / CHECKPOINTS):
            remove_parts(part)
        yield


def require_no_links(folder: Path) -> None:
    """Raise RunDirectoryError if a file or folder inside a run directory is a symbolic link."""
    for path in (*folder.glob("*"), *(folder / CHECKPOINTS).glob("*")):
        if path.is_symlink():
            raise RunDirectoryError(
                f"{path} is a symbolic link, and a run writes only to files of its own folder; remove it, or copy the file"
            )


@contextmanager
def report_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a WriteError that says how to continue."""
    try:
        yield
    except OSError as error:
        remedy = f"continue with: fedsieve train --resume {folder}" if (folder / CONFIG).exists() else "start again"
        raise WriteError(f"cannot write into {folder}: {error.strerror}; fix this, then {remedy}") from None


def write_supports(folder: Path, **arrays: "np.ndarray") -> None:
    """Write the supports and gate histograms of all rounds."""
    import numpy as np

    content = BytesIO()
    np.savez_compressed(content, **arrays)  # pyright: ignore[reportArgumentType]  # none is named allow_pickle
    atomic_write(folder / SUPPORTS_NPZ, content.getvalue())


def pad_supports(supports: "Sequence[np.ndarray]") -> "np.ndarray":
    """The supports as one matrix; shorter ones, which groups of unequal size can cause, are padded with -1."""
    import numpy as np

    table = np.full((len(supports), max(map(len, supports))), -1, dtype=np.int32)
    for row, support in zip(table, supports, strict=True):
        row[: len(support)] = support
    return table


def encode_metrics(row: Mapping[str, Any]) -> bytes:
    """A line of metrics.jsonl: the metrics of a round, and the CRC-32 of the line without it."""
    text = json.dumps(row)
    return f'{text[:-1]}{CHECKSUM_KEY}{crc32(text.encode()):08x}"}}\n'.encode()


def decode_metrics(lines: Sequence[str], path: Path) -> list[dict[str, Any]]:
    """The metrics of the rounds in complete lines of metrics.jsonl; raises RunDirectoryError, which names the first damaged line.

    Lines of older versions have no checksum; if one line has a checksum, all must have it.
    """
    has_checksums = any(CHECKSUM_KEY in line for line in lines)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            text, key, checksum = line.rpartition(CHECKSUM_KEY)
            text = f"{text}}}" if key else line
            if has_checksums and checksum != f'{crc32(text.encode()):08x}"}}':
                raise ValueError("its checksum does not match")
            row = json.loads(text)
            if not isinstance(row, dict) or row.get("round") != number:
                raise ValueError(f"it is not the object of round {number}")
            if not all(type(row.get(name)) is int for name in ("bytes_up", "bytes_down")):
                raise ValueError("bytes_up and bytes_down must be whole numbers")
        except (ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{path} is damaged in line {number}: {error}") from None
        rows.append(row)
    return rows


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each round of a run."""
    path = folder / METRICS
    return decode_metrics(path.read_text(errors="replace").splitlines(), path)


def read_result(folder: Path) -> dict[str, Any]:
    """The result of a finished run."""
    return json.loads((folder / RESULT).read_text())


def to_toml(config: Mapping[str, Any]) -> str:
    """The configuration as TOML: single values first, then one table per section."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in config.items() if not isinstance(value, Mapping) and value is not None]
    for section, fields in config.items():
        if isinstance(fields, Mapping):
            lines += [
                "",
                f"[{section}]",
                *(f"{key.replace('_', '-')} = {_toml_value(value)}" for key, value in fields.items() if value is not None),
            ]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # "inf" is TOML too
    return json.dumps(value)
