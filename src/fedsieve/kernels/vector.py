"""Kernels for long vectors: random numbers, gates, local and server steps, quantization.

They compute a formula in one pass over memory instead of several. Integers and roundings agree with the reference to the bit, gates to a
few units in the last place.
"""

from math import prod

import numba
import numpy as np
import torch
from numba import carray, float32, float64, int8, int64, uint64

from fedsieve.kernels import addresses
from fedsieve.kernels.compilation import (
    ADDRESS,
    MATRIX,
    VECTOR,
    as_matrix,
    as_vector,
    clip,
    compile_kernel,
    f32,
    fast_exp,
    fast_log,
    i32,
    pointer,
    prefer_512_bit,
    u64,
)

TINY = float(np.finfo(np.float32).tiny)


@numba.njit(error_model="numpy")
def _mix64_partial(x):
    x = (x ^ (x >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    return (x ^ (x >> u64(27))) * u64(0x94D049BB133111EB)


@compile_kernel(uint64, uint64[::1], uint64[::1], MATRIX)
def _uniforms(base_key, client_counters, counters, out):
    prefer_512_bit()
    for k in range(len(client_counters)):
        key = _mix64_partial(base_key + client_counters[k])
        key ^= key >> u64(31)
        for i in range(len(counters)):
            out[k, i] = i32((_mix64_partial(key + counters[i]) >> u64(41)) | u64(0x3F800000)).view(f32) - f32(1 - 2.0**-24)


def uniforms(base_key, client_counters, counters):
    """Kernel of `random._uniforms_at`."""
    out = np.empty((len(client_counters), len(counters)), dtype=np.float32)
    _uniforms(base_key, client_counters, counters, out)
    return out


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, float32, float32, float32, float32)
def _sample_gates(log_alpha, noise, value, derivative, size, margin, temperature, stretch_low, stretch_high):
    prefer_512_bit()
    log_alpha, noise = as_vector(log_alpha, size), as_vector(noise, size)
    value, derivative = as_vector(value, size), as_vector(derivative, size)
    width, peak, steep = stretch_high - stretch_low, (stretch_high - stretch_low) / temperature, f32(1) / temperature
    for i in range(size):
        u = min(max(noise[i], margin), f32(1) - margin)
        s = f32(1) / (f32(1) + fast_exp(-(fast_log(u / (f32(1) - u)) + log_alpha[i]) * steep))
        z = s * width + stretch_low
        value[i] = min(max(z, f32(0)), f32(1))
        derivative[i] = peak * s * (f32(1) - s) if (z > f32(0)) & (z < f32(1)) else f32(0)


def sample_gates(shape, log_alpha, noise, margin):
    """Kernel of `gates.sample`."""
    value, derivative = torch.empty_like(log_alpha), torch.empty_like(log_alpha)
    _sample_gates(*addresses(log_alpha, noise, value, derivative), log_alpha.numel(), margin, *shape)
    return value, derivative


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, float32, float32, float32)
def _median_gates(log_alpha, value, derivative, size, temperature, stretch_low, stretch_high):
    prefer_512_bit()
    log_alpha, value, derivative = as_vector(log_alpha, size), as_vector(value, size), as_vector(derivative, size)
    width, peak, steep = stretch_high - stretch_low, (stretch_high - stretch_low) / temperature, f32(1) / temperature
    for i in range(size):
        s = f32(1) / (f32(1) + fast_exp(-log_alpha[i] * steep))
        z = s * width + stretch_low
        value[i] = min(max(z, f32(0)), f32(1))
        derivative[i] = peak * s * (f32(1) - s) if (z > f32(0)) & (z < f32(1)) else f32(0)


