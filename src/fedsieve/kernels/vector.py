"""Passes over long vectors, compiled by numba where it is installed (the extra `fast`): formulas of the core in one pass instead of many.

For single precision on a CPU; all else, and everybody without numba, takes the same formulas in torch. Integers and roundings agree to
the bit, gates to a few units in the last place. Compiled once a machine and kept beside this file, or in the user's cache.
"""

import numba
import numpy as np
from numba import boolean, carray, float32, float64, int8, int64, types, uint64, void
from numba.extending import intrinsic

F, WORD, U = np.float32, np.int32, np.uint64
LN2_HIGH, LN2_LOW = F(0.693359375), F(-2.12194440e-4)
ROW, TABLE, IMAGES = float32[::1], float32[:, ::1], float32[:, :, ::1]
AT = int64
"""Where the numbers of a tensor begin: told in a tenth of the time its NumPy view takes. How many there are is told beside."""


def compiled(*signature, reassociate=False):
    """Compile for these types now, without the checks that keep a loop from being vectorised; broken numbers stay broken.

    A long sum is vectorised only where its order may change.
    """

    def compile(function):
        options = {"error_model": "numpy", "fastmath": {"contract", "reassoc"} if reassociate else {"contract"}}
        try:
            return numba.njit(void(*signature), cache=True, **options)(function)
        except RuntimeError:  # nowhere to keep it
            return numba.njit(void(*signature), **options)(function)

    return compile


@intrinsic
def wide(_):
    """Called in a pass: use vectors as wide as the machine has, where LLVM would hold to half of them (AVX-512)."""

    def mark(context, builder, *_):
        if isinstance(attributes := builder.function.attributes, set):  # llvmlite itself adds only names without a value
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), mark


@intrinsic
def pointer(_, address):
    """An address as what `carray` takes."""

    def cast(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), cast


@numba.njit(error_model="numpy")
def row(address, size):
    """Numbers in a row."""
    return carray(pointer(address), size, F)


@numba.njit(error_model="numpy")
def table(address, rows, size):
    """Rows of numbers."""
    return carray(pointer(address), (rows, size), F)


@numba.njit(error_model="numpy")
def logarithm(x):
    """log x of a positive normal number, to 1 unit in the last place (Cephes)."""
    bits = F(x).view(WORD)
    power = WORD((bits >> WORD(23)) - WORD(126))
    part = WORD((bits & WORD(0x007FFFFF)) | WORD(0x3F000000)).view(F)
    small = part < F(0.70710678)
    exponent = F(power) - (F(1) if small else F(0))
    part = (part + part if small else part) - F(1)
    square = part * part
    y = F(7.0376836292e-2) * part + F(-1.1514610310e-1)
    y = y * part + F(1.1676998740e-1)
    y = y * part + F(-1.2420140846e-1)
    y = y * part + F(1.4249322787e-1)
    y = y * part + F(-1.6668057665e-1)
    y = y * part + F(2.0000714765e-1)
    y = y * part + F(-2.4999993993e-1)
    y = y * part + F(3.3333331174e-1)
    y = y * part * square + exponent * LN2_LOW - F(0.5) * square
    return part + y + exponent * LN2_HIGH


@numba.njit(error_model="numpy")
def exponential(x):
    """exp x, to 1 unit in the last place where it is a normal number (Cephes)."""
    x = min(max(x, F(-87.0)), F(88.0))
    power = np.floor(x * F(1.44269504088896341) + F(0.5))
    x = x - power * LN2_HIGH - power * LN2_LOW
    y = F(1.9875691500e-4) * x + F(1.3981999507e-3)
    y = y * x + F(8.3334519073e-3)
    y = y * x + F(4.1665795894e-2)
    y = y * x + F(1.6666665459e-1)
    y = y * x + F(5.0000001201e-1)
    return (y * x * x + x + F(1)) * WORD((WORD(power) + WORD(127)) << WORD(23)).view(F)


