"""Optimizer steps as pure functions (SGD, momentum, Adam), gradient clipping and the rules for a client's step size."""

from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.kernels import accelerated


class Optimizer(StrEnum):
    """How the server applies an aggregated gradient or pseudo-gradient."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


class Moments(NamedTuple):
    """State of momentum and Adam: moving averages and the number of steps."""

    first: Tensor
    second: Tensor
    count: Tensor


class StepRule(StrEnum):
    """A client's step size, from the learning rate and the gradient g of its batch loss."""

    CONSTANT = "constant"
    """learning rate"""
    CAPPED = "capped"
    """min(learning rate, 1/L) with the smoothness L of the client's loss (linear models)"""
    POLYAK = "polyak"
    """learning rate * loss / |g|^2, at most 1/L if a client has more examples than features: invariant to the scale of data and model"""


def initial_moments(like: Float[Tensor, " n"]) -> Moments:
    """State before the first step."""
    return Moments(torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like[0]))


def step(
    optimizer: Optimizer,
    moments: Moments,
    params: Float[Tensor, " n"],
    gradient: Float[Tensor, " n"],
    rate: float,
    *,
    momentum: float,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> tuple[Float[Tensor, " n"], Moments]:
    """The parameters after one step, and the new state."""
    if optimizer is Optimizer.SGD:
        return params + -rate * gradient, moments
    if optimizer is Optimizer.MOMENTUM:
        first = momentum * moments.first + gradient
        return params + -rate * first, moments._replace(first=first)
    count = moments.count + 1
    new_params, first, second = _adam_step(params, gradient, moments.first, moments.second, count, rate, momentum, beta2, epsilon)
    return new_params, Moments(first, second, count)


@accelerated("vector", "adam", tensors=("params", "gradient", "first", "second"))
def _adam_step(
    params: Float[Tensor, " n"],
    gradient: Float[Tensor, " n"],
    first: Float[Tensor, " n"],
    second: Float[Tensor, " n"],
    count: Float[Tensor, ""],
    rate: float,
    momentum: float,
    beta2: float,
    epsilon: float,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The parameters and the two moments after step number `count` of Adam."""
    first = torch.lerp(gradient, first, momentum)
    second = torch.addcmul(beta2 * second, gradient, gradient, value=1 - beta2)
    denominator = (second / (1 - beta2**count)).sqrt_().add_(epsilon)
    return params + first * (-rate / (1 - momentum**count)) / denominator, first, second


def clip_norm(gradient: Float[Tensor, "*k n"], max_norm: float) -> Float[Tensor, "*k n"]:
    """The gradient, scaled down to `max_norm` if its norm is larger."""
    if max_norm == inf:
        return gradient
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient * (max_norm / norm.clamp_min(torch.finfo(gradient.dtype).tiny)).clamp_max(1.0)


def step_size(
    rule: StepRule,
    rate: float,
    loss: Float[Tensor, " k"],
    gradient: Float[Tensor, "k n"],
    smoothness: Float[Tensor, " k"] | None,
    gate: Float[Tensor, "k n"] | None = None,
) -> Float[Tensor, "k 1"]:
    """The step size of each client of a stack, for a step along the gradient or its product with the gates."""
    if rule is StepRule.POLYAK:
        gradient = gradient if gate is None else gradient * gate
        square = (gradient * gradient).sum(-1, keepdim=True)
        smallest = torch.finfo(gradient.dtype).tiny
        step = rate * loss[..., None] / square.clamp_min(smallest)
        return step if smoothness is None else step.minimum(1 / smoothness[..., None].clamp_min(smallest))
    if rule is StepRule.CAPPED:
        assert smoothness is not None, "the engine computes the smoothness for algorithms with the step rule capped"
        return torch.clamp_max(1 / smoothness[..., None], rate)
    return _constant_step(len(loss), rate, loss.dtype, loss.device)


@lru_cache(maxsize=16)
def _constant_step(num_clients: int, rate: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "k 1"]:
    """One step size for all clients; cached, because it is the same in every step of a round."""
    return torch.full((num_clients, 1), rate, dtype=dtype, device=device)


def sgd_from_support(
    params: Float[Tensor, " n"], mean: Float[Tensor, " n"], support: Int64[Tensor, " m"], rate: float, residual_decay: float
) -> Float[Tensor, " n"]:
    """An SGD step towards the mean from parameters on a support, plus a fraction of those off it: no dense difference is formed."""
    sent = params[support]
    stepped = sent - rate * (sent - mean[support])
    off_support = mean if rate == 1 else rate * mean
    return torch.add(off_support, params, alpha=residual_decay).scatter_(0, support, stepped)
