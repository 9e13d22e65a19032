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
from fedsieve.core.types import Layout


@dataclass(frozen=True, kw_only=True)
class RandomMask(Masked, Thresholding):
    """m weights drawn at random; nothing about the data decides which."""

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """The start, zero outside a random mask."""
        kept = selection.top(draw("mask", layout.size), self.final_budget(layout))
        return super().init(layout, torch.where(kept, weights, torch.zeros_like(weights)), draw)
