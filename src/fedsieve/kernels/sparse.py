"""Passes over sparse rows and over the features they touch, compiled by numba as those in `passes.py`; apart, as dense rows need none."""

import numba
import numpy as np
from numba import float32, int32, int64

from fedsieve.kernels.vector import ROW, TABLE, F, compiled, exponential, miss, wide

BLOCK = 32
"""Features at a time: their numbers stay in the fastest memory."""


@compiled(int32[::1], int32[::1], ROW, TABLE, TABLE)
def sparse_product(starts, columns, values, matrix, out):
    """Rows of a CSR matrix times a matrix, four cells at a time."""
    wide()
    for i in range(len(out)):
        total, end = out[i], starts[i + 1] - starts[0]
        total[:] = F(0)
        for j in range(starts[i] - starts[0], end, 4):
            k, m, n = min(j + 1, end - 1), min(j + 2, end - 1), min(j + 3, end - 1)
            p, q, r, s = values[j], values[k], values[m], values[n]
            q, r, s = q if j + 1 < end else F(0), r if j + 2 < end else F(0), s if j + 3 < end else F(0)
            a, b, c, d = matrix[columns[j]], matrix[columns[k]], matrix[columns[m]], matrix[columns[n]]
            for o in range(len(total)):
                total[o] += p * a[o] + q * b[o] + r * c[o] + s * d[o]


@compiled(int32[::1], int32[::1], ROW, TABLE, TABLE)
def sparse_product_back(starts, columns, values, slope, out):
    """The transpose of a CSR matrix times a matrix."""
    wide()
    out[:] = F(0)
    for i in range(len(slope)):
        row = slope[i]
        for j in range(starts[i] - starts[0], starts[i + 1] - starts[0]):
            total, value = out[columns[j]], values[j]
            for o in range(len(total)):
                total[o] += value * row[o]


@numba.njit(error_model="numpy")
def lift(table, at, out):
    """Rows of a table, one after another."""
    for i in range(len(at)):
        row, to = table[at[i]], out[i * table.shape[1] : (i + 1) * table.shape[1]]
        for j in range(len(row)):
            to[j] = row[j]


@compiled(TABLE, TABLE, int64[::1], float32, float32, float32, ROW, ROW, ROW)
def touched_gates(weights, log_alpha, at, temperature, low, high, theta, value, lever):
    """See `touched.Tables.opened`."""
    wide()
    width, peak, outputs = high - low, (high - low) / temperature, weights.shape[1]
    w, phi = np.empty(BLOCK * outputs, F), np.empty(BLOCK * outputs, F)
    for begin in range(0, len(at), BLOCK):
        some = at[begin : begin + BLOCK]
        lift(weights, some, w)
        lift(log_alpha, some, phi)
        here = slice(begin * outputs, (begin + len(some)) * outputs)
        product, gate, slope = theta[here], value[here], lever[here]
        for i in range(len(product)):
            s = F(1) / (F(1) + exponential(-phi[i] / temperature))
            z = s * width + low
            clipped = min(max(z, F(0)), F(1))
            gate[i] = clipped
            product[i] = w[i] * clipped
            slope[i] = w[i] * (peak * s * (F(1) - s) if (z > F(0)) & (z < F(1)) else F(0))


@compiled(TABLE, TABLE, int64[::1], ROW, ROW, ROW, float32, float32, float32, float32, float32)
def touched_step(weights, log_alpha, at, by_weight, gradient, lever, size, offset, multiplier, rate, limit):
    """See `touched.Tables.step`."""
    wide()
    outputs = weights.shape[1]
    phi, new = np.empty(BLOCK * outputs, F), np.empty(BLOCK * outputs, F)
    for begin in range(0, len(at), BLOCK):
        some = at[begin : begin + BLOCK]
        lift(log_alpha, some, phi)
        here = slice(begin * outputs, (begin + len(some)) * outputs)
        slope, by, down = gradient[here], lever[here], by_weight[here]
        for i in range(len(slope)):
            p = F(1) / (F(1) + exponential(-(phi[i] + offset)))
            turned = phi[i] - rate * (slope[i] * by[i] + multiplier * p * (F(1) - p))
            new[i] = -limit if turned < -limit else limit if turned > limit else turned  # a broken number stays broken
        for i in range(len(some)):
            w, g = weights[some[i]], log_alpha[some[i]]
            one, two = down[i * outputs : (i + 1) * outputs], new[i * outputs : (i + 1) * outputs]
            for j in range(outputs):
                w[j] -= size * one[j]
                g[j] = two[j]


@compiled(TABLE, TABLE, ROW, float32, float32, float32, TABLE)
def drift(log_alpha, missed, multiplier, offset, rate, limit, out):
    """See `constraint.drift`."""
    wide()
    for k in range(len(log_alpha)):
        old, times, new, pull = log_alpha[k], missed[k], out[k], rate * multiplier[k]
        for i in range(len(old)):
            p = F(1) / (F(1) + exponential(-(old[i] + offset)))
            turned = old[i] - pull * times[i] * p * (F(1) - p)
            new[i] = -limit if turned < -limit else limit if turned > limit else turned  # a broken number stays broken


@compiled(TABLE, TABLE, ROW, TABLE, reassociate=True)
def binary_loss(logits, labels, loss, slope):
    """See `Linear.gradient`: the mean logistic loss of each client's cells, and its derivative in the logits."""
    for k in range(len(logits)):
        logit, y, out, total, share = logits[k], labels[k], slope[k], F(0), F(1) / F(logits.shape[1])
        for i in range(len(logit)):
            one, by = miss(logit[i], y[i], True)
            total += one
            out[i] = share * by
        loss[k] = share * total
