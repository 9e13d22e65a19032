"""A random rotation of a vector that server and client compute from one number: permutation, signs and Hadamard transforms.

With n the largest power of two up to p, the transform of the first n coordinates is followed by that of the last n. This is orthogonal
for any p, so no coordinates are added. The permutation before it balances the energy of both parts.
"""

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from fedsieve.core.random import derive_key, uniforms


def rotate(vectors: Float[Tensor, "k p"], seeds: Float32[Tensor, " k"]) -> Float[Tensor, "k p"]:
    """Return each vector rotated by the rotation of its seed."""
    first, second, order = _draw_rotations(vectors, seeds)
    size = _transform_size(vectors.shape[-1])
    rotated = vectors.gather(-1, order) * first
    rotated = torch.cat((hadamard(rotated[:, :size]), rotated[:, size:]), dim=-1) * second
    return torch.cat((rotated[:, :-size], hadamard(rotated[:, -size:])), dim=-1)


def rotate_back(vectors: Float[Tensor, "k p"], seeds: Float32[Tensor, " k"]) -> Float[Tensor, "k p"]:
    """Return the vectors whose rotations are given: the inverse of `rotate`."""
    first, second, order = _draw_rotations(vectors, seeds)
    size = _transform_size(vectors.shape[-1])
    rotated = torch.cat((vectors[:, :-size], hadamard(vectors[:, -size:])), dim=-1) * second
    rotated = torch.cat((hadamard(rotated[:, :size]), rotated[:, size:]), dim=-1) * first
    return torch.zeros_like(rotated).scatter(-1, order, rotated)


def hadamard(vectors: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
    """Return the orthonormal Walsh-Hadamard transform of each vector; its length is a power of two. It is its own inverse."""
    count, size = vectors.shape
    width = 1
    while width < size:
        pairs = vectors.reshape(count, -1, 2, width)
        vectors = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
        width *= 2
    return vectors.reshape(count, size) / size**0.5


def _transform_size(length: int) -> int:
    return 1 << (length.bit_length() - 1)


def _draw_rotations(
    vectors: Float[Tensor, "k p"], seeds: Float32[Tensor, " k"]
) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k p"], Int64[Tensor, "k p"]]:
    """Return two vectors of signs and a permutation for each seed; a seed is the bits of a float, so that a packet can hold it."""
    streams = seeds.numpy(force=True).astype(np.float32).view(np.int32).tolist()
    first, second, priority = (
        uniforms(derive_key(0, "rotation", part), streams, vectors.shape[-1]) for part in ("first signs", "second signs", "order")
    )
    signs = [torch.from_numpy(np.where(noise < 0.5, -1.0, 1.0)).to(vectors) for noise in (first, second)]
    return signs[0], signs[1], torch.from_numpy(np.argsort(priority, axis=-1, kind="stable")).to(vectors.device)
