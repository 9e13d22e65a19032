"""What sieve does where nobody typed it: what travels, for how long, how far steps go (decisions H7 to H29, docs/theory.md).

Every rule is one property or method of the options; `sieve.py` has the round they fill in. A rule looks at the density, at the clock,
at how many rows rounds have had, and at what replies said: never at a task's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm, num_examples, require_at_least, require_fraction, require_positive
from fedsieve.algorithms.gated import initial_log_alpha
from fedsieve.core import gates
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.gates import HardConcrete
from fedsieve.core.optimizers import Moments
from fedsieve.core.packets import Packet
from fedsieve.core.quantization import ALLOWED_BITS
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Clock, Layout, Reply

ALONG_SIGNS, FROM_FEW_ROWS = 2.0, 3.0
"""Steps along the mean of signs, over the server's rate (decision H13)."""
THIN = 0.4
"""Rows a round has for each weight, below which these steps are the longer ones."""
ENOUGH = 5
"""Replies whose signs the server follows at its full rate; the mean of fewer is noisier by the root of their number, the step as short."""
SIGNS = 0.15
"""Part of all updates whose signs are sent at most, unless the model keeps more (decision H11)."""
COARSE, FINE = 4, 8
"""Bits a value, unless they are typed: coarse for updates and for broadcasts that gates' noise hides, fine for others (decision H19)."""
SPARSEST = 0.01
"""Density up to which weights travel: which of many alike are kept is decided by their size, of which signs say nothing (decision H15)."""
NARROW, EVEN = 0.12, 0.2
"""Parts of all weights that the first round's updates are spread over: below the first weights travel at every density, below the
second signs do (decision H25)."""
ENOUGH_ROWS = 64
"""Rows of a client, in the mean of the first round, from which it can tell: the update of a few rows is narrow whatever they are."""
WIDER, FILLED = 1.25, 0.03
"""Messages of weights begin wide where updates are spread over so many times what the model keeps, and a round has so many rows for
each weight they would hold; else they are as narrow as the model from the start."""
BRISK = 1.5
"""Steps of weights, over their rate, where local steps are cut to messages that fall (decision H25)."""
BY_DENSITY = -1.0
"""The width of messages where the density alone decides what travels."""
LONG_SEARCH, SHARE = 0.8, 0.08
"""Parts of the rounds: the longest search, and its length times the density; where much is kept, numbers do more than a search (H14)."""
FALL = 3
"""The expected density falls along 1 - t to this power: gates are open for most of the search (decisions H24, H27)."""
MEMORY, LONG_MEMORY = 0.97, 0.98
"""How much of what a broadcast left out stays at the server, unless it is typed; more where one round says little (decision H24)."""
SMALL = 0.15
"""Density below which a client moves all its weights while the support is polished (decision H18)."""
FEW = 0.075
"""Rows a round has for each weight, below which the first choice of a support is little better than chance (decision H8)."""
TRIAL = 0.5
"""Weights then on trial when the search begins, over those the model keeps."""
CAREFUL = 0.5
"""Steps of gates then, over their rate: the saliency of few rows is mostly their own (decision H28)."""
OPEN = 8.0
"""log_alpha of the support once it is found: its gates are 1 but for one draw in 600, and noise no longer hides the weights (H10)."""
STILL, LEAST = 0.2, 5
"""Part of the rounds, and their least number, for which a support that is found has not changed, where rows are not few (H29)."""
OVER = 1e-9
"""The part of the rounds that is searched where the server says that the support is found."""


class Uplink(StrEnum):
    """What clients send while searching."""

    UPDATES = "updates"
    """signs of the largest updates, `reach` times as many as the model keeps at most; an absent entry is no change"""
    WEIGHTS = "weights"
    """the largest weights, as many as a broadcast holds; an absent entry is zero"""


class Ending(StrEnum):
    """What holds the constraint while polishing."""

    EXACT = "exact"
    """the exact dual: gates of the support open, all others as the constraint needs, their expected number m"""
    FROZEN = "frozen"
    """gates of the support wide open, all others shut"""


