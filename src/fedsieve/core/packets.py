"""Lossy packing: what a message keeps of a vector. Choosing entries and rounding values change the result, so they are algorithm."""

from collections.abc import Sequence
from enum import IntEnum
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.core.streams import Draw


class Coding(IntEnum):
    """How the values of one field are held."""

    FLOAT32 = 0
    FLOAT16 = 1
    LEVELS8 = 2
    """code * scale, code in -127..127"""
    LEVELS4 = 3
    """code * scale, code in -7..7"""
    HALVES8 = 4
    """(code + 1/2) * scale, code in -128..127: no level is zero"""
    HALVES4 = 5
    """(code + 1/2) * scale, code in -8..7"""
    UNIT8 = 6
    """code / 255, code in 0..255: a gate"""
    SIGNS = 7
    """code * scale, code -1 or 1, one bit each: a direction and one magnitude for all"""


SCALED = {Coding.LEVELS8, Coding.LEVELS4, Coding.HALVES8, Coding.HALVES4, Coding.SIGNS}
HALVED = {Coding.HALVES8, Coding.HALVES4}
LEVELS = {8: Coding.LEVELS8, 4: Coding.LEVELS4}
HALVES = {8: Coding.HALVES8, 4: Coding.HALVES4}
PRECISIONS = (32, 16, 8, 4)
"""Bits a value may have in a message: 32 and 16 are floats, 8 and 4 are levels of one scale per packet."""


GATES = frozenset({"gates", "gate", "log_alpha", "kept_gate", "rest_gate"})
"""Names of what are gates in a message or a part of it: they have limits of their own and are averaged plainly."""


class Values(NamedTuple):
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
        return (self.codes.to(dtype) + 0.5 * (self.coding in HALVED)) * self.scale[..., None].to(dtype)


