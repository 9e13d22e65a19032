"""Convolutions of few channels and max-pooling over squares of 2 x 2, which torch does slowly on a CPU: compiled, inside any module.

Images go in and out as torch has them, (n, c, h, w). In memory what goes out lies as (c, h, w, n): then a row of a channel is one long
vector for all images, whatever the size of kernels and images. What stands between two of these operations keeps that order.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedsieve.kernels import available, flatten, load_image_kernels

POOL_2X2 = ((2, 2), (2,), 2)
MAX_CHANNEL_PRODUCT = 100
"""Channels in times channels out up to which the compiled convolution is the faster."""
MIN_BATCH = 8
"""Images from which on the order pays."""
LAYOUT_CHANGING = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)
"""Modules that copy images back into torch's order, there and on the way back: more than a compiled convolution saves."""


def to_batch_last(images: Tensor) -> Tensor:
    """Images as (c, h, w, n), copied unless they lie so."""
    return images.detach().permute(1, 2, 3, 0).contiguous()


def merge_width_and_batch(images: Tensor) -> np.ndarray:
    """Images (c, h, w, n) as (c, h, w * n)."""
    return images.view(*images.shape[:2], -1).numpy()


@lru_cache(maxsize=64)
def kernel_offsets(shape: tuple[int, ...], kernel: tuple[int, ...]) -> np.ndarray:
    """Where the first number lies that each weight of a kernel meets in images (c, h, w, n)."""
    channels, height, width, n = shape
    c, i, j = (np.arange(size) for size in (channels, *kernel))
    return (((c[:, None, None] * height + i[:, None]) * width + j) * n).reshape(-1)


class Convolution(torch.autograd.Function):
    """The compiled passes: the convolution, and its derivatives in the images and in the kernels."""

    @staticmethod
    def forward(context: Any, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Each output a channel, a sum over the inputs under its kernel."""
        images, weight = to_batch_last(images), weight.detach().contiguous()
        (_, height, width, n), (channels, _, *kernel) = images.shape, weight.shape
        out = images.new_empty(channels, height - kernel[0] + 1, width - kernel[1] + 1, n)
        start = weight.new_zeros(channels) if bias is None else bias.detach().contiguous()
        load_image_kernels().convolve(
            flatten(images),
            kernel_offsets(images.shape, weight.shape[2:]),
            width * n,
            weight.flatten(1).numpy(),
            flatten(start),
            merge_width_and_batch(out),
        )
        context.save_for_backward(images, weight)
        return out.permute(3, 0, 1, 2)

    @staticmethod
    def backward(context: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Only what is asked for."""
        (images, weight), output_gradient = context.saved_tensors, to_batch_last(output_gradient)
        places, step = kernel_offsets(images.shape, weight.shape[2:]), images.shape[2] * images.shape[3]
        by_images = by_weight = by_bias = None
        if context.needs_input_grad[0]:
            by_images = torch.zeros_like(images)
            load_image_kernels().convolve_back(
                merge_width_and_batch(output_gradient), places, step, weight.flatten(1).numpy(), flatten(by_images)
            )
            by_images = by_images.permute(3, 0, 1, 2)
        if context.needs_input_grad[1]:
            by_weight = torch.zeros_like(weight)
            load_image_kernels().convolve_weights(
                flatten(images), places, step, merge_width_and_batch(output_gradient), by_weight.flatten(1).numpy()
            )
        if context.needs_input_grad[2]:
            by_bias = output_gradient.sum((1, 2, 3))
        return by_images, by_weight, by_bias


class MaxPool(torch.autograd.Function):
    """The compiled pass and its derivative."""

    @staticmethod
    def forward(context: Any, images: Tensor) -> Tensor:
        """The largest of each square."""
        images = to_batch_last(images)
        channels, height, width, n = images.shape
        out = images.new_empty(channels, height // 2, width // 2, n)
        winner = torch.empty(out.shape, dtype=torch.int8)
        load_image_kernels().max_pool(images.numpy(), out.numpy(), winner.numpy())
        context.save_for_backward(winner)
        return out.permute(3, 0, 1, 2)

    @staticmethod
    def backward(context: Any, output_gradient: Tensor) -> Tensor:
        """To the largest of each square."""
        (winner,) = context.saved_tensors
        channels, height, width, n = winner.shape
        out = output_gradient.new_empty(channels, 2 * height, 2 * width, n)
        load_image_kernels().max_pool_back(to_batch_last(output_gradient).numpy(), winner.numpy(), out.numpy())
        return out.permute(3, 0, 1, 2)


class FastConvMode(TorchFunctionMode):
    """While this is entered, a module's max-pooling and, if asked, its convolutions of these kinds take the compiled passes."""

    def __init__(self, *, convolutions: bool) -> None:
        super().__init__()
        self.convolutions = convolutions

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """One call of torch."""
        kwargs = kwargs or {}
        if function is functional.max_pool2d and args and is_supported_pool(*args, **kwargs):
            return MaxPool.apply(args[0])
        if function is functional.conv2d and self.convolutions and len(args) > 2 and is_supported_convolution(*args, **kwargs):
            return Convolution.apply(*args[:3])
        return function(*args, **kwargs)


def module_keeps_batch_last(module: nn.Module) -> bool:
    """Whether nothing in a module is known to copy images back into torch's order."""
    return not any(isinstance(part, LAYOUT_CHANGING) for part in module.modules())


def is_supported(images: Tensor, *others: Tensor) -> bool:
    """Whether these are images, enough of them, in single precision on a CPU as is all else, and there are compiled passes."""
    single = all(part.dtype is torch.float32 and part.device.type == "cpu" for part in (images, *others))
    return single and images.ndim == 4 and len(images) >= MIN_BATCH and available() is not None


def is_supported_convolution(
    images: Tensor, weight: Tensor, bias: Tensor | None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether this is a plain convolution of few channels: every place, no padding, all channels together."""
    if not is_supported(images, weight, *(() if bias is None else (bias,))):
        return False
    (outputs, channels, *kernel), (_, inputs, *size) = weight.shape, images.shape
    plain = stride in (1, (1, 1)) and padding in (0, (0, 0)) and dilation in (1, (1, 1)) and groups == 1
    fits = channels == inputs and kernel[0] <= size[0] and kernel[1] <= size[1]
    return plain and fits and kernel != [1, 1] and outputs * channels <= MAX_CHANNEL_PRODUCT


def is_supported_pool(
    images: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **rest: Any
) -> bool:
    """Whether this is plain pooling over squares of 2 x 2."""
    plain = kernel_size in POOL_2X2 and stride in (None, *POOL_2X2) and padding in (0, (0, 0)) and dilation in (1, (1, 1))
    even = not (images.shape[-1] % 2 or images.shape[-2] % 2)
    return plain and even and not ceil_mode and not rest.get("return_indices") and is_supported(images)
