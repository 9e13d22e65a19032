"""Checkpoints of the server state: safetensors files named by the number of rounds done and the digest of their content.

    save(folder, rounds_done, server, settings)      # atomic; keeps the previous checkpoint
    checkpoint = latest(folder)                      # the newest that is not damaged, or None
    check_settings(checkpoint.settings, settings)    # only the number of rounds may change
    server = checkpoint.restore(initial_server(...)) # bit for bit

Every random number is a function of the round, so the server state, what clients keep and the number of rounds are enough to resume.
"""

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load
from safetensors.numpy import save as save_safetensors
from torch import Tensor

from fedsieve.core.settings import flatten
from fedsieve.core.types import ClientMemory, Layout
from fedsieve.storage import atomic

FORMAT_VERSION = 1
SUFFIX = ".safetensors"
MEMORY_PREFIX = "client "
"""Tensors that clients keep are named "client 7.residual"."""
BUFFERS_NAME = "model buffers"
"""The tensor with the buffers of the model."""
SCALAR_TYPES = (bool, int, float, str, type(None))
MAY_CHANGE = frozenset({"rounds"})
"""Settings that may change when a run is resumed. Schedules then follow the new number of rounds from the current round on."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read."""


class SettingsChangedError(ValueError):
    """A run was resumed with other settings than it was started with."""


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    rounds_done: int
    settings: dict[str, Any]
    """the settings of the run as JSON values"""
    tensors: dict[str, np.ndarray]
    """the tensors of the server state by the path of their fields"""
    scalars: dict[str, Any]
    """the other values of the server state"""
    memories: dict[int, ClientMemory]
    """what each client keeps until its next round"""
    buffers: Tensor | None = None
    """the buffers of the model, if it has any"""
    damage_reports: tuple[str, ...] = ()
    """newer checkpoints that are damaged, and why"""

    def restore(self, template: Any) -> Any:
        """The server state. `template` is a state of the same run, such as the initial one; it defines the types and the layout."""
        expected = {name: isinstance(value, Tensor) for name, value in _leaves(template)}
        stored = dict.fromkeys(self.tensors, True) | dict.fromkeys(self.scalars, False)
        if expected != stored:
            names = sorted(name for name, _ in expected.items() ^ stored.items())
            raise SettingsChangedError(
                f"the checkpoint is of another algorithm or version: these fields of the state differ: {', '.join(dict.fromkeys(names))}"
            )
        return _rebuild(template, {**self.tensors, **self.scalars})


def find_non_finite(server: Any) -> str | None:
    """The first field of a server state that holds a number that is not finite, or None."""
    for name, value in _leaves(server):
        if not bool(torch.isfinite(torch.as_tensor(value)).all() if isinstance(value, (Tensor, float)) else True):
            return name
    return None


def save(
    folder: Path,
    rounds_done: int,
    server: Any,
    settings: Mapping[str, Any],
    memories: Mapping[int, ClientMemory] = MappingProxyType({}),
    buffers: Tensor | None = None,
) -> Path:
    """Write a checkpoint and keep the previous one. If an error is raised, the existing checkpoints are unchanged."""
    if (field := find_non_finite(server)) is not None:
        raise CheckpointError(
            f"the state after round {rounds_done} is not stored, because its {field} is not finite and no resumed run could use it; "
            f"the last finite checkpoint is kept, resume from it with a lower learning rate or a robust aggregator"
        )
    content = encode(rounds_done, server, settings, memories, buffers)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        atomic.fsync_directory(folder.parent)
    path = folder / f"{rounds_done:06d}-{_digest(content)}{SUFFIX}"
    atomic.atomic_write(path, content)
    previous = [other for other in list_checkpoints(folder) if _rounds_from_name(other) < rounds_done][-1:]
    for other in list_checkpoints(folder):
        if other not in (path, *previous):
            os.unlink(other)
    return path


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is not damaged, or None if the folder has none."""
    damage_reports: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return _read_checkpoint(path)._replace(damage_reports=tuple(damage_reports))
        except CheckpointError as error:
            damage_reports.append(f"{path}: {error}")
    if damage_reports:
        raise CheckpointError(f"no checkpoint can be read: {'; '.join(damage_reports)}")
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, also damaged ones, in the order of rounds. Partially written files have another suffix."""
    return sorted((path for path in folder.glob(f"*-*{SUFFIX}") if path.name.split("-")[0].isdecimal()), key=_rounds_from_name)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that differ and may not change, by their names on the command line."""
    old, new = ({name.replace("_", "-"): value for name, value in flatten(json.loads(json.dumps(one))).items()} for one in (before, now))
    names = sorted((old.keys() | new.keys()) - MAY_CHANGE)
    return [f"{name} was {old.get(name)}, is {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def check_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise SettingsChangedError if a setting differs that may not change."""
    if changes := changed_settings(before, now):
        raise SettingsChangedError(f"a resumed run keeps its settings: {'; '.join(changes)}; leave that out, or start another run")


# The file


