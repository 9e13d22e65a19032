"""Whether a formula may take its compiled form: numba installed, single precision, CPU, vectors worth the loading."""

import sys
from collections.abc import Iterable
from functools import cache
from types import ModuleType

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

MIN_SIZE = 1000
"""Shorter vectors cost little either way, and short runs need not load a compiler. The length of one client's vector, not of a stack:
a client alone and in a stack take the same form."""


@cache
def available() -> ModuleType | None:
    """The compiled passes, or None where numba is missing."""
    try:
        from fedsieve.kernels import vector
    except ImportError:  # missing, or older than the NumPy it meets
        return None
    return vector


@cache
def load_image_kernels() -> ModuleType:
    """Those over images, where there are any: loaded when the first images come."""
    from fedsieve.kernels import image

    return image


@cache
def load_sparse_kernels() -> ModuleType:
    """Those over sparse rows, likewise."""
    from fedsieve.kernels import sparse

    return sparse


def _worth_loading(size: int, *, exact: bool = False) -> bool:
    """Whether a vector of that size is worth the loading, or they are loaded and `exact`: both forms agree to the bit."""
    return size >= MIN_SIZE or (exact and "fedsieve.kernels.vector" in sys.modules)


def for_tensors(*vectors: Tensor, size: int | None = None, exact: bool = False) -> ModuleType | None:
    """The compiled passes, if these vectors can take them; `size` is the length of the model where they are not as long."""
    if not _worth_loading(size or vectors[0].shape[-1], exact=exact):
        return None
    for vector in vectors:
        if vector.dtype is not torch.float32 or not vector.is_cpu or not vector.is_contiguous():
            return None
    return available()


def addresses(*vectors: Tensor) -> Iterable[int]:
    """Where the numbers of each begin; a pass that takes addresses keeps no tensor alive."""
    return map(Tensor.data_ptr, vectors)


def flatten(vectors: Float32[Tensor, "..."]) -> Float32[np.ndarray, " n"]:
    """All numbers of a stack in a row."""
    return vectors.numpy().reshape(-1)
