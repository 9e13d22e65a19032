"""Kernels for sparse examples and for the features they contain; dense examples do not load them."""

import numba
import numpy as np
import torch
from numba import float32, int32, int64

from fedsieve.kernels.compilation import MATRIX, VECTOR, clip, compile_kernel, f32, fast_exp, fast_log, prefer_512_bit
from fedsieve.kernels.linear import loss_and_slope
from fedsieve.kernels.vector import penalty_per_gate

BLOCK_FEATURES = 32
"""Features per block; the numbers of a block stay in the first-level cache."""


@compile_kernel(int32[::1], int32[::1], VECTOR, MATRIX, MATRIX)
def _csr_matmul(row_starts, columns, values, matrix, out):
    """Compute a CSR matrix times a matrix, four entries of a row at a time."""
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


def csr_matmul(batch, matrix):
    """Kernel of `SparseBatch.matmul`."""
    out = torch.empty(len(batch.row_starts) - 1, matrix.shape[1])
    _csr_matmul(batch.row_starts, batch.columns, batch.values, matrix[0].T.contiguous().numpy(), out.numpy())
    return out.T[None]


@compile_kernel(int32[::1], int32[::1], VECTOR, MATRIX, MATRIX)
def _csr_matmul_transposed(row_starts, columns, values, output_gradient, out):
    """Compute the transpose of a CSR matrix times a matrix."""
    prefer_512_bit()
    out[:] = f32(0)
    for i in range(len(output_gradient)):
        row = output_gradient[i]
        for j in range(row_starts[i] - row_starts[0], row_starts[i + 1] - row_starts[0]):
            total, value = out[columns[j]], values[j]
            for o in range(len(total)):
                total[o] += value * row[o]


def csr_matmul_transposed(batch, output_gradient):
    """Kernel of `SparseBatch.matmul_transposed`."""
    out = output_gradient.new_empty(batch.num_features, output_gradient.shape[1])
    _csr_matmul_transposed(batch.row_starts, batch.columns, batch.values, output_gradient[0].T.contiguous().numpy(), out.numpy())
    return out[None]


@numba.njit(error_model="numpy")
def gather_rows(table, indices, out):
    """Copy rows of a table to `out`, one after another."""
    for i in range(len(indices)):
        row, copy = table[indices[i]], out[i * table.shape[1] : (i + 1) * table.shape[1]]
        for j in range(len(row)):
            copy[j] = row[j]


@compile_kernel(MATRIX, MATRIX, int64[::1], VECTOR, float32, float32, float32, float32, VECTOR, VECTOR, VECTOR)
def _active_gates(
    weights, log_alpha, feature_indices, noise, margin, temperature, stretch_low, stretch_high, theta, value, weighted_derivative
):
    """Gates at their medians if there is no noise."""
    prefer_512_bit()
    width, peak, outputs = stretch_high - stretch_low, (stretch_high - stretch_low) / temperature, weights.shape[1]
    w, phi = np.empty(BLOCK_FEATURES * outputs, f32), np.empty(BLOCK_FEATURES * outputs, f32)
    for begin in range(0, len(feature_indices), BLOCK_FEATURES):
        some = feature_indices[begin : begin + BLOCK_FEATURES]
        gather_rows(weights, some, w)
        gather_rows(log_alpha, some, phi)
        here = slice(begin * outputs, (begin + len(some)) * outputs)
        product, gate, slope = theta[here], value[here], weighted_derivative[here]
        if len(noise):
            u = noise[here]
            for i in range(len(product)):
                clipped_u = min(max(u[i], margin), f32(1) - margin)
                phi[i] += fast_log(clipped_u / (f32(1) - clipped_u))
        for i in range(len(product)):
            s = f32(1) / (f32(1) + fast_exp(-phi[i] / temperature))
            z = s * width + stretch_low
            clipped = min(max(z, f32(0)), f32(1))
            gate[i] = clipped
            product[i] = w[i] * clipped
            slope[i] = w[i] * (peak * s * (f32(1) - s) if (z > f32(0)) & (z < f32(1)) else f32(0))


