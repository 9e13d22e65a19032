"""Passes over long vectors, compiled by numba where it is installed (the extra `fast`): formulas of the core in one pass instead of many.

For single precision on a CPU; all else, and everybody without numba, takes the same formulas in torch. Integers and roundings agree to
the bit, gates to a few units in the last place. Compiled once a machine and kept beside this file, or in the user's cache.
"""

import numba
import numpy as np
from numba import boolean, carray, float32, float64, int8, int64, types, uint64, void
from numba.extending import intrinsic

f32, i32, u64 = np.float32, np.int32, np.uint64
LN2_HIGH, LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
VECTOR, MATRIX, ARRAY_3D = float32[::1], float32[:, ::1], float32[:, :, ::1]
ADDRESS = int64
"""Where the numbers of a tensor begin: told in a tenth of the time its NumPy view takes. How many there are is told beside."""


def compile_kernel(*signature, reassociate=False):
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
def prefer_512_bit(_):
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
def as_vector(address, size):
    """Numbers in a row."""
    return carray(pointer(address), size, f32)


@numba.njit(error_model="numpy")
def as_matrix(address, num_rows, size):
    """Rows of numbers."""
    return carray(pointer(address), (num_rows, size), f32)


@numba.njit(error_model="numpy")
def fast_log(x):
    """log x of a positive normal number, to 1 unit in the last place (Cephes)."""
    bits = f32(x).view(i32)
    power = i32((bits >> i32(23)) - i32(126))
    part = i32((bits & i32(0x007FFFFF)) | i32(0x3F000000)).view(f32)
    small = part < f32(0.70710678)
    exponent = f32(power) - (f32(1) if small else f32(0))
    part = (part + part if small else part) - f32(1)
    square = part * part
    y = f32(7.0376836292e-2) * part + f32(-1.1514610310e-1)
    y = y * part + f32(1.1676998740e-1)
    y = y * part + f32(-1.2420140846e-1)
    y = y * part + f32(1.4249322787e-1)
    y = y * part + f32(-1.6668057665e-1)
    y = y * part + f32(2.0000714765e-1)
    y = y * part + f32(-2.4999993993e-1)
    y = y * part + f32(3.3333331174e-1)
    y = y * part * square + exponent * LN2_LOW - f32(0.5) * square
    return part + y + exponent * LN2_HIGH


@numba.njit(error_model="numpy")
def fast_exp(x):
    """exp x, to 1 unit in the last place where it is a normal number (Cephes)."""
    x = min(max(x, f32(-87.0)), f32(88.0))
    power = np.floor(x * f32(1.44269504088896341) + f32(0.5))
    x = x - power * LN2_HIGH - power * LN2_LOW
    y = f32(1.9875691500e-4) * x + f32(1.3981999507e-3)
    y = y * x + f32(8.3334519073e-3)
    y = y * x + f32(4.1665795894e-2)
    y = y * x + f32(1.6666665459e-1)
    y = y * x + f32(5.0000001201e-1)
    return (y * x * x + x + f32(1)) * i32((i32(power) + i32(127)) << i32(23)).view(f32)


