"""Steps as pure functions of a state: SGD, momentum, Adam; clipping; and three rules for a client's step size."""

from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.kernels import addresses, for_tensors


class Optimizer(StrEnum):
    """How the server turns an aggregated gradient (or pseudo-gradient) into a step."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


class Moments(NamedTuple):
    """What momentum and Adam remember."""

    first: Tensor
    second: Tensor
    count: Tensor


class StepRule(StrEnum):
    """A client's step size, given the method's `rate` and the gradient g of its batch loss."""

    CONSTANT = "constant"
    """rate"""
    CAPPED = "capped"
    """min(rate, 1/L), L the client's own smoothness (linear models)"""
    POLYAK = "polyak"
    """rate * loss / |g|^2: no scale of data or model enters"""


def initial_moments(like: Float[Tensor, " n"]) -> Moments:
    """The state before the first step."""
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
    """Where a step from a place leads, and the new state."""
    if optimizer is Optimizer.SGD:
        return params + -rate * gradient, moments
    if optimizer is Optimizer.MOMENTUM:
        first = momentum * moments.first + gradient
        return params + -rate * first, moments._replace(first=first)
    count = moments.count + 1
    if fast := for_tensors(params, gradient, moments.first, moments.second):
        moved, first, second = (torch.empty_like(gradient) for _ in range(3))
        vectors = addresses(params, gradient, moments.first, moments.second, moved, first, second)
        fast.adam(*vectors, len(params), rate, momentum, beta2, epsilon, float(count))
        return moved, Moments(first, second, count)
    first = torch.lerp(gradient, moments.first, momentum)
    second = torch.addcmul(beta2 * moments.second, gradient, gradient, value=1 - beta2)
    spread = (second / (1 - beta2**count)).sqrt_().add_(epsilon)
    return params + first * (-rate / (1 - momentum**count)) / spread, Moments(first, second, count)


def clip_norm(gradient: Float[Tensor, "*k n"], max_norm: float) -> Float[Tensor, "*k n"]:
    """The gradient, shortened to norm `limit` where it is longer."""
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
    """The step of each client of a stack under the rule, along the gradient, or its product with gates."""
    if rule is StepRule.POLYAK:
        gradient = gradient if gate is None else gradient * gate
        square = (gradient * gradient).sum(-1, keepdim=True)
        return rate * loss[..., None] / square.clamp_min(torch.finfo(gradient.dtype).tiny)
    if rule is StepRule.CAPPED:
        assert smoothness is not None, "the engine gives smoothness to methods that cap their step"
        return torch.clamp_max(1 / smoothness[..., None], rate)
    return _constant_step(len(loss), rate, loss.dtype, loss.device)


@lru_cache(maxsize=16)
def _constant_step(num_clients: int, rate: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "k 1"]:
    """One step size for all: the same in every step of a round."""
    return torch.full((num_clients, 1), rate, dtype=dtype, device=device)