def active_gates(tables, shape, feature_indices, noise, noise_margin):
    """Kernel of `FeatureTables.active_gates`."""
    out = [torch.empty(1, len(feature_indices) * tables.weights.shape[1]) for _ in range(3)]
    noise = torch.empty(0) if noise is None else noise[0]
    _active_gates(*(part.numpy() for part in (*tables, feature_indices, noise)), noise_margin, *shape, *(part[0].numpy() for part in out))
    return out


@compile_kernel(MATRIX, MATRIX, int64[::1], VECTOR, VECTOR, VECTOR, float32, float32, float32, float32, float32)
def _gated_step(
    weights, log_alpha, feature_indices, weight_gradient, gradient, weighted_derivative, step_size, offset, multiplier, rate, limit
):
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
            new[i] = clip(phi[i] - rate * (slope[i] * by[i] + multiplier * p * (f32(1) - p)), limit)
        for i in range(len(some)):
            w, g = weights[some[i]], log_alpha[some[i]]
            one, two = down[i * outputs : (i + 1) * outputs], new[i * outputs : (i + 1) * outputs]
            for j in range(outputs):
                w[j] -= step_size * one[j]
                g[j] = two[j]


def gated_step(
    tables,
    shape,
    feature_indices,
    weight_gradient,
    gate_gradient_factors,
    step_size,
    multiplier,
    constraint_scale,
    num_weights,
    rate,
    limit,
):
    """Kernel of `FeatureTables.gated_step`; changes the tables in place."""
    penalty = float(penalty_per_gate(multiplier.double(), constraint_scale, num_weights))
    vectors = (part.numpy().reshape(-1) for part in (weight_gradient, *gate_gradient_factors))
    arrays = (*(part.numpy() for part in (*tables, feature_indices)), *vectors)
    _gated_step(*arrays, float(step_size), shape.offset, penalty, rate, limit)


@compile_kernel(MATRIX, MATRIX, VECTOR, float32, float32, float32, MATRIX)
def _apply_penalty(log_alpha, num_skipped, multiplier, offset, rate, limit, out):
    prefer_512_bit()
    for k in range(len(log_alpha)):
        old, num_steps, new, penalty = log_alpha[k], num_skipped[k], out[k], rate * multiplier[k]
        for i in range(len(old)):
            p = f32(1) / (f32(1) + fast_exp(-(old[i] + offset)))
            new[i] = clip(old[i] - penalty * num_steps[i] * p * (f32(1) - p), limit)


def apply_penalty(shape, log_alpha, num_skipped, multiplier, constraint_scale, size, rate, limit):
    """Kernel of `constraint.apply_penalty`."""
    out, penalty = torch.empty_like(log_alpha), penalty_per_gate(multiplier, constraint_scale, size).contiguous()
    _apply_penalty(log_alpha.numpy(), num_skipped.numpy(), penalty.numpy(), shape.offset, rate, limit, out.numpy())
    return out


@compile_kernel(MATRIX, MATRIX, VECTOR, MATRIX, reassociate=True)
def _binary_loss(logits, labels, loss, slope):
    """Compute the mean logistic loss over the labels and examples of each client, and its derivative by the logits."""
    for k in range(len(logits)):
        logit, y, out, total, share = logits[k], labels[k], slope[k], f32(0), f32(1) / f32(logits.shape[1])
        for i in range(len(logit)):
            one, by = loss_and_slope(logit[i], y[i], True)
            total += one
            out[i] = share * by
        loss[k] = share * total


def binary_loss(_objective, logits, y):
    """Kernel of `Linear._multilabel_loss`."""
    loss, slope = logits.new_empty(len(logits)), torch.empty_like(logits)
    _binary_loss(logits.flatten(1).numpy(), y.flatten(1).numpy(), loss.numpy(), slope.flatten(1).numpy())
    return loss, slope
