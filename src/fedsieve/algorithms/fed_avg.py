"""FedAvg (McMahan et al. 2017), dense both ways, magnitude-pruned at the end. To add an algorithm, copy this file."""

from dataclasses import dataclass
from typing import ClassVar

from fedsieve.algorithms.averaging import Averaging
from fedsieve.algorithms.base import DENSITY_SCHEDULE_OPTIONS


@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging):
    """Dense messages, local SGD, plain averaging; only the model handed out is cut to m weights (requirement 38).

    A new method overrides what it does differently: `broadcast`, `project`, `client_reply`, `aggregate` or `close`.
    """

    unsupported_options: ClassVar[frozenset[str]] = DENSITY_SCHEDULE_OPTIONS

    residual_decay: float = 1.0
    """how much of what rounding took from a broadcast stays at the server for the next round"""
