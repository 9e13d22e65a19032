"""Compiled passes over images that lie batch last, (c, h, w, n); apart from the others, as only modules with images load them."""

import numba
from numba import float32, int8, int64

from fedsieve.kernels.vector import ARRAY_3D, MATRIX, VECTOR, compile_kernel, f32, prefer_512_bit

ARRAY_4D = float32[:, :, :, ::1]


@numba.njit(error_model="numpy")
def greater_or_nan(value, best):
    """Whether a value takes the place of the best so far; a number that is none does."""
    return (value > best) | (value != value)


@compile_kernel(ARRAY_4D, ARRAY_4D, int8[:, :, :, ::1])
def max_pool(images, out, argmax):
    """The largest of each 2 x 2 square, and which of the four it is, the first of equals."""
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
def max_pool_back(slope, argmax, out):
    """The derivative, where each square's largest stood; zero elsewhere."""
    for c in range(len(slope)):
        for i in range(slope.shape[1]):
            for j in range(slope.shape[2]):
                value, which = slope[c, i, j], argmax[c, i, j]
                for place in range(4):
                    there = out[c, 2 * i + place // 2, 2 * j + place % 2]
                    for n in range(len(value)):
                        there[n] = value[n] if which[n] == place else f32(0)


@compile_kernel(VECTOR, int64[::1], int64, MATRIX, VECTOR, ARRAY_3D)
def convolve(images, kernel_offsets, row_stride, weights, bias, out):
    """See `objectives.images`: each row of an output, a sum of rows of the images; four at a time, as the sum is read and written."""
    prefer_512_bit()
    size, length = len(kernel_offsets), out.shape[2]
    for i in range(out.shape[1]):
        rest = images[i * row_stride :]
        for c in range(len(out)):
            out[c, i] = bias[c]
        for t in range(0, size - 3, 4):
            one, two, three, four = (
                rest[kernel_offsets[t] :],
                rest[kernel_offsets[t + 1] :],
                rest[kernel_offsets[t + 2] :],
                rest[kernel_offsets[t + 3] :],
            )
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


@compile_kernel(VECTOR, int64[::1], int64, ARRAY_3D, MATRIX, reassociate=True)
def convolve_weights(images, kernel_offsets, row_stride, slope, out):
    """The derivative in the weights, added to zeros: products of each row of the slope with the rows it was made of."""
    prefer_512_bit()
    size, length = len(kernel_offsets), slope.shape[2]
    for i in range(slope.shape[1]):
        rest = images[i * row_stride :]
        for t in range(0, size - 3, 4):
            one, two, three, four = (
                rest[kernel_offsets[t] :],
                rest[kernel_offsets[t + 1] :],
                rest[kernel_offsets[t + 2] :],
                rest[kernel_offsets[t + 3] :],
            )
            for c in range(len(slope)):
                by, w, x, y, z = slope[c, i], f32(0), f32(0), f32(0), f32(0)
                for j in range(length):
                    w += by[j] * one[j]
                    x += by[j] * two[j]
                    y += by[j] * three[j]
                    z += by[j] * four[j]
                out[c, t] += w
                out[c, t + 1] += x
                out[c, t + 2] += y
                out[c, t + 3] += z
        for t in range(size - size % 4, size):
            one = rest[kernel_offsets[t] :]
            for c in range(len(slope)):
                by, w = slope[c, i], f32(0)
                for j in range(length):
                    w += by[j] * one[j]
                out[c, t] += w


@compile_kernel(ARRAY_3D, int64[::1], int64, MATRIX, VECTOR)
def convolve_back(slope, kernel_offsets, row_stride, weights, out):
    """The derivative in the images, added to zeros: each row of the slope to the rows it was made of, four channels at a time."""
    prefer_512_bit()
    channels, length = len(slope), slope.shape[2]
    for i in range(slope.shape[1]):
        rest = out[i * row_stride :]
        for t in range(len(kernel_offsets)):
            total = rest[kernel_offsets[t] :]
            for c in range(0, channels - 3, 4):
                one, two, three, four = slope[c, i], slope[c + 1, i], slope[c + 2, i], slope[c + 3, i]
                w, x, y, z = weights[c, t], weights[c + 1, t], weights[c + 2, t], weights[c + 3, t]
                for j in range(length):
                    total[j] += w * one[j] + x * two[j] + y * three[j] + z * four[j]
            for c in range(channels - channels % 4, channels):
                one, w = slope[c, i], weights[c, t]
                for j in range(length):
                    total[j] += w * one[j]
