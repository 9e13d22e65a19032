"""Rounding of the values of a message, from float32 to 1 bit. It changes the result, so it is part of the algorithm."""

from enum import IntEnum
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int8, Int64
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


SCALED_CODINGS = {Coding.LEVELS8, Coding.LEVELS4, Coding.MIDPOINT8, Coding.MIDPOINT4, Coding.SIGNS}
MIDPOINT_CODINGS = {Coding.MIDPOINT8, Coding.MIDPOINT4}
LEVELS_BY_BITS = {8: Coding.LEVELS8, 4: Coding.LEVELS4}
MIDPOINT_BY_BITS = {8: Coding.MIDPOINT8, 4: Coding.MIDPOINT4}
ALLOWED_BITS = (32, 16, 8, 4)
"""Bits per value of a message: 32 and 16 are floats, 8 and 4 are levels with one scale per packet."""


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

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The values that the receiver decodes."""
        if self.coding is Coding.UNIT8:
            return self.codes.to(dtype) / 255
        if self.scale is None:
            return self.codes.to(dtype)
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


def best_sign_count(magnitudes: Float[Tensor, "*k n"], max_count: int) -> Int64[Tensor, "*k"]:
    """The number k <= max_count of largest magnitudes for which signs and their mean magnitude approximate the vector best.

    The squared error is |v|^2 - (sum_{i <= k} |v_i|)^2 / k, with v sorted by magnitude.
    """
    explained = magnitudes.topk(max_count).values.cumsum(-1).square() / torch.arange(1, max_count + 1, device=magnitudes.device)
    return explained.argmax(-1) + 1


def quantize_gates(gates: Float[Tensor, "*k m"], bits: int, draw: Draw, purpose: str) -> QuantizedField:
    """Round gates in [0, 1]: to multiples of 1/255 with 8 bits or fewer, else to floats."""
    if bits > 8:
        return quantize(gates, bits, draw, purpose, zero_free=False)
    codes = torch.floor(gates * 255 + draw(f"round {purpose}", gates.shape[-1])).clamp(0, 255)
    return QuantizedField(codes.to(torch.uint8), None, Coding.UNIT8)