def median_gates(shape, log_alpha):
    """Kernel of `gates.median_gates`."""
    value, derivative = torch.empty_like(log_alpha), torch.empty_like(log_alpha)
    _median_gates(*addresses(log_alpha, value, derivative), log_alpha.numel(), *shape)
    return value, derivative


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, float32, float32, float32, float32)
def _gated_magnitude(weights, log_alpha, out, size, temperature, stretch_low, stretch_high, min_gate):
    prefer_512_bit()
    weights, log_alpha, out = as_vector(weights, size), as_vector(log_alpha, size), as_vector(out, size)
    steep = f32(1) / temperature
    for i in range(size):
        z = (stretch_high - stretch_low) / (f32(1) + fast_exp(-log_alpha[i] * steep)) + stretch_low
        out[i] = abs(weights[i] * min(max(z, min_gate), f32(1)))


def gated_magnitude(shape, weights, log_alpha, _kind, min_gate):
    """Kernel of `gates.gated_magnitude`."""
    out = torch.empty_like(weights)
    _gated_magnitude(*addresses(weights, log_alpha, out), weights.numel(), *shape, min_gate)
    return out


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, float32, float64, float64, reassociate=True)
def _ascend(log_alpha, multiplier, out, size, offset, density, rate):
    prefer_512_bit()
    log_alpha, total = as_vector(log_alpha, size), float64(0)
    for i in range(size):
        total += f32(1) / (f32(1) + fast_exp(-(log_alpha[i] + offset)))
    violation = total / size - density
    as_vector(out, 1)[0] = as_vector(multiplier, 1)[0] + rate * violation if violation > 0 else f32(0)


def ascend(shape, log_alpha, multiplier, density, rate):
    """Kernel of `constraint.ascend`."""
    out = torch.empty_like(multiplier)
    _ascend(*addresses(log_alpha, multiplier, out), len(log_alpha), shape.offset, density, rate)
    return out


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, int64, int64, int64, float32)
def _penalty_gradient(log_alpha, multiplier, out, num_clients, size, num_multipliers, offset):
    prefer_512_bit()
    log_alpha, out = as_matrix(log_alpha, num_clients, size), as_matrix(out, num_clients, size)
    multiplier = as_vector(multiplier, num_multipliers)
    for k in range(num_clients):
        penalty = multiplier[min(k, num_multipliers - 1)]
        for i in range(size):
            p = f32(1) / (f32(1) + fast_exp(-(log_alpha[k, i] + offset)))
            out[k, i] = penalty * p * (f32(1) - p)


def penalty_per_gate(multiplier, constraint_scale, size):
    """Return the factor of one gate's P(z != 0) in the Lagrangian, as in `constraint.penalty_gradient`."""
    return multiplier if constraint_scale == "sum" else multiplier / size


def penalty_gradient(shape, log_alpha, multiplier, constraint_scale, size):
    """Kernel of `constraint.penalty_gradient`."""
    out, num_gates, penalty = torch.empty_like(log_alpha), log_alpha.shape[-1], penalty_per_gate(multiplier, constraint_scale, size)
    _penalty_gradient(*addresses(log_alpha, penalty, out), log_alpha.numel() // num_gates, num_gates, penalty.numel(), shape.offset)
    return out


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, int64, float32, float32, float32)
def _step_log_alpha(log_alpha, gradient, multiplier, out, num_clients, size, offset, rate, limit):
    prefer_512_bit()
    log_alpha, out = as_matrix(log_alpha, num_clients, size), as_matrix(out, num_clients, size)
    gradient = as_matrix(gradient, num_clients, size)
    for k in range(num_clients):
        penalty = as_vector(multiplier, num_clients)[k]
        for i in range(size):
            p = f32(1) / (f32(1) + fast_exp(-(log_alpha[k, i] + offset)))
            out[k, i] = clip(log_alpha[k, i] - rate * (gradient[k, i] + penalty * p * (f32(1) - p)), limit)


def step_log_alpha(shape, log_alpha, gradient, multiplier, constraint_scale, size, rate, limit):
    """Kernel of `constraint.step_log_alpha`."""
    out, penalty = torch.empty_like(log_alpha), penalty_per_gate(multiplier, constraint_scale, size)
    _step_log_alpha(*addresses(log_alpha, gradient, penalty, out), *log_alpha.shape, shape.offset, rate, limit)
    return out


