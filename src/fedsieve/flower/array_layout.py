"""Which arrays of a Flower app are gated, and how arrays become one vector and back.

Gated are floating-point arrays of two or more dimensions: the weights of linear layers, convolutions and embeddings. All others are
always sent whole: biases, the parameters and statistics of normalization layers, counters.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.types import Layout
from fedsieve.wire import PacketError


class ArraySpec(NamedTuple):
    """Name, data type and shape of an array, and whether its values have gates."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_gated: bool

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the values."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ArrayLayout:
    """The arrays of an app, in the order of its record."""

    specs: tuple[ArraySpec, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], ungated: Sequence[str]) -> "ArrayLayout":
        """Return the layout of some arrays; names that match a pattern of `ungated` have no gates."""
        return cls(
            tuple(
                ArraySpec(name, array.dtype.name, array.shape, is_gated=_has_gates(array) and not _matches(name, ungated))
                for name, array in arrays.items()
            )
        )

    @cached_property
    def layout(self) -> Layout:
        """The gated arrays as the layers of one vector."""
        layers, at = {}, 0
        for spec in self.gated:
            layers[spec.name] = (slice(at, at + prod(spec.shape)), spec.shape)
            at += prod(spec.shape)
        return Layout(at, layers)

    @cached_property
    def gated(self) -> list[ArraySpec]:
        """The gated arrays."""
        return [spec for spec in self.specs if spec.is_gated]

    @cached_property
    def dense(self) -> list[ArraySpec]:
        """The arrays that are sent whole."""
        return [spec for spec in self.specs if not spec.is_gated]

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of all values without compression."""
        return sum(spec.num_bytes for spec in self.specs)

    def find_difference(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Return how arrays differ from this layout, or None: names and shapes must be equal, data types may differ."""
        shapes = {spec.name: spec.shape for spec in self.specs}
        if arrays.keys() != shapes.keys():
            names = sorted(arrays.keys() ^ shapes.keys())
            return f"names of arrays that only one side has: {', '.join(names[:5])}"
        wrong = [name for name, array in arrays.items() if array.shape != shapes[name]]
        return f"array {wrong[0]} has the shape {arrays[wrong[0]].shape}, and not {shapes[wrong[0]]}" if wrong else None

    def flatten(self, arrays: Mapping[str, np.ndarray]) -> Float[Tensor, " p"]:
        """Return the gated arrays as one vector in single precision."""
        return torch.from_numpy(np.concatenate([arrays[spec.name].reshape(-1).astype(np.float32) for spec in self.gated]))

    def unflatten(self, vector: Float[Tensor, " p"], dense: Mapping[str, np.ndarray]) -> ArrayRecord:
        """Return a vector and the dense arrays as a record; every array has the data type of this layout."""
        values = vector.numpy(force=True)
        arrays = {**dense, **{name: values[part].reshape(shape) for name, (part, shape) in self.layout.layers.items()}}
        return ArrayRecord({spec.name: Array(_cast(arrays[spec.name], spec)) for spec in self.specs})

    def dense_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the dense arrays."""
        return {spec.name: arrays[spec.name] for spec in self.dense}

    def dense_to_bytes(self, arrays: Mapping[str, np.ndarray]) -> bytes:
        """Return the values of the dense arrays, one array after the other, little-endian."""
        return b"".join(_cast(arrays[spec.name], spec).astype(_wire_dtype(spec), copy=False).tobytes() for spec in self.dense)

    def dense_from_bytes(self, data: bytes) -> dict[str, np.ndarray]:
        """Return the dense arrays, or raise PacketError."""
        if len(data) != (expected := sum(spec.num_bytes for spec in self.dense)):
            raise PacketError(f"the arrays without gates have {expected} bytes; got {len(data)}")
        arrays, at = {}, 0
        for spec in self.dense:
            values = np.frombuffer(data, _wire_dtype(spec), prod(spec.shape), at).reshape(spec.shape)
            if values.dtype.kind in "fc" and not np.isfinite(values).all():
                raise PacketError(f"array {spec.name} has a value that is not finite")
            arrays[spec.name] = values.astype(spec.dtype)
            at += spec.num_bytes
        return arrays

    def to_bytes(self) -> bytes:
        """Return the names, data types and shapes, compressed."""
        return zlib.compress(json.dumps(self.specs, separators=(",", ":")).encode(), 9)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ArrayLayout":
        """Return the layout in the bytes of `to_bytes`."""
        specs = json.loads(zlib.decompress(data))
        return cls(tuple(ArraySpec(name, dtype, tuple(shape), is_gated) for name, dtype, shape, is_gated in specs))


def to_numpy(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a record by name."""
    return {name: array.numpy() for name, array in arrays.items()}


def _has_gates(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.ndim >= 2


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _wire_dtype(spec: ArraySpec) -> np.dtype:
    return np.dtype(spec.dtype).newbyteorder("<")


def _cast(array: np.ndarray, spec: ArraySpec) -> np.ndarray:
    """Return an array with its own data type; a mean of integers is rounded."""
    dtype = np.dtype(spec.dtype)
    return np.asarray(np.rint(array) if dtype.kind in "iu" and array.dtype.kind == "f" else array).astype(dtype)
