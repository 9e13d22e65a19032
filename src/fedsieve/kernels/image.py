"""Kernels for convolutions with few channels and for 2x2 max pooling, with their derivatives.

Images enter and leave with torch's shape, (n, c, h, w). The memory of a result has the order (c, h, w, n): a row of a channel is one long
vector over all images, whatever the size of the kernel. Operations between two of these kernels keep this order.
"""

from functools import lru_cache

import numba
import numpy as np
import torch
from numba import int8, int64
from torch import Tensor

from fedsieve.kernels.compilation import ARRAY_3D, ARRAY_4D, MATRIX, VECTOR, compile_kernel, f32, prefer_512_bit

NO_SUMS = (f32(0),) * 4


@numba.njit(error_model="numpy")
def greater_or_nan(value, best):
    """Return whether a value replaces the largest so far; NaN does, as in torch."""
    return (value > best) | (value != value)


@compile_kernel(ARRAY_4D, ARRAY_4D, int8[:, :, :, ::1])
def _max_pool(images, out, argmax):
    """Compute the maximum of each 2 x 2 window and its position, the first one if values are equal."""
    for c in range(len(out)):
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                one, two = images[c, 2 * i, 2 * j], images[c, 2 * i, 2 * j + 1]
                three, four = images[c, 2 * i + 1, 2 * j], images[c, 2 * i + 1, 2 * j + 1]
                largest, which = out[c, i, j], argmax[c, i, j]
                for n in range(len(largest)):
                    best, place = one[n], int8(0)
                    wins = greater_or_nan(two[n], best)
                    best, place = (two[n] if wins else best), (int8(1) if wins else place)
                    wins = greater_or_nan(three[n], best)
                    best, place = (three[n] if wins else best), (int8(2) if wins else place)
                    wins = greater_or_nan(four[n], best)
                    largest[n], which[n] = (four[n] if wins else best), (int8(3) if wins else place)


