"""The control: a random support, fixed at the start, trained under the mask."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.averaging import Server
from fedsieve.algorithms.base import DENSITY_SCHEDULE_OPTIONS
from fedsieve.algorithms.fed_ht import Thresholding
from fedsieve.algorithms.gradual import Masked
from fedsieve.core import budgets, topk
from fedsieve.core.random import Draw
from fedsieve.core.types import Layout


@dataclass(frozen=True, kw_only=True)
class RandomMask(Masked, Thresholding):
    """m weights drawn at random; nothing about the data decides which."""

    unsupported_options: ClassVar[frozenset[str]] = DENSITY_SCHEDULE_OPTIONS  # one mask for good, or weights outside it would be sent

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """The start, zero outside a random mask."""
        chance = budgets.broadcast_within_groups(draw("mask", layout.size), layout.groups)
        kept = topk.top_mask(chance, self.final_budget(layout), layout.groups)
        return super().init(layout, torch.where(kept, weights, torch.zeros_like(weights)), draw)
