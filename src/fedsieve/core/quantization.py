"""Rounding of the values of a message, from float32 to 1 bit. It changes the result, so it is part of the algorithm."""

from enum import IntEnum
from math import inf, prod
from typing import NamedTuple

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
