"""Lossy packing: what a message keeps of a vector. Choosing entries and rounding values change the result, so they are algorithm."""

from collections.abc import Sequence
from enum import IntEnum
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core.random import Draw
from fedsieve.kernels import addresses, for_tensors


class Coding(IntEnum):
    """How the values of one field are held."""

    FLOAT32 = 0
    FLOAT16 = 1
    LEVELS8 = 2
    """code * scale, code in -127..127"""
    LEVELS4 = 3
    """code * scale, code in -7..7"""
    MIDPOINT8 = 4
    """(code + 1/2) * scale, code in -128..127: no level is zero"""
    MIDPOINT4 = 5
    """(code + 1/2) * scale, code in -8..7"""
    UNIT8 = 6
    """code / 255, code in 0..255: a gate"""
    SIGNS = 7
    """code * scale, code -1 or 1, one bit each: a direction and one magnitude for all"""


SCALED_CODINGS = {Coding.LEVELS8, Coding.LEVELS4, Coding.MIDPOINT8, Coding.MIDPOINT4, Coding.SIGNS}
MIDPOINT_CODINGS = {Coding.MIDPOINT8, Coding.MIDPOINT4}
LEVELS_BY_BITS = {8: Coding.LEVELS8, 4: Coding.LEVELS4}
MIDPOINT_BY_BITS = {8: Coding.MIDPOINT8, 4: Coding.MIDPOINT4}
ALLOWED_BITS = (32, 16, 8, 4)
"""Bits a value may have in a message: 32 and 16 are floats, 8 and 4 are levels of one scale per packet."""


GATE_FIELDS = frozenset({"gates", "gate", "log_alpha", "kept_gate", "default_gate"})
"""Names of what are gates in a message or a part of it: they have limits of their own and are averaged plainly."""
FRACTION_SCALARS = frozenset({"signs", "spread", "width", "pace"})
"""Names of numbers that are parts of a whole, between 0 and 1: neither gates nor weights."""


