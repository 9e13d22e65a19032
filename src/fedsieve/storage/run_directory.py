"""A run on disk: config.toml, run_info.json, metrics.jsonl, model.safetensors, supports.npz, result.json, report.html. No torch here.

While it runs also checkpoints/ and supports.bin: with them and metrics.jsonl it can be resumed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsieve.storage.atomic import atomic_write

if TYPE_CHECKING:  # `--help` reads the store and must not wait for NumPy
    import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CONFIG, METRICS, MODEL, SUPPORTS_NPZ, RESULT = "config.toml", "metrics.jsonl", "model.safetensors", "supports.npz", "result.json"
RUN_INFO, REPORT = "run_info.json", "report.html"
CHECKPOINTS, SUPPORTS = "checkpoints", "supports.bin"


class RunDirectoryError(ValueError):
    """A run folder that cannot be used."""


class WriteError(RuntimeError):
    """The disk would not take what a run has to leave; what was there is kept."""


def create_run_dir(folder: Path, *, explicit: bool) -> Path:
    """Make the run's folder. A finished run is never overwritten: a chosen folder is refused, a named one gets a number."""
    try:
        if explicit and any((folder / name).exists() and (folder / name).stat().st_size for name in (CONFIG, METRICS, RESULT)):
            raise RunDirectoryError(f"--out {folder} already holds a run, which is never overwritten; choose another folder or remove it")
        number = 1
        place = folder
        while not explicit and place.exists():
            number += 1
            place = folder.with_name(f"{folder.name}-{number}")
        place.mkdir(parents=True, exist_ok=True)
        probe = place / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise RunDirectoryError(f"cannot write a run into {folder}: {problem.strerror}; choose another folder with --out") from None
    return place


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the same folder; a process that ends in any way lets go."""
    try:
        file = (folder / METRICS).open("ab")
    except OSError as problem:
        raise RunDirectoryError(f"cannot write into {folder}: {problem.strerror}") from None
    with file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(f"another process is training in {folder}; wait for it, or stop it") from None
        yield


@contextmanager
def report_write_errors(folder: Path) -> Iterator[None]:
    """What the disk would not take, in one line that says how to go on."""
    try:
        yield
    except OSError as problem:
        again = f"go on with: fedsieve train --resume {folder}" if (folder / CONFIG).exists() else "start again"
        raise WriteError(f"cannot write into {folder}: {problem.strerror}; mend that, then {again}") from None


def write_supports(folder: Path, **arrays: "np.ndarray") -> None:
    """Supports per round and gate histograms."""
    import numpy as np

    content = BytesIO()
    np.savez_compressed(content, **arrays)
    atomic_write(folder / SUPPORTS_NPZ, content.getvalue())


def pad_supports(supports: "Sequence[np.ndarray]") -> "np.ndarray":
    """Index sets as one matrix; where groups of unequal size make some smaller, their rows end in -1."""
    import numpy as np

    table = np.full((len(supports), max(map(len, supports))), -1, dtype=np.int32)
    for row, support in zip(table, supports, strict=True):
        row[: len(support)] = support
    return table


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def to_toml(config: Mapping[str, Any]) -> str:
    """The configuration as TOML: plain values first, then one table a section."""
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
