"""A server between two rounds, on disk: one safetensors file a checkpoint, named by the rounds done and by the digest of its content.

    save(folder, rounds, server, settings)      # atomic; the one before is kept
    found = newest(folder)                      # the newest that is whole, or None
    refuse_changes(found.settings, settings)    # but for the number of rounds, a run goes on as it began
    server = found.restore(start(...))          # the same bits

Which round comes next follows from the rounds done, and every random number from the round: nothing else has to be kept.
"""

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load
from safetensors.numpy import save as packed
from torch import Tensor

from fedsieve.core.types import Layout
from fedsieve.storage import atomic

FORMAT_VERSION = 1
SUFFIX = ".safetensors"
SCALAR_TYPES = (bool, int, float, str, type(None))
MAY_CHANGE = frozenset({"rounds"})
"""Settings a run may go on with in another form: schedules then follow the new number of rounds from where the run stands."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read."""


class SettingsChangedError(ValueError):
    """A run that was to go on with other settings than it began with."""


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    rounds_done: int
    """rounds that are done"""
    settings: dict[str, Any]
    """the run's, as plain values"""
    tensors: dict[str, np.ndarray]
    """the state's tensors by the names of their fields"""
    scalars: dict[str, Any]
    """its other values"""
    damage_reports: tuple[str, ...] = ()
    """newer checkpoints that were passed over, and why"""

    def restore(self, template: Any) -> Any:
        """The server; `like` is one of the same run, such as the one it started with, and lends its form and its layout."""
        wanted = {name: isinstance(value, Tensor) for name, value in _leaves(template)}
        held = dict.fromkeys(self.tensors, True) | dict.fromkeys(self.scalars, False)
        if wanted != held:
            odd = sorted(name for name, _ in wanted.items() ^ held.items())
            raise SettingsChangedError(
                f"the checkpoint is of another method or version: its state has {', '.join(dict.fromkeys(odd))}, or lacks it"
            )
        return _rebuild(template, {**self.tensors, **self.scalars})


def save(folder: Path, rounds_done: int, server: Any, settings: Mapping[str, Any]) -> Path:
    """Write a checkpoint and keep the one before it; an OSError leaves those that are there as they were."""
    content = encode(rounds_done, server, settings)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        atomic.fsync_directory(folder.parent)
    path = folder / f"{rounds_done:06d}-{_digest(content)}{SUFFIX}"
    atomic.atomic_write(path, content)
    before = [other for other in list_checkpoints(folder) if _rounds_from_name(other) < rounds_done][-1:]
    for other in list_checkpoints(folder):
        if other not in (path, *before):
            os.unlink(other)
    return path


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None where there is none at all."""
    damaged: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return _read_checkpoint(path)._replace(damage_reports=tuple(damaged))
        except CheckpointError as problem:
            damaged.append(f"{path}: {problem}")
    if damaged:
        raise CheckpointError(f"no checkpoint can be read: {'; '.join(damaged)}")
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by the rounds done, damaged ones among them; half-written files have another ending."""
    return sorted((path for path in folder.glob(f"*-*{SUFFIX}") if path.name.split("-")[0].isdecimal()), key=_rounds_from_name)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings that differ, by the names users type, but for those that may be raised."""
    old, new = _flat(json.loads(json.dumps(before))), _flat(json.loads(json.dumps(now)))
    names = sorted((old.keys() | new.keys()) - MAY_CHANGE)
    return [f"{name} was {old.get(name)}, is {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def check_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A run goes on as it began."""
    if found := changed_settings(before, now):
        raise SettingsChangedError(f"a resumed run keeps its settings: {'; '.join(found)}; leave that out, or start another run")


# The file


def encode(rounds_done: int, server: Any, settings: Mapping[str, Any]) -> bytes:
    """A checkpoint as bytes; what is no tensor as one line of JSON (several keys would have no fixed order)."""
    leaves = dict(_leaves(server))
    tensors = {name: value.contiguous().numpy(force=True) for name, value in leaves.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in leaves.items() if not isinstance(value, Tensor)}
    about = {"format": FORMAT_VERSION, "rounds": rounds_done, "settings": settings, "state": plain}
    return packed(tensors, {"checkpoint": json.dumps(about)})


def decode(content: bytes) -> Checkpoint:
    """The checkpoint in some bytes; whatever they are, only a CheckpointError escapes."""
    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["checkpoint"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise CheckpointError(f"not a checkpoint: {type(problem).__name__}: {problem}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"of another format; this version reads format {FORMAT_VERSION}")
    rounds, settings, plain = (about.get(name) for name in ("rounds", "settings", "state"))
    known = type(rounds) is int and rounds >= 0 and isinstance(settings, dict) and isinstance(plain, dict)
    if not known or tensors.keys() & plain.keys():
        raise CheckpointError("its rounds, settings or state make no sense")
    return Checkpoint(rounds, settings, tensors, plain)


def _read_checkpoint(path: Path) -> Checkpoint:
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"cannot be read: {problem.strerror}") from None
    if path.name != f"{_rounds_from_name(path):06d}-{_digest(content)}{SUFFIX}":
        raise CheckpointError(f"damaged: its {len(content)} bytes do not have the digest in its name")
    found = decode(content)
    if found.rounds_done != _rounds_from_name(path):
        raise CheckpointError(f"damaged: it is of {found.rounds_done} rounds, its name says {_rounds_from_name(path)}")
    return found


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def _rounds_from_name(path: Path) -> int:
    return int(path.name.split("-")[0])


# The state


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values by the path of their fields. A layout is not state: it comes with the model."""
    if isinstance(state, Layout):
        return
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        for field, value in zip(state._fields, state, strict=True):
            yield from _leaves(value, f"{name}.{field}".lstrip("."))
    elif isinstance(state, (Tensor, *SCALAR_TYPES)):
        yield name, state
    else:
        raise TypeError(f"a server's state is made of tensors, plain values and named tuples of them; {name} is a {type(state).__name__}")


def _rebuild(template: Any, values: Mapping[str, Any], name: str = "") -> Any:
    if isinstance(template, Layout):
        return template
    if isinstance(template, tuple):
        fields = zip(template._fields, template, strict=True)
        return template._replace(**{field: _rebuild(value, values, f"{name}.{field}".lstrip(".")) for field, value in fields})
    if not isinstance(template, Tensor):
        return values[name]
    tensor = torch.from_numpy(values[name])
    if tensor.shape != template.shape or tensor.dtype != template.dtype:
        raise SettingsChangedError(
            f"the checkpoint is of another model: its {name} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"here it is {template.dtype} {tuple(template.shape)}"
        )
    return tensor.to(template.device)


def _flat(settings: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = section + key.replace("_", "-")
        found |= _flat(value, name + ".") if isinstance(value, Mapping) else {name: value}
    return found
