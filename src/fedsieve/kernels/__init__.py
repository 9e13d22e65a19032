"""Compiled forms of functions. `accelerated` attaches one to its reference in plain torch; nothing else in the package knows numba.

A module of this folder holds numba kernels and, under the public names, wrappers with the signature of their reference. The wrappers
allocate the results. Without numba (the extra `fast`) every function runs its reference.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from importlib import import_module
from inspect import Parameter, signature
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

MIN_SIZE = 1000
"""Vectors shorter than this run the reference: they cost little either way, and short runs need not load a compiler. It is compared with
the length of one client's vector, not of a stack, so that one client and a stack of clients run the same form."""


class Kernel(NamedTuple):
    """A compiled form and the function it replaces."""

    module: str
    name: str
    reference: Callable[..., Any]
    returns: Callable[..., Any] | None

    def run(self, *args: Any) -> Any:
        """Call the compiled form; numba must be installed."""
        result = getattr(load(self.module), self.name)(*args)
        return result if self.returns is None else self.returns(*result)


KERNELS: dict[str, Kernel] = {}
"""All attached kernels by name; `accelerated` fills it, and the tests compare each kernel with its reference."""


@cache
def load(module: str) -> ModuleType | None:
    """Return a module of kernels, or None if numba is missing or does not support the installed NumPy."""
    try:
        return import_module(f"fedsieve.kernels.{module}")
    except ImportError:
        return None


def accelerated(
    module: str,
    name: str,
    *,
    tensors: Sequence[str] = (),
    size: Callable[..., int] | None = None,
    min_size: int = MIN_SIZE,
    contiguous: bool = True,
    exact: bool = False,
    condition: Callable[..., bool] | None = None,
    returns: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Attach the kernel `name` of `module` to the decorated reference, which runs whenever the kernel cannot.

    The kernel runs if numba is installed, all `tensors` (names of parameters, or of attributes of them) are float32, on the CPU and
    contiguous, and the vectors are long enough.

    Args:
        module: module of this folder that holds the kernel.
        name: the kernel, a function with the parameters of the reference.
        tensors: the parameters to check; their value may be None.
        size: length to compare with `min_size`, computed from the arguments; by default that of the first tensor's last axis.
        min_size: the minimum length for which the kernel runs.
        contiguous: whether the tensors must be contiguous.
        exact: whether both forms agree to the bit; then the kernel also runs on short vectors once the compiler is loaded.
        condition: further condition on the arguments.
        returns: type that wraps the tuple which the kernel returns.
    """

    def attach(reference: Callable[P, R]) -> Callable[P, R]:
        call = signature(reference)
        fallback: Callable[..., R] = reference
        names, count = list(call.parameters), len(call.parameters)
        defaults = {name: each.default for name, each in call.parameters.items() if each.default is not Parameter.empty}
        paths = [path.partition(".") for path in tensors]
        operands = [(names.index(name), attribute or None) for name, _, attribute in paths]
        first, single = operands[0][0] if operands else 0, torch.float32
        KERNELS[name] = Kernel(module, name, reference, returns)

        @wraps(reference)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            # One function instead of several: it runs many times in every local step.
            if kwargs or len(args) < count:
                rest, values = names[len(args) :], defaults | kwargs  # `Signature.bind` takes ten times as long
                if not kwargs.keys() <= set(rest) <= values.keys():
                    return fallback(*args, **kwargs)  # which raises: an argument is missing or unknown
                args += tuple([values[name] for name in rest])
            length = args[first].shape[-1] if size is None else size(*args)
            if length < min_size and not (exact and "fedsieve.kernels.vector" in sys.modules):
                return fallback(*args)
            for position, attribute in operands:
                tensor = args[position] if attribute is None else getattr(args[position], attribute)
                if tensor is not None and (tensor.dtype is not single or not tensor.is_cpu or (contiguous and not tensor.is_contiguous())):
                    return fallback(*args)
            if (condition is not None and not condition(*args)) or (compiled := load(module)) is None:
                return fallback(*args)
            result = getattr(compiled, name)(*args)
            return result if returns is None else returns(*result)

        return dispatch

    return attach


def addresses(*tensors: Tensor) -> Iterable[int]:
    """Return the addresses of the tensors' data. Passing an address takes a tenth of the time of a NumPy view."""
    return map(Tensor.data_ptr, tensors)
