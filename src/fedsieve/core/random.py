"""Every random number, named by where it is used: (seed, purpose, round, client, step, coordinate).

Two forms. `stream` is a numpy generator for things drawn once (data, partitions, cohorts). `uniforms` is for the noise inside
training: a pure function of a key and a coordinate (SplitMix64's finaliser over a counter), so a stack of clients, one client
alone, or a few coordinates of one client all see the same numbers, and nothing has to be drawn in order.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt64
from torch import Tensor

from fedsieve.kernels import passes, worth

SERVER = -1
"""The client number under which the server draws its own noise."""

Draw = Callable[[str, int], Tensor]
"""`draw(purpose, size)`: uniforms in (0, 1), shape (*k, size), of the stream of each client in the stack."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
A, B, C = np.uint64(30), np.uint64(27), np.uint64(31)
_HIGH = 1 if sys.byteorder == "little" else 0


def key(seed: int, *path: str | int) -> int:
    """A 64-bit key for the stream named by `path`."""
    name = "\x1f".join(map(str, (seed, *path))).encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def stream(seed: int, *path: str | int) -> np.random.Generator:
    """The generator of one named stream."""
    return np.random.Generator(np.random.PCG64(key(seed, *path)))


def scramble(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """SplitMix64's finaliser up to its last step, in place. That step leaves the upper 33 bits alone."""
    shifted = x >> A
    x ^= shifted
    x *= FIRST
    np.right_shift(x, B, out=shifted)
    x ^= shifted
    x *= SECOND
    return x


def mix(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """SplitMix64's finaliser, in place: a bijection of 64 bits that spreads every input bit over all output bits."""
    scramble(x)
    x ^= x >> C
    return x


def uniforms(base: int, clients: Sequence[int], at: Int64[np.ndarray, " n"] | int) -> Float[np.ndarray, "k n"]:
    """Uniforms in (0, 1) at the coordinates `at` (or all below a number) of each client's stream: 23 bits, centred, so never 0 or 1.

    The 23 bits are put behind the exponent of 1, which is exact and takes no conversion of 64-bit integers.
    """
    counters = _counters(at) if isinstance(at, int) else _spaced(at)
    if worth(len(counters), exact=True) and (fast := passes()):
        noise = np.empty((len(clients), len(counters)), dtype=np.float32)
        fast.uniforms(base, _apart(tuple(clients)), counters, noise)
        return noise
    bits = scramble(client_keys(base, clients)[:, None] + counters)
    high = bits.view(np.uint32)[:, _HIGH::2] >> np.uint32(9)
    high |= np.uint32(0x3F800000)
    noise = high.view(np.float32)
    noise -= np.float32(1 - 2.0**-24)
    return noise


def _spaced(at: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    return (at.astype(np.uint64) + np.uint64(1)) * GOLDEN


@lru_cache(maxsize=16)
def _counters(size: int) -> UInt64[np.ndarray, " n"]:
    """The counters of all coordinates: the same in every step."""
    return _spaced(np.arange(size))


def client_keys(base: int, clients: Sequence[int]) -> UInt64[np.ndarray, " k"]:
    """One key per client below a common key."""
    return mix(np.uint64(base) + _apart(tuple(clients)))


@lru_cache(maxsize=256)
def _apart(clients: tuple[int, ...]) -> UInt64[np.ndarray, " k"]:
    """The counters of some clients: the same in every step."""
    return np.asarray(clients, dtype=np.int64).astype(np.uint64) * GOLDEN


def drawer(
    seed: int,
    round: int,
    exchange: int,
    step: int,
    clients: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    at: Callable[[], Int64[np.ndarray, " n"]] | None = None,
) -> Draw:
    """The noise of one step for a stack of clients; `at` tells the coordinates of a restricted vector among all, when noise is drawn."""

    as_drawn = dtype is torch.float32 and str(device) == "cpu"

    def draw(purpose: str, size: int) -> Tensor:
        base = key(seed, purpose, round, exchange, step)
        noise = torch.from_numpy(uniforms(base, clients, size if at is None else at()))
        return noise if as_drawn else noise.to(device=device, dtype=dtype)

    return draw


def server_drawer(seed: int, round: int, exchange: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Draw:
    """The server's own noise, without a client axis."""
    draw = drawer(seed, round, exchange, 0, [SERVER], dtype, device)
    return lambda purpose, size: draw(purpose, size).view(size)


def normal(uniform: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """Standard normal variates by inversion."""
    return torch.special.ndtri(uniform)
