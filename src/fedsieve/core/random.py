"""Random numbers that are functions of (seed, purpose, round, client, step, coordinate).

`generator` is a NumPy generator for numbers drawn once (data, partitions, cohorts). `uniforms` gives the noise of training: a pure
function of a key and a coordinate (SplitMix64's finalizer of a counter). A stack of clients, one client, or some coordinates of one
client get the same numbers, in any order.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b, shake_256
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt64
from torch import Tensor

from fedsieve.kernels import accelerated

SERVER = -1
"""The client number of the server's own noise."""

Draw = Callable[[str, int], Tensor]
"""`draw(purpose, size)` returns uniforms in (0, 1) of shape (*k, size), for each client of the stack."""

SPLITMIX_GAMMA = np.uint64(0x9E3779B97F4A7C15)
SPLITMIX_M1, SPLITMIX_M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_HIGH_WORD = 1 if sys.byteorder == "little" else 0


def derive_key(seed: int, *path: str | int) -> int:
    """The 64-bit key of the stream named by `path`."""
    name = "\x1f".join(map(str, (seed, *path))).encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """The NumPy generator of the stream named by `path`."""
    return np.random.Generator(np.random.PCG64(derive_key(seed, *path)))


def mix64_partial(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """SplitMix64's finalizer without its last step, in place. That step does not change the upper 33 bits."""
    shifted = x >> SHIFT_1
    x ^= shifted
    x *= SPLITMIX_M1
    np.right_shift(x, SHIFT_2, out=shifted)
    x ^= shifted
    x *= SPLITMIX_M2
    return x


def mix64(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """SplitMix64's finalizer, in place: a bijection of 64 bits in which every input bit affects all output bits."""
    mix64_partial(x)
    x ^= x >> SHIFT_3
    return x


def uniforms(base_key: int, clients: Sequence[int], coordinates: Int64[np.ndarray, " n"] | int) -> Float[np.ndarray, "k n"]:
    """Uniforms in (0, 1) at some coordinates (or all below a number) of each client's stream: 23 bits, centered, never 0 or 1."""
    if isinstance(coordinates, int):
        counters = _counters_below(coordinates)
    else:
        counters = (coordinates.astype(np.uint64) + np.uint64(1)) * SPLITMIX_GAMMA
    return _uniforms_at(base_key, _client_counters(tuple(clients)), counters)


@accelerated("vector", "uniforms", size=lambda _key, _clients, counters: len(counters), exact=True)
def _uniforms_at(base_key: int, client_counters: UInt64[np.ndarray, " k"], counters: UInt64[np.ndarray, " n"]) -> Float[np.ndarray, "k n"]:
    """Uniforms of each client at each coordinate. The 23 bits follow the exponent of 1: exact, without a conversion of integers."""
    bits = mix64_partial(mix64(np.uint64(base_key) + client_counters)[:, None] + counters)
    high = bits.view(np.uint32)[:, _HIGH_WORD::2] >> np.uint32(9)
    high |= np.uint32(0x3F800000)
    noise = high.view(np.float32)
    noise -= np.float32(1 - 2.0**-24)
    return noise


@lru_cache(maxsize=16)
def _counters_below(size: int) -> UInt64[np.ndarray, " n"]:
    """The counters of all coordinates; cached, because they are the same in every step."""
    return np.arange(1, size + 1, dtype=np.uint64) * SPLITMIX_GAMMA


def client_keys(base_key: int, clients: Sequence[int]) -> UInt64[np.ndarray, " k"]:
    """The key of each client, derived from a common key."""
    return mix64(np.uint64(base_key) + _client_counters(tuple(clients)))


@lru_cache(maxsize=256)
def _client_counters(clients: tuple[int, ...]) -> UInt64[np.ndarray, " k"]:
    """The counters of some clients; cached, because they are the same in every step."""
    return np.asarray(clients, dtype=np.int64).astype(np.uint64) * SPLITMIX_GAMMA


def client_sampler(
    seed: int,
    round: int,
    exchange: int,
    step: int,
    clients: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    coordinates: Callable[[], Int64[np.ndarray, " n"]] | None = None,
) -> Draw:
    """The noise of one step for a stack of clients; `coordinates` returns the global coordinates of a restricted vector."""
    is_native = dtype is torch.float32 and str(device) == "cpu"
    conversion = {} if is_native else {"dtype": dtype, "device": device}
    return partial(_draw_for_clients, (seed, round, exchange, step), clients, coordinates, conversion)


def _draw_for_clients(
    path: tuple[int, int, int, int],
    clients: Sequence[int],
    coordinates: Callable[[], Int64[np.ndarray, " n"]] | None,
    conversion: dict[str, Any],
    purpose: str,
    size: int,
) -> Float[Tensor, "k n"]:
    seed, *position = path
    noise = torch.from_numpy(uniforms(derive_key(seed, purpose, *position), clients, size if coordinates is None else coordinates()))
    return noise.to(**conversion) if conversion else noise


def server_sampler(seed: int, round: int, exchange: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Draw:
    """The server's own noise, without a client axis."""
    draw = client_sampler(seed, round, exchange, 0, [SERVER], dtype, device)
    return lambda purpose, size: draw(purpose, size).view(size)


def secret_words(secret: bytes, size: int, *path: str | int) -> UInt64[np.ndarray, " n"]:
    """64-bit words of the stream named by `path`, which nobody without the secret can predict: SHAKE-256 of secret and path."""
    name = "\x1f".join(map(str, path)).encode()
    return np.frombuffer(shake_256(secret + b"\x1f" + name).digest(8 * size), "<u8")


def secret_sampler(secret: bytes, round: int, exchange: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Draw:
    """The server's noise for differential privacy, drawn from its secret: uniforms of 23 bits as those of `uniforms`."""

    def draw(purpose: str, size: int) -> Tensor:
        words = secret_words(secret, size, purpose, round, exchange)
        return torch.from_numpy(((words >> np.uint64(41)) + 0.5) * 2.0**-23).to(device=device, dtype=dtype)

    return draw


def uniform_to_normal(uniform: Float[Tensor, "*k n"]) -> Float[Tensor, "*k n"]:
    """Standard normal variates by inversion."""
    return torch.special.ndtri(uniform)