class QuantizedField(NamedTuple):
    """A field of a packet as the receiver will decode it."""

    codes: Tensor
    """(*k, m): float32, float16, int8 or uint8"""
    scale: Tensor | None
    """(*k,) float32: the width of a level"""
    coding: Coding

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The numbers the receiver sees."""
        if self.coding is Coding.UNIT8:
            return self.codes.to(dtype) / 255
        if self.scale is None:
            return self.codes.to(dtype)
        levels = self.codes.to(dtype)
        if self.coding in MIDPOINT_CODINGS:
            levels += 0.5
        return levels.mul_(self.scale[..., None])


class SparseVector(NamedTuple):
    """What a packet, or a stack of them, says of one vector: values at a support (everywhere when None), and one number of all else."""

    values: Float[Tensor, "*k m"]
    indices: Int64[Tensor, "*k m"] | None = None
    default: Float[Tensor, "*k"] | None = None
    """None where it is silent of all else"""

    def densify(self, background: Float[Tensor, " n"] | None, size: int) -> Float[Tensor, "*k _n"]:
        """A vector of that size; the background, or 0, shows where the packet is silent."""
        if self.indices is None:
            return self.values
        silent = self.values.new_zeros(1) if background is None else background
        rest = silent if self.default is None else self.default[..., None]
        return rest.expand(*self.values.shape[:-1], size).scatter(-1, self.indices, self.values)

    def distance_to(self, background: Float[Tensor, " n"] | None, size: int) -> Float[Tensor, "*k"]:
        """How far it lies from a vector, or from 0; silence is no distance. In double precision: no finite number overflows."""
        if self.default is None:
            apart = self.values if background is None else self.values - (background if self.indices is None else background[self.indices])
        else:
            apart = self.densify(None, size) - (0 if background is None else background)
        return torch.linalg.vector_norm(apart, dim=-1, dtype=torch.float64)


class Packet(NamedTuple):
    """A message about a vector of `size` coordinates, or a stack of them: fields at the support (everywhere when None), and scalars."""

    size: int
    support: Int64[Tensor, "*k m"] | None
    fields: dict[str, QuantizedField]
    scalars: dict[str, Float[Tensor, "*k"]]
    seed: int | None = None
    """only the first downlink has one: every party draws the same start from it (decision E7)"""

    def field_dense(self, field: str, dtype: torch.dtype, default: Tensor | float = 0.0) -> Tensor:
        """The field as a full vector, `rest` where the packet is silent."""
        values = self.fields[field].decode(dtype)
        if self.support is None:
            return values
        background = torch.as_tensor(default, dtype=dtype, device=values.device)[..., None].expand(*values.shape[:-1], self.size)
        return background.scatter(-1, self.support, values)

    def support_mask(self, dtype: torch.dtype) -> Tensor:
        """1 where the packet speaks, 0 where it is silent."""
        if self.support is None:
            return torch.ones(self.size, dtype=dtype)
        return torch.zeros(*self.support.shape[:-1], self.size, dtype=dtype, device=self.support.device).scatter(-1, self.support, 1.0)

    def restrict(self, vector: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """A vector where the packet speaks, 0 where it is silent."""
        return vector if self.support is None else torch.zeros_like(vector).scatter_(0, self.support, vector[self.support])

    def scalar(self, name: str, dtype: torch.dtype) -> Tensor:
        """A scalar in working precision."""
        return self.scalars[name].to(dtype)

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
            )
            for i in range(count)
        ]

    def at(self, i: int) -> "Packet":
        """The i-th packet of a stack."""
        return self.unstack()[i]

    def unsqueeze(self) -> "Packet":
        """A packet as a stack of one."""
        fields = {
            name: QuantizedField(v.codes[None], None if v.scale is None else v.scale[None], v.coding) for name, v in self.fields.items()
        }
        scalars = {name: value[None] for name, value in self.scalars.items()}
        return Packet(self.size, None if self.support is None else self.support[None], fields, scalars)

    @property
    def schema(self) -> tuple[Any, ...]:
        """What packets of a stack have in common: names, codings, and how many values."""
        fields = ((name, values.coding, values.codes.shape[-1]) for name, values in self.fields.items())
        return self.size, self.support is None, *fields, *self.scalars

    @property
    def paper_bytes(self) -> int:
        """The paper's cost: four bytes a value, nothing for positions (L303)."""
        return 4 * sum(v.codes.numel() for v in self.fields.values())


def _unstack_field(field: QuantizedField) -> list[QuantizedField]:
    codes = field.codes.unbind()
    scales = [None] * len(codes) if field.scale is None else field.scale.unbind()
    return [QuantizedField(row, scale, field.coding) for row, scale in zip(codes, scales, strict=True)]


def concatenate(stacks: Sequence[Packet]) -> Packet | None:
    """Several stacks as one, if all have one form."""
    first = stacks[0]
    if len(stacks) == 1 or len({stack.schema for stack in stacks}) > 1:
        return first if len(stacks) == 1 else None
    fields = {}
    for name, values in first.fields.items():
        parts = [stack.fields[name] for stack in stacks]
        scale = None if values.scale is None else torch.cat([part.scale for part in parts])
        fields[name] = QuantizedField(torch.cat([part.codes for part in parts]), scale, values.coding)
    scalars = {name: torch.cat([stack.scalars[name] for stack in stacks]) for name in first.scalars}
    support = None if first.support is None else torch.cat([stack.support for stack in stacks])
    return Packet(first.size, support, fields, scalars)


def seed_packet(seed: int, size: int) -> Packet:
    """The first downlink: a seed from which every party draws the same start (decision E7)."""
    return Packet(size, None, {}, {}, seed)


