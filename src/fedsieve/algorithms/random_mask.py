"""The control: a random support, fixed at the start, trained under the mask."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.averaging import Server
from fedsieve.algorithms.fed_ht import Thresholding
from fedsieve.algorithms.gradual import Masked
from fedsieve.core import selection
from fedsieve.core.streams import Draw
from fedsieve.core.types import Clock, Layout


@dataclass(frozen=True, kw_only=True)
class RandomMask(Masked, Thresholding):
    """m weights drawn at random; nothing about the data decides which."""

    def message_density(self, clock: Clock) -> float:
        """One mask for good: no warm-up and no schedule, or weights outside it would be sent."""
        return self.density

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """The start, zero outside a random mask."""
        chance = selection.one_per_group(draw("mask", layout.size), layout.groups)
        kept = selection.top(chance, self.final_budget(layout), layout.groups)
        return super().init(layout, torch.where(kept, weights, torch.zeros_like(weights)), draw)