def encode(
    rounds_done: int,
    server: Any,
    settings: Mapping[str, Any],
    memories: Mapping[int, ClientMemory] = MappingProxyType({}),
    buffers: Tensor | None = None,
) -> bytes:
    """A checkpoint as bytes. Scalars and settings are one JSON string, because several metadata keys have no fixed order."""
    leaves = dict(_leaves(server))
    tensors = {name: value.contiguous().numpy(force=True) for name, value in leaves.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in leaves.items() if not isinstance(value, Tensor)}
    metadata = {"format": FORMAT_VERSION, "rounds": rounds_done, "settings": settings, "state": scalars}
    if memories:
        metadata["memories"] = {str(client): memory.round for client, memory in memories.items()}
        for client, memory in memories.items():
            tensors |= {f"{MEMORY_PREFIX}{client}.{name}": vector.contiguous().numpy(force=True) for name, vector in memory.vectors.items()}
    if buffers is not None:
        tensors[BUFFERS_NAME] = buffers.contiguous().numpy(force=True)
    return save_safetensors(tensors, {"checkpoint": json.dumps(metadata)})


def decode(content: bytes) -> Checkpoint:
    """The checkpoint in `content`; raises CheckpointError for any other bytes."""
    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["checkpoint"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"not a checkpoint: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"it has another format; this version reads format {FORMAT_VERSION}")
    rounds: Any
    rounds, settings, scalars = (metadata.get(name) for name in ("rounds", "settings", "state"))
    is_valid = type(rounds) is int and rounds >= 0
    if not (is_valid and isinstance(settings, dict) and isinstance(scalars, dict)) or tensors.keys() & scalars.keys():
        raise CheckpointError("its rounds, settings or state are invalid")
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CheckpointError(f"its {name} is not finite")
    memories = _decode_memories(metadata.get("memories", {}), tensors)
    buffers = torch.from_numpy(tensors.pop(BUFFERS_NAME)) if BUFFERS_NAME in tensors else None
    state = {name: tensor for name, tensor in tensors.items() if not name.startswith(MEMORY_PREFIX)}
    return Checkpoint(rounds, settings, state, scalars, memories, buffers)


def _decode_memories(rounds: Any, tensors: Mapping[str, np.ndarray]) -> dict[int, ClientMemory]:
    if not isinstance(rounds, dict) or not all(client.isdecimal() and type(round) is int for client, round in rounds.items()):
        raise CheckpointError("its memories of clients are invalid")
    memories = {int(client): ClientMemory(round, {}) for client, round in rounds.items()}
    for name, tensor in tensors.items():
        if name.startswith(MEMORY_PREFIX):
            client, _, field = name.removeprefix(MEMORY_PREFIX).partition(".")
            if client not in rounds:
                raise CheckpointError(f"its memory {name} belongs to no client")
            memories[int(client)].vectors[field] = torch.from_numpy(tensor)
    return memories


def _read_checkpoint(path: Path) -> Checkpoint:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from None
    if path.name != f"{_rounds_from_name(path):06d}-{_digest(content)}{SUFFIX}":
        raise CheckpointError(f"damaged: its {len(content)} bytes do not have the digest in its name")
    checkpoint = decode(content)
    if checkpoint.rounds_done != _rounds_from_name(path):
        raise CheckpointError(f"damaged: it holds round {checkpoint.rounds_done}, but its name has {_rounds_from_name(path)}")
    return checkpoint


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def _rounds_from_name(path: Path) -> int:
    return int(path.name.split("-")[0])


# The state


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and scalars by the path of their fields. A Layout is skipped: it belongs to the model, not to the state."""
    if isinstance(state, Layout):
        return
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        for field, value in zip(state._fields, state, strict=True):  # pyright: ignore[reportAttributeAccessIssue]  # a named tuple
            yield from _leaves(value, f"{name}.{field}".lstrip("."))
    elif isinstance(state, (Tensor, *SCALAR_TYPES)):
        yield name, state
    else:
        raise TypeError(f"a server state consists of tensors, scalars and named tuples of them; {name} is a {type(state).__name__}")


def _rebuild(template: Any, values: Mapping[str, Any], name: str = "") -> Any:
    if isinstance(template, Layout):
        return template
    if isinstance(template, tuple):
        named: Any = template
        fields = zip(named._fields, template, strict=True)
        return named._replace(**{field: _rebuild(value, values, f"{name}.{field}".lstrip(".")) for field, value in fields})
    if not isinstance(template, Tensor):
        return values[name]
    tensor = torch.from_numpy(values[name])
    # a tensor that is empty at the start of a run may have grown
    grows = len(template.shape) > 0 and not len(template) and tensor.shape[1:] == template.shape[1:]
    if (tensor.shape != template.shape and not grows) or tensor.dtype != template.dtype:
        raise SettingsChangedError(
            f"the checkpoint is of another model: its {name} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"this run has {template.dtype} {tuple(template.shape)}"
        )
    return tensor.to(template.device)