def quantize(values: Float[Tensor, "*k m"], bits: int, draw: Draw, purpose: str, *, zero_free: bool) -> QuantizedField:
    """Round to the message's precision: floats to nearest, levels stochastically so that the mean is unbiased.

    Levels of a sparse message avoid zero (a kept weight is never sent as none); those of a dense message have an exact zero.
    """
    if bits == 32:
        return QuantizedField(values.to(torch.float32), None, Coding.FLOAT32)
    if bits == 16:
        return QuantizedField(values.clamp(-65504, 65504).to(torch.float16), None, Coding.FLOAT16)
    highest = 2 ** (bits - 1) - 1
    half = 0.5 if zero_free else 0.0
    lowest, coding = (-highest - 1, MIDPOINT_BY_BITS[bits]) if zero_free else (-highest, LEVELS_BY_BITS[bits])
    noise = draw(f"round {purpose}", values.shape[-1])
    step, tiny = (1 + 1e-6) / (highest + half), torch.finfo(torch.float32).tiny
    # The float32 scale is a hair wide, so that the largest value stays inside the levels.
    if fast := for_tensors(values, noise, exact=True):
        *among, size = values.shape
        codes, scale = np.empty((prod(among), size), dtype=np.int8), np.empty(prod(among), dtype=np.float32)
        fast.quantize_levels(*addresses(values, noise), codes, scale, step, tiny, half, lowest, highest)
        return QuantizedField(torch.from_numpy(codes.reshape(*among, size)), torch.from_numpy(scale.reshape(among)), coding)
    scale = (torch.linalg.vector_norm(values, inf, dim=-1) * step).to(torch.float32).clamp_min(tiny)
    levels = (values / scale[..., None].to(values.dtype)).add_(noise)
    if zero_free:
        levels.sub_(half)
    return QuantizedField(levels.floor_().clamp_(lowest, highest).to(torch.int8), scale, coding)


def quantize_signs(values: Float[Tensor, "*k m"]) -> QuantizedField:
    """Signs and the mean magnitude: the one-bit message nearest to the values in squared distance (Bernstein et al. 2018)."""
    scale = values.abs().mean(-1).to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    return QuantizedField(torch.where(values < 0, -1, 1).to(torch.int8), scale, Coding.SIGNS)


def best_sign_count(magnitudes: Float[Tensor, "*k n"], max_count: int) -> Int64[Tensor, "*k"]:
    """How many of the largest magnitudes, at most so many, tell most of a vector when sent as signs and their mean magnitude.

    k signs times that mean leave |v|^2 - (sum_{i <= k} |v_i|)^2 / k untold, v sorted by magnitude.
    """
    told = magnitudes.topk(max_count).values.cumsum(-1).square() / torch.arange(1, max_count + 1, device=magnitudes.device)
    return told.argmax(-1) + 1


def quantize_gates(gates: Float[Tensor, "*k m"], bits: int, draw: Draw, purpose: str) -> QuantizedField:
    """Gates in [0, 1]: whole 255ths at 8 bits or fewer, floats otherwise."""
    if bits > 8:
        return quantize(gates, bits, draw, purpose, zero_free=False)
    codes = torch.floor(gates * 255 + draw(f"round {purpose}", gates.shape[-1])).clamp(0, 255)
    return QuantizedField(codes.to(torch.uint8), None, Coding.UNIT8)


def dense_packet(fields: dict[str, Float[Tensor, "*k n"]], bits: int, draw: Draw) -> Packet:
    """All coordinates of each field."""
    size = next(iter(fields.values())).shape[-1]
    return Packet(size, None, {name: quantize(v, bits, draw, name, zero_free=False) for name, v in fields.items()}, {})


def sparse_packet(support: Int64[Tensor, "*k m"], fields: dict[str, Float[Tensor, "*k n"]], bits: int, draw: Draw) -> Packet:
    """Each field at the support only; a support that is everything needs no positions."""
    size = next(iter(fields.values())).shape[-1]
    rounded = {name: quantize(v.gather(-1, support), bits, draw, name, zero_free=True) for name, v in fields.items()}
    return Packet(size, None if support.shape[-1] == size else support, rounded, {})
