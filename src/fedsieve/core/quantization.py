"""Rounding of the values of a message, from float32 to 1 bit. It changes the result, so it is part of the algorithm."""

from enum import IntEnum
from math import inf, lgamma, log
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from fedsieve.core.random import Draw
from fedsieve.kernels import accelerated


class Coding(IntEnum):
    """Encoding of the values of one field."""

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
    """code / 255, code in 0..255: for gates"""
    SIGNS = 7
    """code * scale, code -1 or 1: one bit per value and one magnitude for all"""
    NORMAL2 = 8
    """NORMAL_CENTROIDS[code + 2] * scale, code in -2..1: for normally distributed values"""


SCALED_CODINGS = {Coding.LEVELS8, Coding.LEVELS4, Coding.MIDPOINT8, Coding.MIDPOINT4, Coding.SIGNS, Coding.NORMAL2}
MIDPOINT_CODINGS = {Coding.MIDPOINT8, Coding.MIDPOINT4}
LEVELS_BY_BITS = {8: Coding.LEVELS8, 4: Coding.LEVELS4}
MIDPOINT_BY_BITS = {8: Coding.MIDPOINT8, 4: Coding.MIDPOINT4}
ALLOWED_BITS = (32, 16, 8, 4)
"""Bits per value of a message: 32 and 16 are floats, 8 and 4 are levels with one scale per packet."""
NORMAL_CENTROIDS, NORMAL_THRESHOLD = (-1.5104176, -0.4527800, 0.4527800, 1.5104176), 0.9815988
"""The four values closest to a standard normal variate in mean squared distance (Lloyd 1957, Max 1960), and where the outer ones begin."""


CODE_BITS = (8, 4, 1)
"""Bits per value between which `choose_code` chooses."""


