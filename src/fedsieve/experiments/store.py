"""A run on disk: config.toml, run.json, metrics.jsonl, model.safetensors, trace.npz, result.json, report.html. No torch here."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

CONFIG, METRICS, MODEL, TRACE, RESULT = "config.toml", "metrics.jsonl", "model.safetensors", "trace.npz", "result.json"
ABOUT, REPORT = "run.json", "report.html"


class FolderError(ValueError):
    """A run folder that cannot be used."""


def claim(folder: Path, *, chosen: bool) -> Path:
    """Make the run's folder. A finished run is never overwritten: a chosen folder is refused, a named one gets a number."""
    try:
        if chosen and any((folder / name).exists() for name in (CONFIG, METRICS, RESULT)):
            raise FolderError(f"--out {folder} already holds a run, which is never overwritten; choose another folder or remove it")
        number = 1
        place = folder
        while not chosen and place.exists():
            number += 1
            place = folder.with_name(f"{folder.name}-{number}")
        place.mkdir(parents=True, exist_ok=True)
        probe = place / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise FolderError(f"cannot write a run into {folder}: {problem.strerror}; choose another folder with --out") from None
    return place


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def append(file: TextIO, row: Mapping[str, Any]) -> None:
    """One line, on disk before the next round begins."""
    file.write(json.dumps(row) + "\n")
    file.flush()


def write_trace(folder: Path, **arrays: np.ndarray) -> None:
    """Supports per round and gate histograms."""
    temporary = folder / (TRACE + ".part")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    temporary.replace(folder / TRACE)


def padded(supports: Sequence[np.ndarray]) -> np.ndarray:
    """Index sets as one matrix; where groups of unequal size make some smaller, their rows end in -1."""
    table = np.full((len(supports), max(map(len, supports))), -1, dtype=np.int32)
    for row, support in zip(table, supports, strict=True):
        row[: len(support)] = support
    return table


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def toml(config: Mapping[str, Any]) -> str:
    """The configuration as TOML: plain values first, then one table a section."""
    lines = [f"{key} = {_value(value)}" for key, value in config.items() if not isinstance(value, Mapping) and value is not None]
    for section, fields in config.items():
        if isinstance(fields, Mapping):
            lines += [
                "",
                f"[{section}]",
                *(f"{key.replace('_', '-')} = {_value(value)}" for key, value in fields.items() if value is not None),
            ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)  # "inf" is TOML too
    return json.dumps(value)