@numba.njit(error_model="numpy")
def scramble(x):
    """See `streams.scramble`."""
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    return (x ^ (x >> U(27))) * U(0x94D049BB133111EB)


@compiled(uint64, uint64[::1], uint64[::1], TABLE)
def uniforms(base, clients, counters, out):
    """See `streams.uniforms`."""
    wide()
    for k in range(len(clients)):
        key = scramble(base + clients[k])
        key ^= key >> U(31)
        for i in range(len(counters)):
            out[k, i] = WORD((scramble(key + counters[i]) >> U(41)) | U(0x3F800000)).view(F) - F(1 - 2.0**-24)


@compiled(AT, AT, AT, AT, int64, float32, float32, float32, float32)
def sampled_gates(log_alpha, noise, value, slope, size, margin, temperature, low, high):
    """See `gates.sample`."""
    wide()
    log_alpha, noise, value, slope = row(log_alpha, size), row(noise, size), row(value, size), row(slope, size)
    width, peak, steep = high - low, (high - low) / temperature, F(1) / temperature
    for i in range(size):
        u = min(max(noise[i], margin), F(1) - margin)
        s = F(1) / (F(1) + exponential(-(logarithm(u / (F(1) - u)) + log_alpha[i]) * steep))
        z = s * width + low
        value[i] = min(max(z, F(0)), F(1))
        slope[i] = peak * s * (F(1) - s) if (z > F(0)) & (z < F(1)) else F(0)


@compiled(AT, AT, AT, int64, float32, float32, float32)
def median_gates(log_alpha, value, slope, size, temperature, low, high):
    """See `gates.deterministic`."""
    wide()
    log_alpha, value, slope = row(log_alpha, size), row(value, size), row(slope, size)
    width, peak, steep = high - low, (high - low) / temperature, F(1) / temperature
    for i in range(size):
        s = F(1) / (F(1) + exponential(-log_alpha[i] * steep))
        z = s * width + low
        value[i] = min(max(z, F(0)), F(1))
        slope[i] = peak * s * (F(1) - s) if (z > F(0)) & (z < F(1)) else F(0)


@compiled(AT, AT, AT, int64, float32, float32, float32, float32)
def magnitudes(weights, log_alpha, out, size, temperature, low, high, least):
    """See `gates.magnitude`."""
    wide()
    weights, log_alpha, out = row(weights, size), row(log_alpha, size), row(out, size)
    steep = F(1) / temperature
    for i in range(size):
        z = (high - low) / (F(1) + exponential(-log_alpha[i] * steep)) + low
        out[i] = abs(weights[i] * min(max(z, least), F(1)))


@compiled(AT, AT, AT, int64, float32, float64, float64, reassociate=True)
def dual_step(log_alpha, multiplier, out, size, offset, density, rate):
    """See `constraint.dual_step`."""
    wide()
    log_alpha, total = row(log_alpha, size), float64(0)
    for i in range(size):
        total += F(1) / (F(1) + exponential(-(log_alpha[i] + offset)))
    violation = total / size - density
    row(out, 1)[0] = row(multiplier, 1)[0] + rate * violation if violation > 0 else F(0)


@compiled(AT, AT, AT, int64, int64, int64, float32)
def constraint_slope(log_alpha, multiplier, out, clients, size, multipliers, offset):
    """See `constraint.slope`; one multiplier, or one a client."""
    wide()
    log_alpha, multiplier, out = table(log_alpha, clients, size), row(multiplier, multipliers), table(out, clients, size)
    for k in range(clients):
        pull = multiplier[min(k, multipliers - 1)]
        for i in range(size):
            p = F(1) / (F(1) + exponential(-(log_alpha[k, i] + offset)))
            out[k, i] = pull * p * (F(1) - p)


