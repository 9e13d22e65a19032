"""Schedules over the rounds: learning rate, density of messages, scaling of log_alpha."""

from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT


class LogAlphaScaling(StrEnum):
    """Change of log_alpha at the top m weights and at the others (L155-157, decision C1)."""

    LINEAR = "linear"
    """a part r of the distance to the upper and to the lower limit; r is one over the number of scalings left in the run"""
    LITERAL = "literal"
    """(1 + r) log_alpha and (1 - r) log_alpha, the paper's formula"""
    OFF = "off"


class DensitySchedule(StrEnum):
    """How the density of messages decreases to its target."""

    CONSTANT = "constant"
    CUBIC = "cubic"


def scale_log_alpha(
    log_alpha: Float[Tensor, "*k n"],
    mask: Bool[Tensor, "*k n"] | bool,
    rate: float,
    kind: LogAlphaScaling,
    limit: float = LOG_ALPHA_LIMIT,
) -> Float[Tensor, "*k n"]:
    """log_alpha, raised if `mask` is set and lowered otherwise (L155-157). The literal form never closes an open gate (decision C1)."""
    if kind is LogAlphaScaling.OFF:
        return log_alpha
    sign = (1.0 if mask else -1.0) if isinstance(mask, bool) else torch.where(mask, log_alpha.new_tensor(1.0), log_alpha.new_tensor(-1.0))
    change = sign * log_alpha if kind is LogAlphaScaling.LITERAL else sign * min(limit, LOG_ALPHA_LIMIT) - log_alpha
    return log_alpha.add(change, alpha=rate).clamp_(-limit, limit)
