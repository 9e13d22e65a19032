"""How kernels are compiled, and the functions they share: views of addresses, clipping, logarithm and exponential.

Kernels are for single precision on a CPU. They are compiled once per machine; numba caches the result next to the file or in the user's
cache directory, and compiles again if the file of the kernel or this file changes.
"""

from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numba
import numpy as np
from numba import carray, float32, int64, types, void
from numba.extending import intrinsic

DIGEST = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
"""Part of a kernel's name in the cache. Numba itself notices a change of the kernel's file only, not one of the functions here."""
f32, i32, u64 = np.float32, np.int32, np.uint64
LN2_HIGH, LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
VECTOR, MATRIX, ARRAY_3D, ARRAY_4D = float32[::1], float32[:, ::1], float32[:, :, ::1], float32[:, :, :, ::1]
ADDRESS = int64
"""The address of a tensor's data; its shape is a separate argument."""


class CompiledKernel:
    """A kernel that is loaded or compiled when it is first called, because a run calls few of them; its compiled form then replaces it."""

    def __init__(self, function, signature, options):
        self.function, self.signature, self.options = function, signature, options
        function.__qualname__ = f"{function.__name__}_{DIGEST}"

    def __call__(self, *args):
        """Call the compiled form, which has the kernel's name from now on."""
        self.function.__globals__[self.function.__name__] = self.dispatcher
        self.dispatcher(*args)

    @cached_property
    def dispatcher(self):
        """The compiled form, from the cache if it is there."""
        try:
            return numba.njit(self.signature, cache=True, **self.options)(self.function)
        except RuntimeError:  # no folder for the cache is writable
            return numba.njit(self.signature, **self.options)(self.function)


def compile_kernel(*signature, reassociate=False):
    """Return a decorator that compiles a kernel for these types, without the checks that prevent vectorized loops.

    `reassociate` allows sums in another order, without which a long sum is not vectorized.
    """
    options = {"error_model": "numpy", "fastmath": {"contract", "reassoc"} if reassociate else {"contract"}}
    return lambda function: CompiledKernel(function, void(*signature), options)


@intrinsic
def prefer_512_bit(_):
    """Let the calling kernel use 512-bit vectors if the CPU has them (AVX-512); LLVM prefers 256 bits."""

    def mark(context, builder, *_):
        if isinstance(attributes := builder.function.attributes, set):  # llvmlite itself adds only names without a value
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), mark


@intrinsic
def pointer(_, address):
    """Return an address as the pointer that `carray` takes."""

    def cast(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), cast


@numba.njit(error_model="numpy")
def as_vector(address, size):
    """Return a view of the vector at an address."""
    return carray(pointer(address), size, f32)


@numba.njit(error_model="numpy")
def as_matrix(address, num_rows, size):
    """Return a view of the matrix at an address."""
    return carray(pointer(address), (num_rows, size), f32)


@numba.njit(error_model="numpy")
def clip(value, limit):
    """Return the value clipped to [-limit, limit]; NaN stays NaN."""
    return -limit if value < -limit else limit if value > limit else value


@numba.njit(error_model="numpy")
def fast_log(x):
    """Return log x of a positive normal number, to 1 unit in the last place (Cephes)."""
    bits = f32(x).view(i32)
    power = i32((bits >> i32(23)) - i32(126))
    part = i32((bits & i32(0x007FFFFF)) | i32(0x3F000000)).view(f32)
    small = part < f32(0.70710678)
    exponent = f32(power) - (f32(1) if small else f32(0))
    part = (part + part if small else part) - f32(1)
    square = part * part
    y = f32(7.0376836292e-2) * part + f32(-1.1514610310e-1)
    y = y * part + f32(1.1676998740e-1)
    y = y * part + f32(-1.2420140846e-1)
    y = y * part + f32(1.4249322787e-1)
    y = y * part + f32(-1.6668057665e-1)
    y = y * part + f32(2.0000714765e-1)
    y = y * part + f32(-2.4999993993e-1)
    y = y * part + f32(3.3333331174e-1)
    y = y * part * square + exponent * LN2_LOW - f32(0.5) * square
    return part + y + exponent * LN2_HIGH


@numba.njit(error_model="numpy")
def fast_exp(x):
    """Return exp x, to 1 unit in the last place if it is a normal number (Cephes)."""
    x = min(max(x, f32(-87.0)), f32(88.0))
    power = np.floor(x * f32(1.44269504088896341) + f32(0.5))
    x = x - power * LN2_HIGH - power * LN2_LOW
    y = f32(1.9875691500e-4) * x + f32(1.3981999507e-3)
    y = y * x + f32(8.3334519073e-3)
    y = y * x + f32(4.1665795894e-2)
    y = y * x + f32(1.6666665459e-1)
    y = y * x + f32(5.0000001201e-1)
    return (y * x * x + x + f32(1)) * i32((i32(power) + i32(127)) << i32(23)).view(f32)