@numba.njit(error_model="numpy")
def mix64_partial(x):
    """See `streams.scramble`."""
    x = (x ^ (x >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    return (x ^ (x >> u64(27))) * u64(0x94D049BB133111EB)


@compile_kernel(uint64, uint64[::1], uint64[::1], MATRIX)
def uniforms(base_key, client_counters, counters, out):
    """See `streams.uniforms`."""
    prefer_512_bit()
    for k in range(len(client_counters)):
        key = mix64_partial(base_key + client_counters[k])
        key ^= key >> u64(31)
        for i in range(len(counters)):
            out[k, i] = i32((mix64_partial(key + counters[i]) >> u64(41)) | u64(0x3F800000)).view(f32) - f32(1 - 2.0**-24)


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, float32, float32, float32, float32)
def sampled_gates(log_alpha, noise, value, derivative, size, margin, temperature, stretch_low, stretch_high):
    """See `gates.sample`."""
    prefer_512_bit()
    log_alpha, noise, value, derivative = (
        as_vector(log_alpha, size),
        as_vector(noise, size),
        as_vector(value, size),
        as_vector(derivative, size),
    )
    width, peak, steep = stretch_high - stretch_low, (stretch_high - stretch_low) / temperature, f32(1) / temperature
    for i in range(size):
        u = min(max(noise[i], margin), f32(1) - margin)
        s = f32(1) / (f32(1) + fast_exp(-(fast_log(u / (f32(1) - u)) + log_alpha[i]) * steep))
        z = s * width + stretch_low
        value[i] = min(max(z, f32(0)), f32(1))
        derivative[i] = peak * s * (f32(1) - s) if (z > f32(0)) & (z < f32(1)) else f32(0)


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, float32, float32, float32)
def median_gates(log_alpha, value, derivative, size, temperature, stretch_low, stretch_high):
    """See `gates.deterministic`."""
    prefer_512_bit()
    log_alpha, value, derivative = as_vector(log_alpha, size), as_vector(value, size), as_vector(derivative, size)
    width, peak, steep = stretch_high - stretch_low, (stretch_high - stretch_low) / temperature, f32(1) / temperature
    for i in range(size):
        s = f32(1) / (f32(1) + fast_exp(-log_alpha[i] * steep))
        z = s * width + stretch_low
        value[i] = min(max(z, f32(0)), f32(1))
        derivative[i] = peak * s * (f32(1) - s) if (z > f32(0)) & (z < f32(1)) else f32(0)


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, float32, float32, float32, float32)
def gated_magnitude(weights, log_alpha, out, size, temperature, stretch_low, stretch_high, min_gate):
    """See `gates.magnitude`."""
    prefer_512_bit()
    weights, log_alpha, out = as_vector(weights, size), as_vector(log_alpha, size), as_vector(out, size)
    steep = f32(1) / temperature
    for i in range(size):
        z = (stretch_high - stretch_low) / (f32(1) + fast_exp(-log_alpha[i] * steep)) + stretch_low
        out[i] = abs(weights[i] * min(max(z, min_gate), f32(1)))


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, float32, float64, float64, reassociate=True)
def ascend_on_gap(log_alpha, multiplier, out, size, offset, density, rate):
    """See `constraint.dual_step`."""
    prefer_512_bit()
    log_alpha, total = as_vector(log_alpha, size), float64(0)
    for i in range(size):
        total += f32(1) / (f32(1) + fast_exp(-(log_alpha[i] + offset)))
    violation = total / size - density
    as_vector(out, 1)[0] = as_vector(multiplier, 1)[0] + rate * violation if violation > 0 else f32(0)


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, int64, int64, float32)
def penalty_gradient(log_alpha, multiplier, out, num_clients, size, num_multipliers, offset):
    """See `constraint.slope`; one multiplier, or one a client."""
    prefer_512_bit()
    log_alpha, multiplier, out = (
        as_matrix(log_alpha, num_clients, size),
        as_vector(multiplier, num_multipliers),
        as_matrix(out, num_clients, size),
    )
    for k in range(num_clients):
        pull = multiplier[min(k, num_multipliers - 1)]
        for i in range(size):
            p = f32(1) / (f32(1) + fast_exp(-(log_alpha[k, i] + offset)))
            out[k, i] = pull * p * (f32(1) - p)


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, int64, float32, float32, float32)
def step_log_alpha(log_alpha, gradient, multiplier, out, num_clients, size, offset, rate, limit):
    """See `constraint.descend`."""
    prefer_512_bit()
    log_alpha, gradient, out = (
        as_matrix(log_alpha, num_clients, size),
        as_matrix(gradient, num_clients, size),
        as_matrix(out, num_clients, size),
    )
    for k in range(num_clients):
        pull = as_vector(multiplier, num_clients)[k]
        for i in range(size):
            p = f32(1) / (f32(1) + fast_exp(-(log_alpha[k, i] + offset)))
            turned = log_alpha[k, i] - rate * (gradient[k, i] + pull * p * (f32(1) - p))
            out[k, i] = -limit if turned < -limit else limit if turned > limit else turned  # a broken number stays broken


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, int64, float32, float32, float32)
def gated_sgd_step(
    weights,
    log_alpha,
    gradient,
    value,
    derivative,
    step_size,
    multiplier,
    new_weights,
    new_log_alpha,
    num_clients,
    size,
    offset,
    rate,
    limit,
):
    """See `constraint.joint_step`."""
    prefer_512_bit()
    weights, log_alpha, gradient = (
        as_matrix(weights, num_clients, size),
        as_matrix(log_alpha, num_clients, size),
        as_matrix(gradient, num_clients, size),
    )
    value, derivative = as_matrix(value, num_clients, size), as_matrix(derivative, num_clients, size)
    new_weights, new_log_alpha = as_matrix(new_weights, num_clients, size), as_matrix(new_log_alpha, num_clients, size)
    for k in range(num_clients):
        along, pull = as_vector(step_size, num_clients)[k], as_vector(multiplier, num_clients)[k]
        for i in range(size):
            p = f32(1) / (f32(1) + fast_exp(-(log_alpha[k, i] + offset)))
            new = log_alpha[k, i] - rate * (gradient[k, i] * weights[k, i] * derivative[k, i] + pull * p * (f32(1) - p))
            new_log_alpha[k, i] = -limit if new < -limit else limit if new > limit else new  # a broken number stays broken
            new_weights[k, i] = weights[k, i] - along * (gradient[k, i] * value[k, i])


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64)
def chain_rule(gradient, weights, value, derivative, weight_gradient, gate_gradient, size):
    """See `gates.chain`."""
    gradient, weights, value, derivative = (
        as_vector(gradient, size),
        as_vector(weights, size),
        as_vector(value, size),
        as_vector(derivative, size),
    )
    weight_gradient, gate_gradient = as_vector(weight_gradient, size), as_vector(gate_gradient, size)
    for i in range(size):
        weight_gradient[i] = gradient[i] * value[i]
        gate_gradient[i] = gradient[i] * weights[i] * derivative[i]


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, float64, float64, float64, float32, float64)
def adam(params, gradient, first, second, new_params, new_first, new_second, size, rate, momentum, beta2, epsilon, count):
    """See `optimizers.step`."""
    params, gradient, first, second = as_vector(params, size), as_vector(gradient, size), as_vector(first, size), as_vector(second, size)
    new_params, new_first, new_second = as_vector(new_params, size), as_vector(new_first, size), as_vector(new_second, size)
    keep, take, keep_square, take_square = f32(momentum), f32(1 - momentum), f32(beta2), f32(1 - beta2)
    step, spread = f32(-rate / (1 - momentum**count)), f32(1 / (1 - beta2**count))
    for i in range(size):
        new_first[i] = keep * first[i] + take * gradient[i]
        new_second[i] = keep_square * second[i] + take_square * gradient[i] * gradient[i]
        new_params[i] = params[i] + step * new_first[i] / (np.sqrt(new_second[i] * spread) + epsilon)


