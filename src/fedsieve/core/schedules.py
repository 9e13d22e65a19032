"""Schedules over the rounds: learning rate, density of messages, scaling of log_alpha."""

from enum import StrEnum
from math import cos, pi

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT


class LogAlphaScaling(StrEnum):
    """Change of log_alpha at the top m weights and at the others (L155-157, decision C1)."""

    ADDITIVE = "additive"
    """+r and -r"""
    SIGN_AWARE = "sign-aware"
    """+r |log_alpha| and -r |log_alpha|"""
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
    if isinstance(mask, bool):
        change = rate if mask else -rate
    else:
        change = torch.where(mask, log_alpha.new_tensor(rate), log_alpha.new_tensor(-rate))
    if kind is not LogAlphaScaling.ADDITIVE:
        change = change * (log_alpha.abs() if kind is LogAlphaScaling.SIGN_AWARE else log_alpha)
    return (log_alpha + change).clamp_(-limit, limit)


def scheduled_density(target: float, initial: float, progress: float, kind: DensitySchedule) -> float:
    """The density of messages at `progress` in [0, 1]: constant, or a cubic decrease (Zhu & Gupta 2017)."""
    if kind is DensitySchedule.CONSTANT or progress >= 1:
        return target
    return target + (initial - target) * (1 - progress) ** 3


def cosine_decay(progress: float, final_fraction: float) -> float:
    """Factor of the learning rate: decreases from 1 to `final_fraction` along half a cosine as progress goes from 0 to 1."""
    return final_fraction + (1 - final_fraction) * (1 + cos(pi * min(progress, 1.0))) / 2
