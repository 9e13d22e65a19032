"""Max-pooling over squares of 2 x 2, which torch does one number at a time on a CPU: compiled where it can be, inside any module."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedsieve.core.compiled import passes

SQUARES = ((2, 2), (2,), 2)


class MaxPool(torch.autograd.Function):
    """The compiled pass and its derivative."""

    @staticmethod
    def forward(context: Any, images: Tensor) -> Tensor:
        """The largest of each square."""
        *lead, height, width = images.shape
        out = images.new_empty(*lead, height // 2, width // 2)
        winner = torch.empty(out.shape, dtype=torch.int8)
        passes().max_pool(*(part.view(-1, *part.shape[-2:]).numpy() for part in (images.detach(), out, winner)))
        context.save_for_backward(winner)
        context.shape = images.shape
        return out

    @staticmethod
    def backward(context: Any, slope: Tensor) -> Tensor:
        """To the largest of each square."""
        (winner,) = context.saved_tensors
        out = slope.new_empty(context.shape)
        passes().max_pool_back(*(part.view(-1, *part.shape[-2:]).numpy() for part in (slope.contiguous(), winner, out)))
        return out


class Pooling(TorchFunctionMode):
    """While this is entered, a module's max-pooling of that kind takes the compiled pass."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """One call of torch."""
        kwargs = kwargs or {}
        if function is functional.max_pool2d and compiled_pool_can(*args, **kwargs):
            return MaxPool.apply(args[0])
        return function(*args, **kwargs)


def compiled_pool_can(
    images: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **rest: Any
) -> bool:
    """Whether this is plain pooling over squares of 2 x 2, in single precision on a CPU."""
    plain = kernel_size in SQUARES and stride in (None, *SQUARES) and padding in (0, (0, 0)) and dilation in (1, (1, 1))
    even = images.ndim == 4 and not (images.shape[-1] % 2 or images.shape[-2] % 2)
    suits = images.dtype is torch.float32 and images.device.type == "cpu" and images.is_contiguous()
    return plain and even and suits and not ceil_mode and not rest.get("return_indices") and passes() is not None