class QuantizedField(NamedTuple):
    """The encoded values of one field of a packet."""

    codes: Tensor
    """(*k, m): float32, float16, int8 or uint8"""
    scale: Tensor | None
    """(*k,) float32: the distance of two levels"""
    coding: Coding

    @property
    def level_offset(self) -> float:
        """The number added to a code before it is multiplied by the scale."""
        return 0.5 if self.coding in MIDPOINT_CODINGS else 0.0

    def stretch(self, factor: Float[Tensor, "*k"]) -> "QuantizedField":
        """The field with all decoded values multiplied by a factor; it must have a scale."""
        assert self.scale is not None
        return self._replace(scale=(self.scale * factor).to(torch.float32))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The values that the receiver decodes."""
        if self.coding is Coding.UNIT8:
            return self.codes.to(dtype) / 255
        if self.scale is None:
            return self.codes.to(dtype)
        if self.coding is Coding.NORMAL2:
            levels = torch.tensor(NORMAL_CENTROIDS, dtype=dtype, device=self.codes.device)[self.codes.to(torch.int64) + 2]
            return levels.mul_(self.scale[..., None])
        levels = self.codes.to(dtype)
        if offset := self.level_offset:
            levels += offset
        return levels.mul_(self.scale[..., None])


def quantize(values: Float[Tensor, "*k m"], bits: int, draw: Draw, purpose: str, *, zero_free: bool) -> QuantizedField:
    """Round values to `bits`: floats to the nearest, levels stochastically and without bias.

    With `zero_free` no level is zero, so that a sparse message never sends a kept weight as 0.
    """
    if bits == 32:
        return QuantizedField(values.to(torch.float32), None, Coding.FLOAT32)
    if bits == 16:
        return QuantizedField(values.clamp(-65504, 65504).to(torch.float16), None, Coding.FLOAT16)
    max_code = 2 ** (bits - 1) - 1
    offset, min_code, coding = (0.5, -max_code - 1, MIDPOINT_BY_BITS[bits]) if zero_free else (0.0, -max_code, LEVELS_BY_BITS[bits])
    step = (1 + 1e-6) / (max_code + offset)  # larger by 1e-6, so that the largest value stays inside the levels in float32
    noise = draw(f"round {purpose}", values.shape[-1])
    return QuantizedField(*_quantize_levels(values, noise, step, offset, min_code, max_code), coding)


@accelerated("vector", "quantize_levels", tensors=("values", "noise"), exact=True)
def _quantize_levels(
    values: Float[Tensor, "*k m"], noise: Float[Tensor, "*k m"], step: float, level_offset: float, min_code: int, max_code: int
) -> tuple[Int8[Tensor, "*k m"], Float32[Tensor, "*k"]]:
    """Codes and scales of values that are rounded stochastically; a scale is `step` times the largest magnitude."""
    largest = torch.linalg.vector_norm(values, inf, dim=-1)
    scale = (largest * step).to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    levels = (values / scale[..., None].to(values.dtype)).add_(noise)
    if level_offset:
        levels.sub_(level_offset)
    return levels.floor_().clamp_(min_code, max_code).to(torch.int8), scale


def quantize_signs(values: Float[Tensor, "*k m"]) -> QuantizedField:
    """Signs and the mean magnitude: the closest one-bit message in squared distance (Bernstein et al. 2018)."""
    scale = values.abs().mean(-1).to(torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
    return QuantizedField(torch.where(values < 0, -1, 1).to(torch.int8), scale, Coding.SIGNS)


def quantize_normal(values: Float[Tensor, "*k m"], bits: Literal[1, 2]) -> QuantizedField:
    """Round normally distributed values with mean 0 to the nearest of two or four centroids c.

    The scale |x|^2 / <c, x> makes the projection of the message on the values x the values themselves; after a random rotation the message
    is then unbiased (EDEN, Vargaftik et al. 2022, arXiv 2108.08842).
    """
    energy = values.square().sum(-1)
    codes = torch.where(values < 0, -1, 1).to(torch.int8)
    if bits == 2:
        outer = values.abs() > NORMAL_THRESHOLD * (energy / values.shape[-1]).sqrt()[..., None]
        codes = torch.where(values < 0, -1 - outer.to(torch.int8), outer.to(torch.int8)).to(torch.int8)
    field = QuantizedField(codes, torch.ones_like(energy, dtype=torch.float32), Coding.SIGNS if bits == 1 else Coding.NORMAL2)
    explained = (field.decode(values.dtype) * values).sum(-1)
    tiny = torch.finfo(torch.float32).tiny
    return field._replace(scale=(energy / explained.clamp_min(tiny)).to(torch.float32).clamp_min(tiny))


class Code(NamedTuple):
    """How a message encodes a vector: its largest entries, each with this number of bits."""

    bits: int
    num_entries: int


def choose_code(
    vector: Float[Tensor, " n"], importance: Float[Tensor, " n"], max_bytes: float, allowed_bits: tuple[int, ...] = CODE_BITS
) -> Code:
    """Return the number of entries and the bits per value that leave the least energy of a vector unexplained.

    Positions and values together have at most `max_bytes` bytes. The energy is that of v, the vector times its importance. With v sorted
    by magnitude, k signs and their mean magnitude explain (sum_{i <= k} |v_i|)^2 / k; b-bit levels explain the sum of v_i^2 minus the
    variance of their stochastic rounding.
    """
    size, max_bits = len(vector), 8 * max_bytes
    limits = {bits: size if size * bits <= max_bits else max_entries(size, bits, max_bits) for bits in allowed_bits}
    ordered = (vector * importance).abs().topk(max(limits.values())).values.to(torch.float64)
    best, best_energy = Code(allowed_bits[0], 1), -inf
    for bits, limit in limits.items():
        top = ordered[:limit]
        if bits == 1:
            explained = top.cumsum(0).square() / torch.arange(1, limit + 1, device=top.device)
        else:
            explained = (top.square() - rounding_variance(top, bits)).cumsum(0)
        if limit == size:  # all entries need no positions; a part of them does
            explained[max_entries(size, bits, max_bits) : -1] = -inf
        energy, index = explained.max(0)
        if float(energy) > best_energy:
            best, best_energy = Code(bits, int(index) + 1), float(energy)
    return best


def rounding_variance(magnitudes: Float[Tensor, " n"], bits: int) -> Float[Tensor, " n"]:
    """Return the variance of each value after `quantize` to zero-free levels; the first value is the largest."""
    scale = magnitudes[0].clamp_min(torch.finfo(magnitudes.dtype).tiny) / (2 ** (bits - 1) - 0.5)
    fraction = (magnitudes / scale + 0.5).frac()
    return scale.square() * fraction * (1 - fraction)


def max_entries(size: int, bits: int, max_bits: float) -> int:
    """Return the largest number of entries, from 1 to half of them, whose positions and values fit into `max_bits`."""
    low, high = 1, max(size // 2, 1)  # up to a half the number of bits increases with every entry
    while low < high:
        middle = (low + high + 1) // 2
        if middle * bits + position_bits(middle, size) <= max_bits:
            low = middle
        else:
            high = middle - 1
    return low


def position_bits(num_entries: int, size: int) -> float:
    """Return log2 of the number of subsets with `num_entries` of `size` positions."""
    return (lgamma(size + 1) - lgamma(num_entries + 1) - lgamma(size - num_entries + 1)) / log(2)


def quantize_gates(gates: Float[Tensor, "*k m"], bits: int, draw: Draw, purpose: str) -> QuantizedField:
    """Round gates in [0, 1]: to multiples of 1/255 with 8 bits or fewer, else to floats."""
    if bits > 8:
        return quantize(gates, bits, draw, purpose, zero_free=False)
    codes = torch.floor(gates * 255 + draw(f"round {purpose}", gates.shape[-1])).clamp(0, 255)
    return QuantizedField(codes.to(torch.uint8), None, Coding.UNIT8)
