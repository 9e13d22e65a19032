"""Kernels for linear models: losses with their derivatives, and the gradient over examples read in place."""

import numba
import numpy as np
import torch
from numba import boolean, carray, float32, int64, types

from fedsieve.kernels import addresses
from fedsieve.kernels.compilation import (
    ADDRESS,
    ARRAY_3D,
    as_matrix,
    as_vector,
    compile_kernel,
    f32,
    fast_exp,
    fast_log,
    pointer,
    prefer_512_bit,
)


@numba.njit(error_model="numpy")
def softmax_loss_and_slope(logits, label, slope):
    """Return the cross-entropy of one example, and write its derivative by the logits to `slope`."""
    largest = logits[0]
    for c in range(1, len(logits)):
        largest = max(largest, logits[c])
    target_logit, total = logits[label], f32(0)
    for c in range(len(logits)):
        slope[c] = fast_exp(logits[c] - largest)
        total += slope[c]
    for c in range(len(logits)):
        slope[c] /= total
    slope[label] -= f32(1)
    return fast_log(total) + largest - target_logit


@compile_kernel(ARRAY_3D, int64[:, ::1], float32[::1], ARRAY_3D)
def _softmax_loss(logits, labels, loss, slope):
    """Compute the mean cross-entropy of each client's examples, and its derivative by the logits (client, class, example)."""
    clients, _, examples = logits.shape
    share = f32(1) / f32(examples)
    for k in range(clients):
        loss[k] = f32(0)
        for i in range(examples):
            loss[k] += share * softmax_loss_and_slope(logits[k, :, i], labels[k, i], slope[k, :, i])
            slope[k, :, i] *= share


def softmax_loss(_objective, logits, labels):
    """Kernel of `Linear._softmax_loss`."""
    loss, slope = logits.new_empty(len(logits)), torch.empty_like(logits)
    _softmax_loss(logits.numpy(), labels.numpy(), loss.numpy(), slope.numpy())
    return loss, slope


@numba.njit(error_model="numpy")
def loss_and_slope(logit, y, is_logistic):
    """Return the loss of one example, squared or logistic, and its derivative by the logit."""
    if is_logistic:
        decay = fast_exp(-abs(logit))
        return max(logit, f32(0)) + fast_log(f32(1) + decay) - y * logit, (f32(1) if logit > f32(0) else decay) / (f32(1) + decay) - y
    return (logit - y) * (logit - y), f32(2) * (logit - y)


@compile_kernel(*[ADDRESS] * 6, *[types.UniTuple(int64, 2)] * 2, int64, int64, boolean, reassociate=True)
def _indexed_rows_gradient(rows, indices, theta, y, loss, out, rows_shape, batch_shape, size, num_outputs, is_logistic):
    """Compute loss and gradient, four examples at a time: outputs, then gradient, while they are in the first-level cache."""
    prefer_512_bit()
    (clients, batch), features, gated = batch_shape, rows_shape[1], num_outputs * rows_shape[1]
    rows, indices, y = as_matrix(rows, *rows_shape), carray(pointer(indices), batch_shape, np.int64), as_matrix(y, *batch_shape)
    theta, loss, out = as_matrix(theta, clients, size), as_vector(loss, clients), as_matrix(out, clients, size)
    last, share, by = batch - 1, f32(1) / f32(batch), np.empty((4, num_outputs), f32)
    for k in range(clients):
        weights, intercept = theta[k, :gated].reshape(num_outputs, features), theta[k, gated:]
        slope, slope_at_zero = out[k, :gated].reshape(num_outputs, features), out[k, gated:]
        at, loss[k], out[k] = indices[k], f32(0), f32(0)
        for i in range(0, batch, 4):
            a, b, c, d = rows[at[i]], rows[at[min(i + 1, last)]], rows[at[min(i + 2, last)]], rows[at[min(i + 3, last)]]
            for o in range(num_outputs):
                vector = weights[o]
                p = q = r = s = intercept[o] if len(intercept) else f32(0)
                for j in range(features):
                    p += a[j] * vector[j]
                    q += b[j] * vector[j]
                    r += c[j] * vector[j]
                    s += d[j] * vector[j]
                by[0, o], by[1, o], by[2, o], by[3, o] = p, q, r, s
            for n in range(4):
                if i + n >= batch:
                    by[n] = f32(0)
                elif num_outputs > 1:
                    loss[k] += share * softmax_loss_and_slope(by[n], int64(y[k, i + n]), by[n])
                else:
                    one, by[n, 0] = loss_and_slope(by[n, 0], y[k, i + n], is_logistic)
                    loss[k] += share * one
            for o in range(num_outputs):
                p, q, r, s, total = share * by[0, o], share * by[1, o], share * by[2, o], share * by[3, o], slope[o]
                if len(intercept):
                    slope_at_zero[o] += p + q + r + s
                for j in range(features):
                    total[j] += p * a[j] + q * b[j] + r * c[j] + s * d[j]


def indexed_rows_gradient(objective, theta, x, y):
    """Kernel of `Linear._indexed_gradient`."""
    y, loss, out, indices = y.to(theta.dtype).contiguous(), theta.new_empty(len(theta)), torch.empty_like(theta), x.indices.contiguous()
    shapes = (tuple(x.rows.shape), tuple(indices.shape), theta.shape[1], objective.num_outputs)
    _indexed_rows_gradient(*addresses(x.rows, indices, theta, y, loss, out), *shapes, objective.loss == "logistic")
    return loss, out
