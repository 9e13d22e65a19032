"""Compiled convolutions and max pooling inside any module, for the cases in which torch is slow on a CPU."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedsieve.kernels import accelerated

POOL_2X2 = ((2, 2), (2,), 2)
MAX_CHANNEL_PRODUCT = 100
"""Product of input and output channels up to which the compiled convolution is faster than torch's."""
MIN_BATCH = 8
"""Images per batch from which on the compiled forms are faster than torch's."""
LAYOUT_CHANGING = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
"""Modules that copy images back to torch's memory layout, forwards and backwards: this costs more than a compiled convolution saves."""


def is_small_convolution(
    images: Tensor, weight: Tensor, _bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Whether this is a convolution with few channels, without stride, padding, dilation and groups."""
    if images.ndim != 4:
        return False
    (outputs, channels, *kernel), (_, inputs, *size) = weight.shape, images.shape
    plain = stride in (1, (1, 1)) and padding in (0, (0, 0)) and dilation in (1, (1, 1)) and groups == 1
    fits = channels == inputs and kernel[0] <= size[0] and kernel[1] <= size[1]
    return plain and fits and kernel != [1, 1] and outputs * channels <= MAX_CHANNEL_PRODUCT


def is_plain_pooling(
    images: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, return_indices: bool
) -> bool:
    """Whether this is max pooling over whole squares of 2 x 2."""
    if images.ndim != 4 or images.shape[-1] % 2 or images.shape[-2] % 2 or ceil_mode or return_indices:
        return False
    return kernel_size in POOL_2X2 and stride in (None, *POOL_2X2) and padding in (0, (0, 0)) and dilation in (1, (1, 1))


def batch_size(images: Tensor, *_: object) -> int:
    """The number of images."""
    return len(images)


@accelerated(
    "image",
    "convolution",
    tensors=("images", "weight", "bias"),
    size=batch_size,
    min_size=MIN_BATCH,
    contiguous=False,
    condition=is_small_convolution,
)
def conv2d(
    images: Tensor, weight: Tensor, bias: Tensor | None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """`torch.nn.functional.conv2d`."""
    return functional.conv2d(images, weight, bias, stride, padding, dilation, groups)


@accelerated(
    "image",
    "max_pooling",
    tensors=("images",),
    size=batch_size,
    min_size=MIN_BATCH,
    contiguous=False,
    condition=is_plain_pooling,
)
def max_pool2d(
    images: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """`torch.nn.functional.max_pool2d`."""
    return functional.max_pool2d(images, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


class FastConvMode(TorchFunctionMode):
    """Context in which max pooling and, optionally, convolutions of a module run compiled if they can."""

    def __init__(self, *, convolutions: bool) -> None:
        super().__init__()
        self.convolutions = convolutions

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Replace one call of torch."""
        kwargs = kwargs or {}
        if function is functional.max_pool2d and args:
            return max_pool2d(*args, **kwargs)
        if function is functional.conv2d and self.convolutions and len(args) > 2:
            return conv2d(*args, **kwargs)
        return function(*args, **kwargs)


def module_keeps_batch_last(module: nn.Module) -> bool:
    """Whether no part of a module is known to copy images back to torch's memory layout."""
    return not any(isinstance(part, LAYOUT_CHANGING) for part in module.modules())
