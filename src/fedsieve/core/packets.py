"""A message before it is encoded as bytes: which entries of a vector it holds, and their rounded values."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core.quantization import Coding, QuantizedField, quantize
from fedsieve.core.random import Draw

GATE_VALUE_FIELDS = frozenset({"gates", "gate", "log_alpha", "kept_gate", "default_gate", "multiplier"})
"""Fields and scalars that are gates or their multiplier: their values have limits."""

GATE_FIELDS = GATE_VALUE_FIELDS | {"gate_gradient"}
"""Fields and scalars that concern gates: clipping, robust aggregation and privacy treat them apart from weights."""

SEED_SCALARS = frozenset({"rotation"})
"""Scalars that are seeds of random numbers: they have no size and no mean."""


SCALAR_NAMES = ("default_gate", "multiplier", "kept_gate", "rotation")
"""All scalars of messages, in the order of the wire format; every other name is a field."""


class SparseVector(NamedTuple):
    """A vector, or a stack of them, as a packet holds it: values at a support (all coordinates if None), and a default for the rest."""

    values: Float[Tensor, "*k m"]
    indices: Int64[Tensor, "*k m"] | None = None
    default: Float[Tensor, "*k"] | None = None
    """None if the packet holds no value for the other coordinates"""

    def densify(self, background: Float[Tensor, " n"] | None, size: int) -> Float[Tensor, "*k _n"]:
        """The full vector; coordinates without a value come from `background`, or are 0."""
        if self.indices is None:
            return self.values
        missing = self.values.new_zeros(1) if background is None else background
        rest = missing if self.default is None else self.default[..., None]
        return rest.expand(*self.values.shape[:-1], size).scatter(-1, self.indices, self.values)

    def distance_to(self, background: Float[Tensor, " n"] | None, size: int) -> Float[Tensor, "*k"]:
        """The distance to a vector, or to 0, over the coordinates with a value; in double precision, so that it cannot overflow."""
        if self.default is None:
            difference = (
                self.values if background is None else self.values - (background if self.indices is None else background[self.indices])
            )
        else:
            difference = self.densify(None, size) - (0 if background is None else background)
        return torch.linalg.vector_norm(difference, dim=-1, dtype=torch.float64)


class Packet(NamedTuple):
    """A message about a vector of `size` coordinates, or a stack of them: fields at the support (all if None), and scalars."""

    size: int
    support: Int64[Tensor, "*k m"] | None
    fields: dict[str, QuantizedField]
    scalars: dict[str, Float[Tensor, "*k"]]
    seed: int | None = None
    """only in the first downlink: server and clients draw the same initial weights from it (decision E7)"""
    buffers: Mapping[int, Float[Tensor, "*k _b"]] = {}
    """values of the model's buffers that the receiver does not know, by the number of the buffer; float32"""

    def field_dense(self, field: str, dtype: torch.dtype, default: Tensor | float = 0.0) -> Tensor:
        """The field as a full vector, with `default` off the support."""
        values = self.fields[field].decode(dtype)
        if self.support is None:
            return values
        background = torch.as_tensor(default, dtype=dtype, device=values.device)[..., None].expand(*values.shape[:-1], self.size)
        return background.scatter(-1, self.support, values)

    def support_mask(self, dtype: torch.dtype) -> Tensor:
        """1 on the support, 0 elsewhere."""
        if self.support is None:
            return torch.ones(self.size, dtype=dtype)
        return torch.zeros(*self.support.shape[:-1], self.size, dtype=dtype, device=self.support.device).scatter(-1, self.support, 1.0)

    def restrict(self, vector: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """The vector on the support, 0 elsewhere."""
        return vector if self.support is None else torch.zeros_like(vector).scatter_(0, self.support, vector[self.support])

    def unstack(self) -> list["Packet"]:
        """The packets of a stack."""
        columns = {name: _unstack_field(values) for name, values in self.fields.items()}
        scalars = {name: values.unbind() for name, values in self.scalars.items()}
        count = len(next(iter((*columns.values(), *scalars.values()))))
        supports = [None] * count if self.support is None else self.support.unbind()
        return [
            Packet(
                self.size,
                supports[i],
                {name: rows[i] for name, rows in columns.items()},
                {name: rows[i] for name, rows in scalars.items()},
                buffers={number: values[i] for number, values in self.buffers.items()},
            )
            for i in range(count)
        ]

    def rows(self, indices: Sequence[int]) -> "Packet":
        """Some packets of a stack, as a stack."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        fields = {
            name: QuantizedField(v.codes[chosen], None if v.scale is None else v.scale[chosen], v.coding) for name, v in self.fields.items()
        }
        support = None if self.support is None else self.support[chosen]
        return Packet(self.size, support, fields, {name: value[chosen] for name, value in self.scalars.items()})

    def unsqueeze(self) -> "Packet":
        """A packet as a stack of one."""
        fields = {
            name: QuantizedField(v.codes[None], None if v.scale is None else v.scale[None], v.coding) for name, v in self.fields.items()
        }
        scalars = {name: value[None] for name, value in self.scalars.items()}
        buffers = {number: values[None] for number, values in self.buffers.items()}
        return Packet(self.size, None if self.support is None else self.support[None], fields, scalars, buffers=buffers)

    @property
    def stack_size(self) -> int:
        """Number of packets in a stack."""
        return len(next(iter(self.fields.values())).codes)

    @property
    def schema(self) -> tuple[Any, ...]:
        """What all packets of a stack share: names, codings and the number of values."""
        fields = ((name, values.coding, values.codes.shape[-1]) for name, values in self.fields.items())
        return self.size, self.support is None, *fields, *self.scalars, *self.buffers


def _unstack_field(field: QuantizedField) -> list[QuantizedField]:
    codes = field.codes.unbind()
    scales = [None] * len(codes) if field.scale is None else field.scale.unbind()
    return [QuantizedField(row, scale, field.coding) for row, scale in zip(codes, scales, strict=True)]


def concatenate(stacks: Sequence[Packet]) -> Packet | None:
    """Several stacks as one, or None if their schemas differ."""
    first = stacks[0]
    if len(stacks) == 1 or len({stack.schema for stack in stacks}) > 1:
        return first if len(stacks) == 1 else None
    fields = {}
    for name, values in first.fields.items():
        parts = [stack.fields[name] for stack in stacks]
        scale = None if values.scale is None else torch.cat([part.scale for part in parts if part.scale is not None])
        fields[name] = QuantizedField(torch.cat([part.codes for part in parts]), scale, values.coding)
    scalars = {name: torch.cat([stack.scalars[name] for stack in stacks]) for name in first.scalars}
    support = None if first.support is None else torch.cat([stack.support for stack in stacks if stack.support is not None])
    buffers = {number: torch.cat([stack.buffers[number] for stack in stacks]) for number in first.buffers}
    return Packet(first.size, support, fields, scalars, buffers=buffers)


def seed_packet(seed: int, size: int) -> Packet:
    """The first downlink: a seed from which server and clients draw the same initial weights (decision E7)."""
    return Packet(size, None, {}, {}, seed)


def zero_packet(size: int, names: frozenset[str]) -> Packet:
    """A packet whose fields and scalars with these names are all zero."""
    zeros = QuantizedField(torch.zeros(size), None, Coding.FLOAT32)
    fields = {name: zeros for name in sorted(names) if name not in SCALAR_NAMES}
    return Packet(size, None, fields, {name: torch.zeros(()) for name in sorted(names) if name in SCALAR_NAMES})


def dense_packet(fields: dict[str, Float[Tensor, "*k n"]], bits: int, draw: Draw) -> Packet:
    """A packet with all coordinates of each field."""
    size = next(iter(fields.values())).shape[-1]
    return Packet(size, None, {name: quantize(v, bits, draw, name, zero_free=False) for name, v in fields.items()}, {})


def sparse_packet(support: Int64[Tensor, "*k m"], fields: dict[str, Float[Tensor, "*k n"]], bits: int, draw: Draw) -> Packet:
    """A packet with each field at the support. A support of all coordinates is stored as None."""
    size = next(iter(fields.values())).shape[-1]
    rounded = {name: quantize(v.gather(-1, support), bits, draw, name, zero_free=True) for name, v in fields.items()}
    return Packet(size, None if support.shape[-1] == size else support, rounded, {})
