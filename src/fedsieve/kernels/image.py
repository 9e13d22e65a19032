"""Compiled passes over images that lie batch last, (c, h, w, n); apart from the others, as only modules with images load them."""

import numba
from numba import float32, int8, int64

from fedsieve.kernels.vector import IMAGES, ROW, TABLE, F, compiled, wide

BATCH = float32[:, :, :, ::1]


@numba.njit(error_model="numpy")
def larger(value, best):
    """Whether a value takes the place of the best so far; a number that is none does."""
    return (value > best) | (value != value)


@compiled(BATCH, BATCH, int8[:, :, :, ::1])
def max_pool(images, out, winner):
    """The largest of each 2 x 2 square, and which of the four it is, the first of equals."""
    for c in range(len(out)):
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                one, two = images[c, 2 * i, 2 * j], images[c, 2 * i, 2 * j + 1]
                three, four = images[c, 2 * i + 1, 2 * j], images[c, 2 * i + 1, 2 * j + 1]
                largest, which = out[c, i, j], winner[c, i, j]
                for n in range(len(largest)):
                    best, place = one[n], int8(0)
                    wins = larger(two[n], best)
                    best, place = (two[n] if wins else best), (int8(1) if wins else place)
                    wins = larger(three[n], best)
                    best, place = (three[n] if wins else best), (int8(2) if wins else place)
                    wins = larger(four[n], best)
                    largest[n], which[n] = (four[n] if wins else best), (int8(3) if wins else place)


@compiled(BATCH, int8[:, :, :, ::1], BATCH)
def max_pool_back(slope, winner, out):
    """The derivative, where each square's largest stood; zero elsewhere."""
    for c in range(len(slope)):
        for i in range(slope.shape[1]):
            for j in range(slope.shape[2]):
                value, which = slope[c, i, j], winner[c, i, j]
                for place in range(4):
                    there = out[c, 2 * i + place // 2, 2 * j + place % 2]
                    for n in range(len(value)):
                        there[n] = value[n] if which[n] == place else F(0)


@compiled(ROW, int64[::1], int64, TABLE, ROW, IMAGES)
def convolve(images, reads, step, weights, bias, out):
    """See `objectives.images`: each row of an output, a sum of rows of the images; four at a time, as the sum is read and written."""
    wide()
    size, length = len(reads), out.shape[2]
    for i in range(out.shape[1]):
        rest = images[i * step :]
        for c in range(len(out)):
            out[c, i] = bias[c]
        for t in range(0, size - 3, 4):
            one, two, three, four = rest[reads[t] :], rest[reads[t + 1] :], rest[reads[t + 2] :], rest[reads[t + 3] :]
            for c in range(len(out)):
                total = out[c, i]
                w, x, y, z = weights[c, t], weights[c, t + 1], weights[c, t + 2], weights[c, t + 3]
                for j in range(length):
                    total[j] += w * one[j] + x * two[j] + y * three[j] + z * four[j]
        for t in range(size - size % 4, size):
            one = rest[reads[t] :]
            for c in range(len(out)):
                total, w = out[c, i], weights[c, t]
                for j in range(length):
                    total[j] += w * one[j]


@compiled(ROW, int64[::1], int64, IMAGES, TABLE, reassociate=True)
def convolve_weights(images, reads, step, slope, out):
    """The derivative in the weights, added to zeros: products of each row of the slope with the rows it was made of."""
    wide()
    size, length = len(reads), slope.shape[2]
    for i in range(slope.shape[1]):
        rest = images[i * step :]
        for t in range(0, size - 3, 4):
            one, two, three, four = rest[reads[t] :], rest[reads[t + 1] :], rest[reads[t + 2] :], rest[reads[t + 3] :]
            for c in range(len(slope)):
                by, w, x, y, z = slope[c, i], F(0), F(0), F(0), F(0)
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
            one = rest[reads[t] :]
            for c in range(len(slope)):
                by, w = slope[c, i], F(0)
                for j in range(length):
                    w += by[j] * one[j]
                out[c, t] += w


@compiled(IMAGES, int64[::1], int64, TABLE, ROW)
def convolve_back(slope, reads, step, weights, out):
    """The derivative in the images, added to zeros: each row of the slope to the rows it was made of, four channels at a time."""
    wide()
    channels, length = len(slope), slope.shape[2]
    for i in range(slope.shape[1]):
        rest = out[i * step :]
        for t in range(len(reads)):
            total = rest[reads[t] :]
            for c in range(0, channels - 3, 4):
                one, two, three, four = slope[c, i], slope[c + 1, i], slope[c + 2, i], slope[c + 3, i]
                w, x, y, z = weights[c, t], weights[c + 1, t], weights[c + 2, t], weights[c + 3, t]
                for j in range(length):
                    total[j] += w * one[j] + x * two[j] + y * three[j] + z * four[j]
            for c in range(channels - channels % 4, channels):
                one, w = slope[c, i], weights[c, t]
                for j in range(length):
                    total[j] += w * one[j]