@numba.njit(error_model="numpy")
def softmax_loss_and_slope(logits, label, slope):
    """The cross-entropy of one row, and its derivative in the logits."""
    largest = logits[0]
    for c in range(1, len(logits)):
        largest = max(largest, logits[c])
    right, total = logits[label], f32(0)
    for c in range(len(logits)):
        slope[c] = fast_exp(logits[c] - largest)
        total += slope[c]
    for c in range(len(logits)):
        slope[c] /= total
    slope[label] -= f32(1)
    return fast_log(total) + largest - right


@compile_kernel(ARRAY_3D, int64[:, ::1], float32[::1], ARRAY_3D)
def softmax_loss(logits, labels, loss, slope):
    """See `Linear.gradient`: the mean cross-entropy of each client's rows, and its derivative in the logits (client, class, row)."""
    clients, _, rows = logits.shape
    share = f32(1) / f32(rows)
    for k in range(clients):
        loss[k] = f32(0)
        for i in range(rows):
            loss[k] += share * softmax_loss_and_slope(logits[k, :, i], labels[k, i], slope[k, :, i])
            slope[k, :, i] *= share


@numba.njit(error_model="numpy")
def loss_and_slope(logit, y, is_logistic):
    """The loss of one row, squared or logistic, and its derivative in the logit."""
    if is_logistic:
        fall = fast_exp(-abs(logit))
        return max(logit, f32(0)) + fast_log(f32(1) + fall) - y * logit, (f32(1) if logit > f32(0) else fall) / (f32(1) + fall) - y
    return (logit - y) * (logit - y), f32(2) * (logit - y)


@compile_kernel(
    ADDRESS,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    types.UniTuple(int64, 2),
    types.UniTuple(int64, 2),
    int64,
    int64,
    boolean,
    reassociate=True,
)
def indexed_rows_gradient(rows, indices, theta, y, loss, out, rows_shape, batch_shape, size, num_outputs, is_logistic):
    """See `PickedRows.gradient`; four rows at a time there and back, while they are in the fastest memory."""
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


@compile_kernel(ADDRESS, ADDRESS, int8[:, ::1], VECTOR, float32, float32, float32, float32, float32)
def quantize_levels(values, noise, codes, scale, step, tiny, level_offset, min_code, max_code):
    """See `packets.round_values`."""
    clients, size = codes.shape
    values, noise = as_matrix(values, clients, size), as_matrix(noise, clients, size)
    for k in range(clients):
        largest = i32(0)
        for i in range(size):
            largest = max(largest, i32(f32(values[k, i]).view(i32) & i32(0x7FFFFFFF)))  # in order as integers, and nan above all
        width = i32(largest).view(f32) * step
        width = tiny if width < tiny else width
        scale[k] = width
        for i in range(size):
            codes[k, i] = int8(i32(min(max(np.floor(values[k, i] / width + noise[k, i] - level_offset), min_code), max_code)))


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, int64, float32)
def mean_of_levels(codes, scale, weights, out, num_clients, size, level_offset):
    """See `aggregation.dense_mean`."""
    codes, out = carray(pointer(codes), (num_clients, size), np.int8), as_vector(out, size)
    out[:] = f32(0)
    for k in range(num_clients):
        width, share = as_vector(scale, num_clients)[k], as_vector(weights, num_clients)[k]
        for i in range(size):
            out[i] += (f32(codes[k, i]) + level_offset) * width * share
