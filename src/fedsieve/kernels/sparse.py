"""Passes over sparse rows and over the features they touch, compiled by numba as those in `passes.py`; apart, as dense rows need none."""

import numba
import numpy as np
from numba import float32, int32, int64

from fedsieve.kernels.vector import MATRIX, VECTOR, compile_kernel, f32, fast_exp, loss_and_slope, prefer_512_bit

BLOCK_FEATURES = 32
"""Features at a time: their numbers stay in the fastest memory."""


@compile_kernel(int32[::1], int32[::1], VECTOR, MATRIX, MATRIX)
def csr_matmul(row_starts, columns, values, matrix, out):
    """Rows of a CSR matrix times a matrix, four cells at a time."""
    prefer_512_bit()
    for i in range(len(out)):
        total, end = out[i], row_starts[i + 1] - row_starts[0]
        total[:] = f32(0)
        for j in range(row_starts[i] - row_starts[0], end, 4):
            k, m, n = min(j + 1, end - 1), min(j + 2, end - 1), min(j + 3, end - 1)
            p, q, r, s = values[j], values[k], values[m], values[n]
            q, r, s = q if j + 1 < end else f32(0), r if j + 2 < end else f32(0), s if j + 3 < end else f32(0)
            a, b, c, d = matrix[columns[j]], matrix[columns[k]], matrix[columns[m]], matrix[columns[n]]
            for o in range(len(total)):
                total[o] += p * a[o] + q * b[o] + r * c[o] + s * d[o]


@compile_kernel(int32[::1], int32[::1], VECTOR, MATRIX, MATRIX)
def csr_matmul_transposed(row_starts, columns, values, output_gradient, out):
    """The transpose of a CSR matrix times a matrix."""
    prefer_512_bit()
    out[:] = f32(0)
    for i in range(len(output_gradient)):
        row = output_gradient[i]
        for j in range(row_starts[i] - row_starts[0], row_starts[i + 1] - row_starts[0]):
            total, value = out[columns[j]], values[j]
            for o in range(len(total)):
                total[o] += value * row[o]


@numba.njit(error_model="numpy")
def gather_rows(table, indices, out):
    """Rows of a table, one after another."""
    for i in range(len(indices)):
        row, to = table[indices[i]], out[i * table.shape[1] : (i + 1) * table.shape[1]]
        for j in range(len(row)):
            to[j] = row[j]


@compile_kernel(MATRIX, MATRIX, int64[::1], float32, float32, float32, VECTOR, VECTOR, VECTOR)
def active_gates(weights, log_alpha, feature_indices, temperature, stretch_low, stretch_high, theta, value, weighted_derivative):
    """See `touched.Tables.opened`."""
    prefer_512_bit()
    width, peak, outputs = stretch_high - stretch_low, (stretch_high - stretch_low) / temperature, weights.shape[1]
    w, phi = np.empty(BLOCK_FEATURES * outputs, f32), np.empty(BLOCK_FEATURES * outputs, f32)
    for begin in range(0, len(feature_indices), BLOCK_FEATURES):
        some = feature_indices[begin : begin + BLOCK_FEATURES]
        gather_rows(weights, some, w)
        gather_rows(log_alpha, some, phi)
        here = slice(begin * outputs, (begin + len(some)) * outputs)
        product, gate, slope = theta[here], value[here], weighted_derivative[here]
        for i in range(len(product)):
            s = f32(1) / (f32(1) + fast_exp(-phi[i] / temperature))
            z = s * width + stretch_low
            clipped = min(max(z, f32(0)), f32(1))
            gate[i] = clipped
            product[i] = w[i] * clipped
            slope[i] = w[i] * (peak * s * (f32(1) - s) if (z > f32(0)) & (z < f32(1)) else f32(0))


@compile_kernel(MATRIX, MATRIX, int64[::1], VECTOR, VECTOR, VECTOR, float32, float32, float32, float32, float32)
def gated_step(
    weights, log_alpha, feature_indices, weight_gradient, gradient, weighted_derivative, step_size, offset, multiplier, rate, limit
):
    """See `touched.Tables.step`."""
    prefer_512_bit()
    outputs = weights.shape[1]
    phi, new = np.empty(BLOCK_FEATURES * outputs, f32), np.empty(BLOCK_FEATURES * outputs, f32)
    for begin in range(0, len(feature_indices), BLOCK_FEATURES):
        some = feature_indices[begin : begin + BLOCK_FEATURES]
        gather_rows(log_alpha, some, phi)
        here = slice(begin * outputs, (begin + len(some)) * outputs)
        slope, by, down = gradient[here], weighted_derivative[here], weight_gradient[here]
        for i in range(len(slope)):
            p = f32(1) / (f32(1) + fast_exp(-(phi[i] + offset)))
            turned = phi[i] - rate * (slope[i] * by[i] + multiplier * p * (f32(1) - p))
            new[i] = -limit if turned < -limit else limit if turned > limit else turned  # a broken number stays broken
        for i in range(len(some)):
            w, g = weights[some[i]], log_alpha[some[i]]
            one, two = down[i * outputs : (i + 1) * outputs], new[i * outputs : (i + 1) * outputs]
            for j in range(outputs):
                w[j] -= step_size * one[j]
                g[j] = two[j]


@compile_kernel(MATRIX, MATRIX, VECTOR, float32, float32, float32, MATRIX)
def apply_penalty(log_alpha, num_skipped, multiplier, offset, rate, limit, out):
    """See `constraint.drift`."""
    prefer_512_bit()
    for k in range(len(log_alpha)):
        old, times, new, pull = log_alpha[k], num_skipped[k], out[k], rate * multiplier[k]
        for i in range(len(old)):
            p = f32(1) / (f32(1) + fast_exp(-(old[i] + offset)))
            turned = old[i] - pull * times[i] * p * (f32(1) - p)
            new[i] = -limit if turned < -limit else limit if turned > limit else turned  # a broken number stays broken


@compile_kernel(MATRIX, MATRIX, VECTOR, MATRIX, reassociate=True)
def binary_loss(logits, labels, loss, slope):
    """See `Linear.gradient`: the mean logistic loss of each client's cells, and its derivative in the logits."""
    for k in range(len(logits)):
        logit, y, out, total, share = logits[k], labels[k], slope[k], f32(0), f32(1) / f32(logits.shape[1])
        for i in range(len(logit)):
            one, by = loss_and_slope(logit[i], y[i], True)
            total += one
            out[i] = share * by
        loss[k] = share * total