@compile_kernel(*[ADDRESS] * 9, int64, int64, float32, float32, float32)
def _gated_sgd_step(
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
    prefer_512_bit()
    weights, gradient = as_matrix(weights, num_clients, size), as_matrix(gradient, num_clients, size)
    log_alpha = as_matrix(log_alpha, num_clients, size)
    value, derivative = as_matrix(value, num_clients, size), as_matrix(derivative, num_clients, size)
    new_weights, new_log_alpha = as_matrix(new_weights, num_clients, size), as_matrix(new_log_alpha, num_clients, size)
    for k in range(num_clients):
        step, penalty = as_vector(step_size, num_clients)[k], as_vector(multiplier, num_clients)[k]
        for i in range(size):
            p = f32(1) / (f32(1) + fast_exp(-(log_alpha[k, i] + offset)))
            new = log_alpha[k, i] - rate * (gradient[k, i] * weights[k, i] * derivative[k, i] + penalty * p * (f32(1) - p))
            new_log_alpha[k, i] = clip(new, limit)
            new_weights[k, i] = weights[k, i] - step * (gradient[k, i] * value[k, i])


def gated_sgd_step(shape, weights, log_alpha, gradient, gate, step_size, multiplier, constraint_scale, size, rate, limit):
    """Kernel of `constraint.gated_sgd_step`."""
    penalty = penalty_per_gate(multiplier, constraint_scale, size)
    new_weights, new_log_alpha = torch.empty_like(weights), torch.empty_like(weights)
    vectors = addresses(weights, log_alpha, gradient, *gate, step_size, penalty, new_weights, new_log_alpha)
    _gated_sgd_step(*vectors, *weights.shape, shape.offset, rate, limit)
    return new_weights, new_log_alpha


@compile_kernel(*[ADDRESS] * 7, int64, int64, float32, float32, float32, float32, reassociate=True)
def _saliency_step(
    weights, log_alpha, gradient, gate, step_size, new_weights, new_log_alpha, num_clients, size, rate, num_kept, limit, tiny
):
    prefer_512_bit()
    weights, log_alpha, gradient = (
        as_matrix(weights, num_clients, size),
        as_matrix(log_alpha, num_clients, size),
        as_matrix(gradient, num_clients, size),
    )
    gate, new_weights = as_matrix(gate, num_clients, size), as_matrix(new_weights, num_clients, size)
    new_log_alpha = as_matrix(new_log_alpha, num_clients, size)
    for k in range(num_clients):
        along, total = as_vector(step_size, num_clients)[k], f32(0)
        for i in range(size):
            saliency = weights[k, i] * gradient[k, i]
            total += saliency * saliency
        scale = rate / max(np.sqrt(total / num_kept), tiny)
        for i in range(size):
            new_log_alpha[k, i] = clip(log_alpha[k, i] - scale * (weights[k, i] * gradient[k, i]), limit)
            new_weights[k, i] = weights[k, i] - along * (gradient[k, i] * gate[k, i])


def saliency_step(weights, log_alpha, gradient, gate, step_size, gate_rate, num_kept, limit, _groups):
    """Kernel of `gates.saliency_step`."""
    new_weights, new_log_alpha = torch.empty_like(weights), torch.empty_like(weights)
    vectors = addresses(weights, log_alpha, gradient, gate, step_size, new_weights, new_log_alpha)
    _saliency_step(*vectors, *weights.shape, gate_rate, num_kept, limit, TINY)
    return new_weights, new_log_alpha


@compile_kernel(*[ADDRESS] * 6, int64)
def _chain_rule(gradient, weights, value, derivative, weight_gradient, gate_gradient, size):
    gradient, weights = as_vector(gradient, size), as_vector(weights, size)
    value, derivative = as_vector(value, size), as_vector(derivative, size)
    weight_gradient, gate_gradient = as_vector(weight_gradient, size), as_vector(gate_gradient, size)
    for i in range(size):
        weight_gradient[i] = gradient[i] * value[i]
        gate_gradient[i] = gradient[i] * weights[i] * derivative[i]


def chain_rule(gradient, weights, gate):
    """Kernel of `gates.chain_rule`."""
    weight_gradient, gate_gradient = torch.empty_like(gradient), torch.empty_like(gradient)
    _chain_rule(*addresses(gradient, weights, *gate, weight_gradient, gate_gradient), gradient.numel())
    return weight_gradient, gate_gradient


@compile_kernel(*[ADDRESS] * 7, int64, float64, float64, float64, float32, float64)
def _adam(params, gradient, first, second, new_params, new_first, new_second, size, rate, momentum, beta2, epsilon, count):
    params, gradient, first, second = as_vector(params, size), as_vector(gradient, size), as_vector(first, size), as_vector(second, size)
    new_params, new_first, new_second = as_vector(new_params, size), as_vector(new_first, size), as_vector(new_second, size)
    keep, take, keep_square, take_square = f32(momentum), f32(1 - momentum), f32(beta2), f32(1 - beta2)
    step, spread = f32(-rate / (1 - momentum**count)), f32(1 / (1 - beta2**count))
    for i in range(size):
        new_first[i] = keep * first[i] + take * gradient[i]
        new_second[i] = keep_square * second[i] + take_square * gradient[i] * gradient[i]
        new_params[i] = params[i] + step * new_first[i] / (np.sqrt(new_second[i] * spread) + epsilon)


def adam(params, gradient, first, second, count, rate, momentum, beta2, epsilon):
    """Kernel of `optimizers._adam_step`."""
    new_params, new_first, new_second = (torch.empty_like(gradient) for _ in range(3))
    vectors = addresses(params, gradient, first, second, new_params, new_first, new_second)
    _adam(*vectors, len(params), rate, momentum, beta2, epsilon, float(count))
    return new_params, new_first, new_second


@compile_kernel(ADDRESS, ADDRESS, int8[:, ::1], VECTOR, float32, float32, float32, float32, float32)
def _quantize_levels(values, noise, codes, scale, step, tiny, level_offset, min_code, max_code):
    clients, size = codes.shape
    values, noise = as_matrix(values, clients, size), as_matrix(noise, clients, size)
    for k in range(clients):
        largest = i32(0)
        for i in range(size):
            largest = max(
                largest, i32(f32(values[k, i]).view(i32) & i32(0x7FFFFFFF))
            )  # floats compare like their bits, and NaN is the largest
        width = i32(largest).view(f32) * step
        width = tiny if width < tiny else width
        scale[k] = width
        for i in range(size):
            codes[k, i] = int8(i32(min(max(np.floor(values[k, i] / width + noise[k, i] - level_offset), min_code), max_code)))


def quantize_levels(values, noise, step, level_offset, min_code, max_code):
    """Kernel of `quantization._quantize_levels`."""
    *stack, size = values.shape
    codes, scale = np.empty((prod(stack), size), dtype=np.int8), np.empty(prod(stack), dtype=np.float32)
    _quantize_levels(*addresses(values, noise), codes, scale, step, TINY, level_offset, min_code, max_code)
    return torch.from_numpy(codes.reshape(*stack, size)), torch.from_numpy(scale.reshape(stack))


@compile_kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, int64, int64, float32)
def _mean_of_levels(codes, scale, weights, out, num_clients, size, level_offset):
    codes, out = carray(pointer(codes), (num_clients, size), np.int8), as_vector(out, size)
    out[:] = f32(0)
    for k in range(num_clients):
        width, share = as_vector(scale, num_clients)[k], as_vector(weights, num_clients)[k]
        for i in range(size):
            out[i] += (f32(codes[k, i]) + level_offset) * width * share


def mean_of_levels(field, weights):
    """Kernel of `aggregation.quantized_mean`."""
    codes, size = field.codes, field.codes.shape[-1]
    out = weights.new_empty(size)
    _mean_of_levels(*addresses(codes, field.scale, weights, out), len(codes), size, field.level_offset)
    return out