class Packet(NamedTuple):
    """A message about a vector of `size` coordinates, or a stack of them: fields at the support (everywhere when None), and scalars."""

    size: int
    support: Int64[Tensor, "*k m"] | None
    fields: dict[str, Values]
    scalars: dict[str, Float[Tensor, "*k"]]
    seed: int | None = None
    """only the first downlink has one: every party draws the same start from it (decision E7)"""

    def dense(self, field: str, dtype: torch.dtype, rest: Tensor | float = 0.0) -> Tensor:
        """The field as a full vector, `rest` where the packet is silent."""
        values = self.fields[field].decode(dtype)
        if self.support is None:
            return values
        background = torch.as_tensor(rest, dtype=dtype, device=values.device)[..., None].expand(*values.shape[:-1], self.size)
        return background.scatter(-1, self.support, values)

    def over(self, field: str, background: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """The field laid over a full vector, which shows where the packet is silent."""
        values = self.fields[field].decode(background.dtype)
        return values if self.support is None else background.scatter(-1, self.support, values)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """1 where the packet speaks, 0 where it is silent."""
        if self.support is None:
            return torch.ones(self.size, dtype=dtype)
        return torch.zeros(*self.support.shape[:-1], self.size, dtype=dtype, device=self.support.device).scatter(-1, self.support, 1.0)

    def scalar(self, name: str, dtype: torch.dtype) -> Tensor:
        """A scalar in working precision."""
        return self.scalars[name].to(dtype)

    def split(self) -> list["Packet"]:
        """The packets of a stack."""
        columns = {name: _rows_of(values) for name, values in self.fields.items()}
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
        return self.split()[i]

    @property
    def formula_bytes(self) -> int:
        """The paper's cost: four bytes a value, nothing for positions (L303)."""
        return 4 * sum(v.codes.numel() for v in self.fields.values())


def _rows_of(values: Values) -> list[Values]:
    codes = values.codes.unbind()
    scales = [None] * len(codes) if values.scale is None else values.scale.unbind()
    return [Values(row, scale, values.coding) for row, scale in zip(codes, scales, strict=True)]


def dense_all(packets: Sequence[Packet], field: str, dtype: torch.dtype, rest: str | None = None) -> Float[Tensor, "k p"]:
    """The field of each packet as a full vector, its scalar `rest` (or 0) where it is silent; packets of one form are decoded together."""
    parts, supports = [packet.fields[field] for packet in packets], [packet.support for packet in packets]
    size, background = packets[0].size, 0.0 if rest is None else scalar_all(packets, rest, dtype)
    forms = {(part.coding, part.codes.shape, support is None) for part, support in zip(parts, supports, strict=True)}
    if len(forms) > 1:
        under = [0.0] * len(packets) if rest is None else background
        return torch.stack([packet.dense(field, dtype, below) for packet, below in zip(packets, under, strict=True)])
    scale = None if parts[0].scale is None else torch.stack([part.scale for part in parts])
    together = Values(torch.stack([part.codes for part in parts]), scale, parts[0].coding)
    return Packet(size, None if supports[0] is None else torch.stack(supports), {field: together}, {}).dense(field, dtype, background)


def scalar_all(packets: Sequence[Packet], name: str, dtype: torch.dtype) -> Float[Tensor, " k"]:
    """A scalar of each packet."""
    return torch.stack([packet.scalars[name] for packet in packets]).to(dtype)


def opening(seed: int, size: int) -> Packet:
    """The first downlink: a seed from which every party draws the same start (decision E7)."""
    return Packet(size, None, {}, {}, seed)


def round_values(values: Float[Tensor, "*k m"], bits: int, draw: Draw, purpose: str, *, zero_free: bool) -> Values:
    """Round to the message's precision: floats to nearest, levels stochastically so that the mean is unbiased.

    Levels of a sparse message avoid zero (a kept weight is never sent as none); those of a dense message have an exact zero.
    """
    if bits == 32:
        return Values(values.to(torch.float32), None, Coding.FLOAT32)
    if bits == 16:
        return Values(values.clamp(-65504, 65504).to(torch.float16), None, Coding.FLOAT16)
    highest = 2 ** (bits - 1) - 1
    half = 0.5 if zero_free else 0.0
    # The float32 scale is a hair wide, so that the largest value stays inside the levels.
    largest = torch.linalg.vector_norm(values, inf, dim=-1) * ((1 + 1e-6) / (highest + half))
    scale = largest.to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    levels = (values / scale[..., None].to(values.dtype)).add_(draw(f"round {purpose}", values.shape[-1]))
    if zero_free:
        levels.sub_(half)
    levels.floor_().clamp_(-highest - 1 if zero_free else -highest, highest)
    return Values(levels.to(torch.int8), scale, (HALVES if zero_free else LEVELS)[bits])


def round_signs(values: Float[Tensor, "*k m"]) -> Values:
    """Signs and the mean magnitude: the one-bit message nearest to the values in squared distance (Bernstein et al. 2018)."""
    scale = values.abs().mean(-1).to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    return Values(torch.where(values < 0, -1, 1).to(torch.int8), scale, Coding.SIGNS)


def round_gates(gates: Float[Tensor, "*k m"], bits: int, draw: Draw, purpose: str) -> Values:
    """Gates in [0, 1]: whole 255ths at 8 bits or fewer, floats otherwise."""
    if bits > 8:
        return round_values(gates, bits, draw, purpose, zero_free=False)
    codes = torch.floor(gates * 255 + draw(f"round {purpose}", gates.shape[-1])).clamp(0, 255)
    return Values(codes.to(torch.uint8), None, Coding.UNIT8)


def dense_packet(fields: dict[str, Float[Tensor, "*k n"]], bits: int, draw: Draw) -> Packet:
    """All coordinates of each field."""
    size = next(iter(fields.values())).shape[-1]
    return Packet(size, None, {name: round_values(v, bits, draw, name, zero_free=False) for name, v in fields.items()}, {})


def sparse_packet(support: Int64[Tensor, "*k m"], fields: dict[str, Float[Tensor, "*k n"]], bits: int, draw: Draw) -> Packet:
    """Each field at the support only; a support that is everything needs no positions."""
    size = next(iter(fields.values())).shape[-1]
    rounded = {name: round_values(v.gather(-1, support), bits, draw, name, zero_free=True) for name, v in fields.items()}
    return Packet(size, None if support.shape[-1] == size else support, rounded, {})