class Server(NamedTuple):
    """theta~ with all it remembers, two log_alpha (on the support and off it), and the shift that made the constraint tight."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    moments: Moments
    rows: Tensor
    """how many a round has had so far, in the mean; 0 where clients are hidden"""
    signs: Tensor
    """the part of all updates whose signs say most, in the mean of the last replies; 0 where nobody has said"""
    width: Tensor
    """what the first round decided: weights travel, in messages of this density at first, or 0: signs do; below 0 the density decides"""
    changed: Tensor
    """the last round that changed the support, or in which it was wider than the model; -1 before the first"""
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Rules(BaseAlgorithm):
    """The options of sieve, and what stands in the place of those left open."""

    holds_everywhere: ClassVar[bool] = True
    allowed_bits: ClassVar[tuple[int | None, ...]] = (*ALLOWED_BITS, None)
    shape: ClassVar[HardConcrete] = HardConcrete()
    """the gates' distribution"""

    learning_rate: float = 2.0
    final_learning_rate_fraction: float = 0.1
    batch_size: int | Literal["all"] = 64
    client_weighting: ClientWeighting = field(default=ClientWeighting.SQRT, metadata={"section": "federation"})
    server_learning_rate: float = 1.0
    """the server's learning rate; along signs, while searching, twice that, three times where rows are few"""
    residual_decay: float | None = None
    """how much of what a broadcast left out stays at the server (none: .97, or .98 where rows are few or weights travel)"""
    initial_gate_probability: float = 0.5
    """rho_init: log_alpha starts at its logit, and the expected density falls from there (.5 opens .83 of the gates, .05 a fifth)"""
    gate_rate: float = 0.3
    """step of log_alpha along the saliency, in units of its root mean square; half of it where rows are few"""
    bits: Literal[32, 16, 8, 4] | None = None
    """precision of the values in messages (none: by rule; 4 where updates travel, but 8 in broadcasts once the support is found)"""
    density_schedule: DensitySchedule | None = None
    """how the density of messages falls to its target (none: cubic where weights travel by rule and rows fill them; else constant)"""
    uplink: Uplink | None = None
    """what clients send while searching (none: by the first round; signs of many updates, or weights where few matter)"""
    reach: float = 4.0
    """signs of updates a client sends at most while searching, over the weights the model keeps; never above .15 of all or what it keeps"""
    search: float | None = None
    """part of the rounds in which the support is searched (none: .8, less above a density of .1 and where it stands still)"""
    ending: Ending = Ending.EXACT
    """what holds the constraint after the search: the exact dual, or a frozen support"""

    def __post_init__(self) -> None:
        """Refuse what could find nothing."""
        super().__post_init__()
        require_at_least(0, gate_rate=self.gate_rate)
        require_at_least(1, reach=self.reach)
        require_fraction(search=self.searched)
        require_positive(search=self.searched)
        initial_log_alpha(self.initial_gate_probability)

    # What the first round decides

    def measures(self, clock: Clock) -> bool:
        """Whether this is the round that shows what is to travel: the first, where it is left open and replies may tell."""
        return self.uplink is None and self.trusting and clock.round == 0

    @property
    def trusting(self) -> bool:
        """Whether replies may say what messages should be: not where clients are hidden or not trusted.

        Nor where layers have budgets of their own: one number would not fit them all.
        """
        return self.privacy is None and self.aggregator is Aggregator.WEIGHTED and self.sparsity_allocation is BudgetRule.GLOBAL

    def decided(self, replies: Sequence[Reply], layout: Layout) -> float:
        """The width of messages by what the replies of the first round say, each counted by its rows; too few rows tell nothing."""
        counts = num_examples(replies)
        if sum(counts) < ENOUGH_ROWS * len(counts):
            return BY_DENSITY
        told = sum(count * float(reply.packet.scalars["spread"]) for count, reply in zip(counts, replies, strict=True))
        return self.wanted(told / sum(counts), sum(counts), layout)

    def wanted(self, spread: float, rows: float, layout: Layout) -> float:
        """The width of messages by what the first round told: over which part of all weights updates are spread, and its rows (H25).

        Spread over few, weights tell more than signs; over more than the model keeps, in wide messages, which fall, where rows fill
        them. Spread less than evenly, signs tell more than weights at low densities too.
        """
        if spread < NARROW:
            wide = max(self.initial_message_density, self.density)
            return wide if spread >= WIDER * self.density and rows >= FILLED * wide * layout.num_gated else self.density
        return 0.0 if self.density <= SPARSEST and spread < EVEN else BY_DENSITY

    def fitted(self, width: float, pace: float = 1.0, *, found: bool = False) -> Any:
        """The method with what it left open filled in, its gates' steps so much shorter, and no search where the support is found."""
        return self if width < 0 and pace == 1 and not found else _filled(self, width, pace, found)

    def heeding(self, packet: Packet) -> Any:
        """The method as a broadcast asks for it; gates of the support that stand open say that it is found."""
        width, pace = (float(packet.scalars.get(name, usual)) for name, usual in (("width", BY_DENSITY), ("pace", 1.0)))
        return self.fitted(width, pace, found=float(packet.scalars["kept_gate"]) >= OPEN)

    # Search and polish

    @property
    def searched(self) -> float:
        """The part of the rounds in which the support is searched: the shorter, the more the model keeps."""
        return min(LONG_SEARCH, SHARE / self.density) if self.search is None else self.search

    @property
    def milestones(self) -> dict[str, float]:
        """The end of the search, beside the schedule's turns."""
        return super().milestones | {"search ends" if self.search else "search ends at the latest": self.searched}

    def searching(self, clock: Clock) -> bool:
        """Whether the support may still change."""
        return clock.round < self.searched * clock.num_rounds

    def found(self, server: Server, clock: Clock) -> bool:
        """Whether the support is found before this round: the search is over, or the support has not changed for long (H29).

        Not where rows are few: there the noise of the gates, which ends with the search, keeps weights from fitting those rows alone.
        """
        now = self.fitted(float(server.width))
        lasting = now.search is None and now.counts_signs and float(server.rows) >= FEW * server.layout.num_gated
        return not now.searching(clock) or (lasting and clock.round - float(server.changed) > max(STILL * clock.num_rounds, LEAST))

    def open_density(self, clock: Clock) -> float:
        """The mean P(z != 0) the exact dual asks for after this round: that of the start first, the density when the search ends."""
        target = self.message_density(clock)
        free = float(gates.active_probability(self.shape, torch.tensor([initial_log_alpha(self.initial_gate_probability)]))[0])
        done = min((clock.round + 1) / (self.searched * clock.num_rounds), 1.0)
        return target + max(free - target, 0.0) * (1 - done**FALL)

    @property
    def travels(self) -> Uplink:
        """What clients send while searching."""
        return self.uplink or (
            Uplink.WEIGHTS if self.density <= SPARSEST and self.sparsity_allocation is BudgetRule.GLOBAL else Uplink.UPDATES
        )

    def precision(self, *, fine: bool) -> int:
        """Bits a value; a broadcast is fine once the support is found: then rounding is the only noise there is."""
        return self.bits or (COARSE if self.travels is Uplink.UPDATES and not fine else FINE)

    @property
    def stride(self) -> float:
        """Of steps of weights, over their rate: brisk where each is cut to a message that falls."""
        return BRISK if self.cuts else 1.0

    @property
    def fewest(self) -> bool:
        """Whether the model keeps so few weights that weights travel by rule."""
        return self.uplink is None and self.travels is Uplink.WEIGHTS

    @property
    def resolved_schedule(self) -> DensitySchedule:
        """The schedule of messages: they fall where the model keeps fewest, whose first choice is little better than chance (H22)."""
        return self.density_schedule or (DensitySchedule.CUBIC if self.fewest else DensitySchedule.CONSTANT)

    @property
    def counts_signs(self) -> bool:
        """Whether replies say how many signs would tell most: not where weights travel."""
        return self.travels is Uplink.UPDATES and self.trusting

    def most_signs(self, clock: Clock) -> float:
        """The part of all updates whose signs are sent at most: a multiple of what the model keeps, bounded, or what a broadcast holds."""
        return max(min(self.reach * self.density, SIGNS), self.message_density(clock))

    def signs(self, server: Server, clock: Clock) -> float:
        """The part of all updates whose signs clients are asked for: what told most in the last round, at least the density (H23)."""
        most = self.most_signs(clock)
        return most if server.signs == 0 else min(max(float(server.signs), self.density), most)

    @staticmethod
    def fewer_rows(server: Server, least: float) -> bool:
        """Whether rounds have had fewer rows for each weight, as far as is known."""
        return 0 < float(server.rows) < least * server.layout.num_gated

    def remembered(self, server: Server) -> float:
        """How much of what a broadcast left out stays: more where a round's rows are few, or clients send weights, each its own choice."""
        little = self.travels is Uplink.WEIGHTS or self.fewer_rows(server, FEW)
        return self.residual_decay if self.residual_decay is not None else LONG_MEMORY if little else MEMORY

    def boldness(self, server: Server, replies: int, clock: Clock) -> float:
        """The server's rate: more along signs, less of it where few replied, as the mean of few signs is noisy (H7)."""
        if not self.searching(clock) or self.travels is Uplink.WEIGHTS:
            return self.server_learning_rate
        bold = FROM_FEW_ROWS if self.fewer_rows(server, THIN) else ALONG_SIGNS
        return self.server_learning_rate * bold * min(replies / ENOUGH, 1.0) ** 0.5

    def pace(self, server: Server) -> float:
        """Steps of gates, over their rate: shorter where a round's rows are few and replies may say what messages should be."""
        return CAREFUL if self.counts_signs and self.fewer_rows(server, FEW) else 1.0

    def sent(self, server: Server, clock: Clock) -> float:
        """The density of a broadcast: where rows are few, weights on trial come on top, fewer each round until the search ends.

        What is left out is judged by updates of a zero, what is sent by what it becomes beside the others: without a trial the first
        stay. A falling schedule is such a trial itself; where weights travel, clients would send those on trial too.
        """
        density = self.message_density(clock)
        if not self.fewer_rows(server, FEW) or self.resolved_schedule is not DensitySchedule.CONSTANT or self.travels is Uplink.WEIGHTS:
            return density
        left = max(1 - clock.round / (self.searched * clock.num_rounds), 0.0)
        return min(density * (1 + TRIAL * left), 1.0)

    def ungated(self, clock: Clock) -> bool:
        """Whether local steps move all weights: while the support is polished (H18), from the start where the model keeps fewest (H21).

        Other weights then take up what is a client's own, or what so few cannot say.
        """
        alone = self.ending is Ending.FROZEN or self.uplink is Uplink.WEIGHTS or self.density >= SMALL
        return not alone and (self.fewest or not self.searching(clock))

    @property
    def cuts(self) -> bool:
        """Where weights travel under a falling schedule, not by density, a local step keeps only as many as a message holds (H9)."""
        return self.uplink is Uplink.WEIGHTS and self.resolved_schedule is not DensitySchedule.CONSTANT

    @property
    def needs_all_nonzero_weights(self) -> bool:
        """Whether local steps may be cut."""
        return self.cuts or (self.uplink is None and self.trusting)


@lru_cache(maxsize=64)
def _filled(method: Any, width: float, pace: float, found: bool) -> Any:
    """The method as the server wants it: what travels, how long steps of gates are, and whether the search is over."""
    method = replace(_travelling(method, width), gate_rate=pace * method.gate_rate)
    return replace(method, search=OVER) if found else method


def _travelling(method: Rules, width: float) -> Rules:
    """The method with its open options set for messages of weights that begin so wide, or, at 0, for signs of updates."""
    if width < 0:
        return method
    if width == 0:
        return replace(method, uplink=Uplink.UPDATES)
    if method.density_schedule is not None:
        return replace(
            method, uplink=Uplink.WEIGHTS, bits=method.bits or (FINE if method.density_schedule is DensitySchedule.CONSTANT else COARSE)
        )
    if width <= 1.01 * method.density:  # the width was rounded on its way
        return replace(method, uplink=Uplink.WEIGHTS, density_schedule=DensitySchedule.CONSTANT, bits=method.bits or FINE)
    end = method.searched if method.anneal_end == Rules.anneal_end else method.anneal_end
    return replace(method, uplink=Uplink.WEIGHTS, density_schedule=DensitySchedule.CUBIC, anneal_end=end, bits=method.bits or COARSE)