@compiled(AT, AT, AT, AT, int64, int64, float32, float32, float32)
def gate_step(log_alpha, gradient, multiplier, out, clients, size, offset, rate, limit):
    """See `constraint.descend`."""
    wide()
    log_alpha, gradient, out = table(log_alpha, clients, size), table(gradient, clients, size), table(out, clients, size)
    for k in range(clients):
        pull = row(multiplier, clients)[k]
        for i in range(size):
            p = F(1) / (F(1) + exponential(-(log_alpha[k, i] + offset)))
            turned = log_alpha[k, i] - rate * (gradient[k, i] + pull * p * (F(1) - p))
            out[k, i] = -limit if turned < -limit else limit if turned > limit else turned  # a broken number stays broken


@compiled(AT, AT, AT, AT, AT, AT, AT, AT, AT, int64, int64, float32, float32, float32)
def joint_step(weights, log_alpha, gradient, value, slope, step, multiplier, moved, turned, clients, size, offset, rate, limit):
    """See `constraint.joint_step`."""
    wide()
    weights, log_alpha, gradient = table(weights, clients, size), table(log_alpha, clients, size), table(gradient, clients, size)
    value, slope = table(value, clients, size), table(slope, clients, size)
    moved, turned = table(moved, clients, size), table(turned, clients, size)
    for k in range(clients):
        along, pull = row(step, clients)[k], row(multiplier, clients)[k]
        for i in range(size):
            p = F(1) / (F(1) + exponential(-(log_alpha[k, i] + offset)))
            new = log_alpha[k, i] - rate * (gradient[k, i] * weights[k, i] * slope[k, i] + pull * p * (F(1) - p))
            turned[k, i] = -limit if new < -limit else limit if new > limit else new  # a broken number stays broken
            moved[k, i] = weights[k, i] - along * (gradient[k, i] * value[k, i])


@compiled(AT, AT, AT, AT, AT, AT, int64)
def chain(gradient, weights, value, slope, by_weight, by_gate, size):
    """See `gates.chain`."""
    gradient, weights, value, slope = row(gradient, size), row(weights, size), row(value, size), row(slope, size)
    by_weight, by_gate = row(by_weight, size), row(by_gate, size)
    for i in range(size):
        by_weight[i] = gradient[i] * value[i]
        by_gate[i] = gradient[i] * weights[i] * slope[i]


@compiled(AT, AT, AT, AT, AT, AT, AT, int64, float64, float64, float64, float32, float64)
def adam(place, gradient, first, second, moved, new_first, new_second, size, rate, momentum, square, epsilon, count):
    """See `optimizers.step`."""
    place, gradient, first, second = row(place, size), row(gradient, size), row(first, size), row(second, size)
    moved, new_first, new_second = row(moved, size), row(new_first, size), row(new_second, size)
    keep, take, keep_square, take_square = F(momentum), F(1 - momentum), F(square), F(1 - square)
    step, spread = F(-rate / (1 - momentum**count)), F(1 / (1 - square**count))
    for i in range(size):
        new_first[i] = keep * first[i] + take * gradient[i]
        new_second[i] = keep_square * second[i] + take_square * gradient[i] * gradient[i]
        moved[i] = place[i] + step * new_first[i] / (np.sqrt(new_second[i] * spread) + epsilon)


@numba.njit(error_model="numpy")
def softmax_miss(logits, label, slope):
    """The cross-entropy of one row, and its derivative in the logits."""
    largest = logits[0]
    for c in range(1, len(logits)):
        largest = max(largest, logits[c])
    right, total = logits[label], F(0)
    for c in range(len(logits)):
        slope[c] = exponential(logits[c] - largest)
        total += slope[c]
    for c in range(len(logits)):
        slope[c] /= total
    slope[label] -= F(1)
    return logarithm(total) + largest - right


@compiled(IMAGES, int64[:, ::1], float32[::1], IMAGES)
def softmax_loss(logits, labels, loss, slope):
    """See `Linear.gradient`: the mean cross-entropy of each client's rows, and its derivative in the logits (client, class, row)."""
    clients, _, rows = logits.shape
    share = F(1) / F(rows)
    for k in range(clients):
        loss[k] = F(0)
        for i in range(rows):
            loss[k] += share * softmax_miss(logits[k, :, i], labels[k, i], slope[k, :, i])
            slope[k, :, i] *= share