@compile_kernel(ARRAY_4D, int8[:, :, :, ::1], ARRAY_4D)
def _max_pool_back(slope, argmax, out):
    """Compute the derivative: that of the output at the position of each maximum, else zero."""
    for c in range(len(slope)):
        for i in range(slope.shape[1]):
            for j in range(slope.shape[2]):
                value, which = slope[c, i, j], argmax[c, i, j]
                for place in range(4):
                    there = out[c, 2 * i + place // 2, 2 * j + place % 2]
                    for n in range(len(value)):
                        there[n] = value[n] if which[n] == place else f32(0)


@compile_kernel(VECTOR, int64[::1], int64, MATRIX, VECTOR, ARRAY_3D)
def _convolve(images, kernel_offsets, row_stride, weights, bias, out):
    """Compute each row of an output as a weighted sum of rows of the images, four at a time to read and write the sum less often."""
    prefer_512_bit()
    size, length = len(kernel_offsets), out.shape[2]
    for i in range(out.shape[1]):
        rest = images[i * row_stride :]
        for c in range(len(out)):
            out[c, i] = bias[c]
        for t in range(0, size - 3, 4):
            one, two = rest[kernel_offsets[t] :], rest[kernel_offsets[t + 1] :]
            three, four = rest[kernel_offsets[t + 2] :], rest[kernel_offsets[t + 3] :]
            for c in range(len(out)):
                total = out[c, i]
                w, x, y, z = weights[c, t], weights[c, t + 1], weights[c, t + 2], weights[c, t + 3]
                for j in range(length):
                    total[j] += w * one[j] + x * two[j] + y * three[j] + z * four[j]
        for t in range(size - size % 4, size):
            one = rest[kernel_offsets[t] :]
            for c in range(len(out)):
                total, w = out[c, i], weights[c, t]
                for j in range(length):
                    total[j] += w * one[j]


@numba.njit(error_model="numpy")
def add_four(out, w, x, y, z):
    """Add four values to the first four of a vector."""
    out[0] += w
    out[1] += x
    out[2] += y
    out[3] += z


@compile_kernel(VECTOR, int64[::1], int64, ARRAY_3D, MATRIX, reassociate=True)
def _convolve_weights(images, kernel_offsets, row_stride, slope, out):
    """Add the derivative by the weights to `out`: products of rows of two channels of `slope` with the input rows of that output row."""
    prefer_512_bit()
    channels, size, length = len(slope), len(kernel_offsets), slope.shape[2]
    for i in range(slope.shape[1]):
        rest = images[i * row_stride :]
        for t in range(0, size - 3, 4):
            one, two = rest[kernel_offsets[t] :], rest[kernel_offsets[t + 1] :]
            three, four = rest[kernel_offsets[t + 2] :], rest[kernel_offsets[t + 3] :]
            for c in range(0, channels, 2):
                d = min(c + 1, channels - 1)
                by, other, w, x, y, z, p, q, r, s = slope[c, i], slope[d, i], *NO_SUMS, *NO_SUMS
                for j in range(length):
                    w += by[j] * one[j]
                    x += by[j] * two[j]
                    y += by[j] * three[j]
                    z += by[j] * four[j]
                    p += other[j] * one[j]
                    q += other[j] * two[j]
                    r += other[j] * three[j]
                    s += other[j] * four[j]
                add_four(out[c, t:], w, x, y, z)
                if d > c:
                    add_four(out[d, t:], p, q, r, s)
        for t in range(size - size % 4, size):
            one = rest[kernel_offsets[t] :]
            for c in range(channels):
                by, w = slope[c, i], f32(0)
                for j in range(length):
                    w += by[j] * one[j]
                out[c, t] += w


@compile_kernel(ARRAY_3D, int64[::1], int64, int64, MATRIX, VECTOR)
def _convolve_back(slope, kernel_offsets, row_stride, num_inputs, weights, out):
    """Add the derivative by the images to `out`: each row of `slope` times its weights, four channels at a time to two of the images."""
    prefer_512_bit()
    channels, length, taps = len(slope), slope.shape[2], len(kernel_offsets) // num_inputs
    for i in range(slope.shape[1]):
        rest = out[i * row_stride :]
        for t in range(len(kernel_offsets)):
            if t // taps % 2:  # computed with the channel before
                continue
            is_pair = t // taps < num_inputs - 1
            u = t + taps if is_pair else t
            total, other = rest[kernel_offsets[t] :], rest[kernel_offsets[u] :]
            for c in range(0, channels - 3, 4):
                one, two, three, four = slope[c, i], slope[c + 1, i], slope[c + 2, i], slope[c + 3, i]
                w, x, y, z = weights[c, t], weights[c + 1, t], weights[c + 2, t], weights[c + 3, t]
                p, q, r, s = weights[c, u], weights[c + 1, u], weights[c + 2, u], weights[c + 3, u]
                if is_pair:
                    for j in range(length):
                        total[j] += w * one[j] + x * two[j] + y * three[j] + z * four[j]
                        other[j] += p * one[j] + q * two[j] + r * three[j] + s * four[j]
                else:
                    for j in range(length):
                        total[j] += w * one[j] + x * two[j] + y * three[j] + z * four[j]
            for c in range(channels - channels % 4, channels):
                one, w, p = slope[c, i], weights[c, t], weights[c, u]
                for j in range(length):
                    total[j] += w * one[j]
                if is_pair:
                    for j in range(length):
                        other[j] += p * one[j]


def to_batch_last(images: Tensor) -> Tensor:
    """Return images as (c, h, w, n), without a copy if their memory has this order."""
    return images.detach().permute(1, 2, 3, 0).contiguous()


def merge_width_and_batch(images: Tensor) -> np.ndarray:
    """Return images (c, h, w, n) as (c, h, w * n)."""
    return images.view(*images.shape[:2], -1).numpy()


@lru_cache(maxsize=64)
def kernel_offsets(shape: tuple[int, ...], kernel: tuple[int, ...]) -> np.ndarray:
    """Return the offset in images (c, h, w, n) of the first value that each weight of a convolution kernel multiplies."""
    channels, height, width, n = shape
    c, i, j = (np.arange(size) for size in (channels, *kernel))
    return (((c[:, None, None] * height + i[:, None]) * width + j) * n).reshape(-1)


class Convolution(torch.autograd.Function):
    """The compiled convolution and its derivatives by images, weights and bias."""

    @staticmethod
    def forward(context, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of the images."""
        images, weight = to_batch_last(images), weight.detach().contiguous()
        (_, height, width, n), (channels, _, *kernel) = images.shape, weight.shape
        out = images.new_empty(channels, height - kernel[0] + 1, width - kernel[1] + 1, n)
        start = weight.new_zeros(channels) if bias is None else bias.detach().contiguous()
        _convolve(
            images.view(-1).numpy(),
            kernel_offsets(images.shape, weight.shape[2:]),
            width * n,
            weight.flatten(1).numpy(),
            start.numpy(),
            merge_width_and_batch(out),
        )
        context.save_for_backward(images, weight)
        return out.permute(3, 0, 1, 2)

    @staticmethod
    def backward(context, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the derivatives that are needed."""
        (images, weight), output_gradient = context.saved_tensors, to_batch_last(output_gradient)
        offsets, row_stride = kernel_offsets(images.shape, weight.shape[2:]), images.shape[2] * images.shape[3]
        by_images = by_weight = by_bias = None
        if context.needs_input_grad[0]:
            by_images = torch.zeros_like(images)
            slope, weights = merge_width_and_batch(output_gradient), weight.flatten(1).numpy()
            _convolve_back(slope, offsets, row_stride, len(images), weights, by_images.view(-1).numpy())
            by_images = by_images.permute(3, 0, 1, 2)
        if context.needs_input_grad[1]:
            by_weight = torch.zeros_like(weight)
            slope, out = merge_width_and_batch(output_gradient), by_weight.flatten(1).numpy()
            _convolve_weights(images.view(-1).numpy(), offsets, row_stride, slope, out)
        if context.needs_input_grad[2]:
            by_bias = output_gradient.sum((1, 2, 3))
        return by_images, by_weight, by_bias


class MaxPooling(torch.autograd.Function):
    """The compiled 2 x 2 max pooling and its derivative."""

    @staticmethod
    def forward(context, images: Tensor) -> Tensor:
        """Return the maximum of each window."""
        images = to_batch_last(images)
        channels, height, width, n = images.shape
        out = images.new_empty(channels, height // 2, width // 2, n)
        argmax = torch.empty(out.shape, dtype=torch.int8)
        _max_pool(images.numpy(), out.numpy(), argmax.numpy())
        context.save_for_backward(argmax)
        return out.permute(3, 0, 1, 2)

    @staticmethod
    def backward(context, output_gradient: Tensor) -> Tensor:
        """Return the derivative by the images."""
        (argmax,) = context.saved_tensors
        channels, height, width, n = argmax.shape
        out = output_gradient.new_empty(channels, 2 * height, 2 * width, n)
        _max_pool_back(to_batch_last(output_gradient).numpy(), argmax.numpy(), out.numpy())
        return out.permute(3, 0, 1, 2)


def convolution(images, weight, bias, *_options):
    """Kernel of `fast_conv.conv2d`."""
    return Convolution.apply(images, weight, bias)


def max_pooling(images, *_options):
    """Kernel of `fast_conv.max_pool2d`."""
    return MaxPooling.apply(images)
