"""An m-sparse broadcast with error feedback at the server, and a support that is fixed in the last rounds: what sieve and sign-ht share.

Error feedback: Karimireddy et al. 2019, arXiv 1901.09847. Here only the server has a residual, so clients keep no state.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.option_rules import require_fraction, require_positive
from fedsieve.core import topk
from fedsieve.core.aggregation import Aggregator, limit_largest
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Clock, Reply


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(BaseAlgorithm, ABC):
    """Clients send updates; the server keeps what its broadcast left out. The support may change only while searching."""

    weight_fields: ClassVar[tuple[str, ...]] = ("weights",)
    unsupported_options: ClassVar[frozenset[str]] = frozenset({"server_optimizer", "server_momentum"})
    bits: Literal[32, 16, 8, 4] = 4
    """bits per value of broadcasts while searching (afterwards at least 8), and of replies after the search"""
    residual_decay: float = 0.97
    """fraction of the weights left out of a broadcast that the server keeps for the next round (error feedback)"""
    search_fraction: float = 0.8
    """fraction of the rounds in which the support may change"""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        require_positive(search_fraction=self.search_fraction)
        require_fraction(search_fraction=self.search_fraction)

    @property
    def milestones(self) -> dict[str, float]:
        """The end of the search, in addition to the schedule's milestones."""
        return super().milestones | {"search ends": self.search_fraction}

    def is_searching(self, clock: Clock) -> bool:
        """Return whether the support may still change."""
        return clock.round < self.search_fraction * clock.num_rounds

    def broadcast_bits(self, clock: Clock) -> int:
        """Return the bits per value of a broadcast: at least 8 after the search, when rounding is the only noise left."""
        return self.bits if self.is_searching(clock) else max(self.bits, 8)

    def encode_on_support(self, packet: Packet, update: Float[Tensor, "k p"], draw: Draw) -> Packet:
        """Return a reply with the update on the support of the broadcast, which needs no positions."""
        mask = (packet.support_mask(update.dtype) > 0).expand_as(update)
        return sparse_packet(topk.mask_to_indices(mask), {"update": update}, self.bits, draw)

    def apply_update(self, weights: Float[Tensor, " p"], packet: Packet, update: Float[Tensor, " p"], clock: Clock) -> Float[Tensor, " p"]:
        """Return sent + server_rate * update + residual_decay * (weights - sent); the rate is 1 after the search."""
        sent = packet.field_dense("weights", weights.dtype)
        rate = self.server_learning_rate if self.is_searching(clock) else 1.0
        return sent + rate * update + self.residual_decay * (weights - sent)

    def aggregate_updates(
        self, packet: Packet, replies: Sequence[Reply], like: Float[Tensor, " p"], clock: Clock, draw: Draw
    ) -> dict[str, Float[Tensor, " _n"]]:
        """Return the mean of the replies; while searching, the mean update is as long as the updates (their root mean square).

        A mean of updates is shorter than they are, the more so the less they agree: by the square root of their number if they are
        orthogonal. FedExP (Jhunjhunwala et al. 2023, arXiv 2301.09604) sets its server rate by the same ratio. Under the aggregate
        `similarity` no length counts more than their median, and the factor is at most that square root. Under other robust aggregates,
        and private ones, the update keeps its length, because single replies must not change it.
        """
        mean = self.aggregate_replies(packet, replies, like, clock, draw)
        is_clipped = self.aggregator is Aggregator.SIMILARITY
        if self.is_searching(clock) and self.privacy is None and (is_clipped or self.aggregator is Aggregator.WEIGHTED):
            weights = self.reply_weights(replies, like)
            squares = torch.stack([reply.packet.fields["update"].decode(like.dtype).square().sum() for reply in replies])
            limited = squares.clamp_max(squares.median()) if is_clipped else limit_largest(squares)
            length = (weights * limited).sum().sqrt()
            factor = length / torch.linalg.vector_norm(mean["update"]).clamp_min(torch.finfo(like.dtype).tiny)
            mean["update"] *= factor.clamp_max(len(replies) ** 0.5) if is_clipped else factor
        return mean

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """Return None while searching, then the support of the broadcast."""
        return None if self.is_searching(clock) else packet.support