@numba.njit(error_model="numpy")
def miss(logit, y, logistic):
    """The loss of one row, squared or logistic, and its derivative in the logit."""
    if logistic:
        fall = exponential(-abs(logit))
        return max(logit, F(0)) + logarithm(F(1) + fall) - y * logit, (F(1) if logit > F(0) else fall) / (F(1) + fall) - y
    return (logit - y) * (logit - y), F(2) * (logit - y)


@compiled(AT, AT, AT, AT, AT, AT, types.UniTuple(int64, 2), types.UniTuple(int64, 2), int64, int64, boolean, reassociate=True)
def row_gradient(rows, places, theta, y, loss, out, whole, stack, size, outputs, logistic):
    """See `PickedRows.gradient`; four rows at a time there and back, while they are in the fastest memory."""
    wide()
    (clients, batch), features, gated = stack, whole[1], outputs * whole[1]
    rows, places, y = table(rows, *whole), carray(pointer(places), stack, np.int64), table(y, *stack)
    theta, loss, out = table(theta, clients, size), row(loss, clients), table(out, clients, size)
    last, share, by = batch - 1, F(1) / F(batch), np.empty((4, outputs), F)
    for k in range(clients):
        weights, intercept = theta[k, :gated].reshape(outputs, features), theta[k, gated:]
        slope, slope_at_zero = out[k, :gated].reshape(outputs, features), out[k, gated:]
        at, loss[k], out[k] = places[k], F(0), F(0)
        for i in range(0, batch, 4):
            a, b, c, d = rows[at[i]], rows[at[min(i + 1, last)]], rows[at[min(i + 2, last)]], rows[at[min(i + 3, last)]]
            for o in range(outputs):
                vector = weights[o]
                p = q = r = s = intercept[o] if len(intercept) else F(0)
                for j in range(features):
                    p += a[j] * vector[j]
                    q += b[j] * vector[j]
                    r += c[j] * vector[j]
                    s += d[j] * vector[j]
                by[0, o], by[1, o], by[2, o], by[3, o] = p, q, r, s
            for n in range(4):
                if i + n >= batch:
                    by[n] = F(0)
                elif outputs > 1:
                    loss[k] += share * softmax_miss(by[n], int64(y[k, i + n]), by[n])
                else:
                    one, by[n, 0] = miss(by[n, 0], y[k, i + n], logistic)
                    loss[k] += share * one
            for o in range(outputs):
                p, q, r, s, total = share * by[0, o], share * by[1, o], share * by[2, o], share * by[3, o], slope[o]
                if len(intercept):
                    slope_at_zero[o] += p + q + r + s
                for j in range(features):
                    total[j] += p * a[j] + q * b[j] + r * c[j] + s * d[j]


@compiled(AT, AT, int8[:, ::1], ROW, float32, float32, float32, float32, float32)
def levels(values, noise, codes, scale, step, tiny, half, lowest, highest):
    """See `packets.round_values`."""
    clients, size = codes.shape
    values, noise = table(values, clients, size), table(noise, clients, size)
    for k in range(clients):
        largest = WORD(0)
        for i in range(size):
            largest = max(largest, WORD(F(values[k, i]).view(WORD) & WORD(0x7FFFFFFF)))  # in order as integers, and nan above all
        width = WORD(largest).view(F) * step
        width = tiny if width < tiny else width
        scale[k] = width
        for i in range(size):
            codes[k, i] = int8(WORD(min(max(np.floor(values[k, i] / width + noise[k, i] - half), lowest), highest)))


@compiled(AT, AT, AT, AT, int64, int64, float32)
def level_mean(codes, scale, weights, out, clients, size, half):
    """See `aggregation.dense_mean`."""
    codes, out = carray(pointer(codes), (clients, size), np.int8), row(out, size)
    out[:] = F(0)
    for k in range(clients):
        width, share = row(scale, clients)[k], row(weights, clients)[k]
        for i in range(size):
            out[i] += (F(codes[k, i]) + half) * width * share
