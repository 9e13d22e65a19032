"""Every random number, named by where it is used: (seed, purpose, round, client, step, coordinate).

Two forms. `stream` is a numpy generator for things drawn once (data, partitions, cohorts). `uniforms` is for the noise inside
training: a pure function of a key and a coordinate (SplitMix64's finaliser over a counter), so a stack of clients, one client
alone, or a few coordinates of one client all see the same numbers, and nothing has to be drawn in order.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt64
from torch import Tensor

SERVER = -1
"""The client number under which the server draws its own noise."""

Draw = Callable[[str, int], Tensor]
"""`draw(purpose, size)`: uniforms in (0, 1), shape (*k, size), of the stream of each client in the stack."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
A, B, C = np.uint64(30), np.uint64(27), np.uint64(31)


def key(seed: int, *path: str | int) -> int:
    """A 64-bit key for the stream named by `path`."""
    name = "\x1f".join(map(str, (seed, *path))).encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def stream(seed: int, *path: str | int) -> np.random.Generator:
    """The generator of one named stream."""
    return np.random.Generator(np.random.PCG64(key(seed, *path)))


def mix(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """SplitMix64's finaliser, in place: a bijection of 64 bits that spreads every input bit over all output bits."""
    x ^= x >> A
    x *= FIRST
    x ^= x >> B
    x *= SECOND
    x ^= x >> C
    return x


def uniforms(keys: UInt64[np.ndarray, " k"], at: Int64[np.ndarray, " n"]) -> Float[np.ndarray, "k n"]:
    """Uniforms in (0, 1) at the coordinates `at` of each keyed stream: 23 bits, centred, so never 0 or 1."""
    bits = mix(keys[:, None] + (at.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    bits >>= np.uint64(41)
    noise = bits.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-23)
    return noise


def client_keys(base: int, clients: Sequence[int]) -> UInt64[np.ndarray, " k"]:
    """One key per client below a common key."""
    return mix(np.uint64(base) + np.asarray(clients, dtype=np.int64).astype(np.uint64) * GOLDEN)


def drawer(
    seed: int,
    round: int,
    exchange: int,
    step: int,
    clients: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    at: Int64[np.ndarray, " n"] | None = None,
) -> Draw:
    """The noise of one step for a stack of clients; `at` names the coordinates of a restricted vector among all."""

    def draw(purpose: str, size: int) -> Tensor:
        keys = client_keys(key(seed, purpose, round, exchange, step), clients)
        return torch.from_numpy(uniforms(keys, np.arange(size) if at is None else at)).to(device=device, dtype=dtype)

    return draw


def server_drawer(seed: int, round: int, exchange: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Draw:
    """The server's own noise, without a client axis."""
    draw = drawer(seed, round, exchange, 0, [SERVER], dtype, device)
    return lambda purpose, size: draw(purpose, size)[0]


def normal(uniform: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """Standard normal variates by inversion."""
    return torch.special.ndtri(uniform)
