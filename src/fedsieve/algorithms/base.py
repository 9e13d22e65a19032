"""What every method shares: the options that are nobody's privilege, and the arithmetic they stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.core import optimizers, selection
from fedsieve.core.aggregation import Mean, Weighting, cohort_weights, mean, riemannian_mean, robust, sparse_mean
from fedsieve.core.optimizers import Moments, Optimizer, StepRule
from fedsieve.core.packets import GATES, PRECISIONS, Packet, Part, dense_packet, sparse_packet
from fedsieve.core.private_mean import Noise, noisy_mean
from fedsieve.core.random import Draw
from fedsieve.core.selection import Budget, BudgetRule, Schedule
from fedsieve.core.types import Batch, Clock, Layout, Objective, Reply, Stack, stacked

SCHEDULING = frozenset({"schedule", "start_density", "schedule_start", "schedule_end", "warmup"})
"""Options about the density of messages: nothing to methods whose messages are dense, or have one support for good."""
AHEAD, AT_FIRST = 6.0, 0.3
"""Where a falling schedule begins: so many times its target, at most this density (decision H20)."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Options of every method. A field's comment is its help text."""

    usual_rounds: ClassVar[int] = 100
    usual_participation: ClassVar[float] = 0.05
    usual_norm_limit: ClassVar[float] = 100.0
    """how many times as far as the cohort's median a reply may move; honest ones were seen to move 30 times as far"""
    holds_everywhere: ClassVar[bool] = False
    """whether the defaults of steps and schedules are one rule for all linear tasks, not to be replaced by what was tuned on one"""
    precisions: ClassVar[tuple[int | None, ...]] = PRECISIONS
    """bits a value may have in messages; None where the method has a rule"""
    unused: ClassVar[frozenset[str]] = frozenset()
    """options below that mean nothing to this method: it does not offer them and refuses another value"""

    density: float = field(default=0.05, metadata={"section": "run"})
    """fraction of weights that may be non-zero"""
    weights: Weighting = field(default=Weighting.EXAMPLES, metadata={"section": "federation"})
    """how much each client of a cohort counts"""
    mean: Mean = field(default=Mean.WEIGHTED, metadata={"section": "federation"})
    """what stands in the middle of a cohort's replies"""
    tolerate: float = field(default=0.3, metadata={"section": "federation"})
    """share of a cohort that may be hostile, for the trimmed mean and krum"""
    private: Noise | None = field(default=None, metadata={"section": "privacy"})
    """how far one client's reply may move the mean, and the noise that hides it"""
    batch: int | Literal["all"] = 32
    """rows a client uses per step, or all of them"""
    steps: int = 30
    """n(B): local steps a round (for gradient methods: exchanges a round)"""
    rate: float = 1.0
    """learning rate of the weights: a step size, or for the Polyak rule its factor"""
    final_rate: float = 0.1
    """the rate falls along half a cosine to this fraction"""
    step_rule: StepRule = StepRule.POLYAK
    """a client's step: rate itself, capped at 1/L, or Polyak's"""
    clip: float = inf
    """longest gradient of a client; longer ones are shortened"""
    bits: Literal[32, 16, 8, 4] = 8
    """precision of the values in messages"""
    budget: BudgetRule = BudgetRule.GLOBAL
    """how kept weights are spread over layers"""
    schedule: Schedule = Schedule.CONSTANT
    """how the density of messages falls to its target"""
    start_density: float | None = None
    """density of messages when a falling schedule begins (none: six times the target, .3 at most)"""
    schedule_start: float = 0.0
    """part of the rounds before a falling schedule begins to fall"""
    schedule_end: float = 0.5
    """part of the rounds after which the schedule has reached its target"""
    warmup: int = 0
    """first rounds with dense messages and no selection"""
    server: Optimizer = Optimizer.SGD
    """the server's optimizer on the aggregate"""
    server_rate: float = 1.0
    """the server's learning rate"""
    server_momentum: float = 0.9
    """how much of its last move the server repeats, with --algorithm.server momentum or adam"""
    memory: float = 0.0
    """how much of what a broadcast left out stays at the server for the next round"""

    def __post_init__(self) -> None:
        """Refuse what cannot work while a person can still mend it."""
        for name in sorted(self.unused):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{_flag(name)} has no effect on {type(self).__name__}, so it cannot be set; got {getattr(self, name)}")
        selection.kept_count(self.density, 10**18)
        at_least(1, steps=self.steps, **({} if self.batch == "all" else {"batch": self.batch}))
        at_least(0, warmup=self.warmup, memory=self.memory or 0)
        above_zero(rate=self.rate, final_rate=self.final_rate, clip=self.clip, server_rate=self.server_rate)
        fraction(start_density=self.first_density, final_rate=self.final_rate, server_momentum=self.server_momentum)
        fraction(schedule_start=self.schedule_start, schedule_end=self.schedule_end)
        if self.course is not Schedule.CONSTANT and not self.schedule_start < self.schedule_end:
            raise ValueError(
                f"algorithm.schedule-start {self.schedule_start:g} must be before algorithm.schedule-end {self.schedule_end:g}"
            )
        if not 0 <= self.tolerate < 0.5:
            raise ValueError(f"tolerate must be at least 0 and below 0.5: no mean outvotes a hostile majority; got {self.tolerate:g}")
        if self.mean is not Mean.WEIGHTED and self.weights is Weighting.RIEMANNIAN:
            raise ValueError(f"weights riemannian is a mean itself and cannot go with mean {self.mean}; use examples, sqrt or uniform")
        if self.bits not in self.precisions:
            raise ValueError(f"bits must be one of {', '.join(map(str, PRECISIONS))}, the precisions of a message; got {self.bits}")

    @classmethod
    def offered(cls) -> frozenset[str]:
        """The options of this method, those of other sections apart."""
        return frozenset(f.name for f in fields(cls) if "section" not in f.metadata) - cls.unused

    # What the round needs to know

    @property
    def exchanges(self) -> int:
        """Exchanges a round: one, unless gradients are exchanged."""
        return 1

    @property
    def local_steps(self) -> int:
        """Local steps per exchange."""
        return self.steps

    @property
    def batch_rows(self) -> int | None:
        """Rows a step; None is all of them."""
        return None if self.batch == "all" else self.batch

    @property
    def reply_fields(self) -> frozenset[str]:
        """What a client's packet is made of."""
        return frozenset({"theta"})

    def answers(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """What replies to a packet are made of: the same in every round."""
        return self.reply_fields

    @property
    def projects(self) -> bool:
        """Whether a local step compares all weights with each other, so that none that is not zero may be left out of sight."""
        return False

    @property
    def rest_alike(self) -> bool:
        """Whether a client treats all weights alike that neither a sparse broadcast nor its rows speak of: one can stand for them."""
        return False

    @property
    def needs_smoothness(self) -> bool:
        """Only the capped step asks for L."""
        return self.step_rule is StepRule.CAPPED

    # Schedules

    def decay(self, clock: Clock) -> float:
        """The cosine factor of every learning rate."""
        return optimizers.cosine(clock.round / clock.rounds, self.final_rate)

    @property
    def turns(self) -> dict[str, float]:
        """The parts of the rounds after which the method changes what it does, by what happens there."""
        if self.course is Schedule.CONSTANT:
            return {}
        return {"schedule begins": self.schedule_start, "schedule ends": self.schedule_end}

    @property
    def course(self) -> Schedule:
        """The schedule of messages."""
        return self.schedule

    @property
    def first_density(self) -> float:
        """The density of messages when a falling schedule begins."""
        return min(AHEAD * self.density, AT_FIRST) if self.start_density is None else self.start_density

    def message_density(self, clock: Clock) -> float:
        """The density of this round's messages: 1 while warming up, then the schedule's."""
        if clock.round < self.warmup:
            return 1.0
        begin = self.schedule_start * clock.rounds
        progress = (clock.round - begin) / max(self.schedule_end * clock.rounds - begin, 1)
        return selection.scheduled_density(self.density, max(self.first_density, self.density), max(progress, 0.0), self.course)

    def message_budget(self, layout: Layout, clock: Clock) -> Budget:
        """How many weights each layer may send this round."""
        return self.budget_of(layout, self.message_density(clock))

    def final_budget(self, layout: Layout) -> Budget:
        """How many weights each layer of the finished model has."""
        return self.budget_of(layout, self.density)

    def budget_of(self, layout: Layout, density: float) -> Budget:
        """How many weights of each layer a density is, in whole groups; free coordinates come on top."""
        parts = selection.budget(list(layout.layers.values()), selection.kept_count(density, layout.gated), self.budget)
        if layout.groups is not None:
            parts = tuple((part, self._whole_groups(kept, layout.groups[part])) for part, kept in parts)
        return (*parts, (slice(layout.gated, layout.size), layout.free)) if layout.free else parts

    @staticmethod
    def _whole_groups(kept: int, groups: Tensor) -> int:
        """The most coordinates that whole groups can hold; where their sizes differ, what they may hold at most."""
        sizes = (groups - groups.amin()).bincount()
        least = int(sizes.amin())
        if kept < least:
            raise ValueError(f"a budget of {kept} weights is less than one group of {least}; ask for a higher density")
        return kept - kept % least if selection.even(groups) else kept

    def stackable(self, layout: Layout) -> bool:
        """Whether all clients' messages have one length: not where a budget is filled with groups of unequal size."""
        return layout.groups is None or all(selection.even(layout.groups[part]) for part, _ in self.final_budget(layout))

    # One step and one message

    def step_in_place(self, objective: Objective, client: Any, at: Int64[Tensor, " n"], batch: Batch, clock: Clock) -> bool:
        """`client_step` on the features `at` some places of a client that holds more, where they stand: not by this method."""
        return False

    def client_rest(self, client: Any, missed: Float[Tensor, "k p"], clock: Clock) -> Any:
        """What local steps do to coordinates without a gradient, `missed` times each, where rows are sparse: nothing."""
        return client

    def step_size(
        self,
        loss: Float[Tensor, " k"],
        gradient: Float[Tensor, "k p"],
        batch: Batch,
        clock: Clock,
        gate: Float[Tensor, "k p"] | None = None,
    ) -> Float[Tensor, "k 1"]:
        """Each client's step along the gradient it follows (times its gates, where given), found before clipping."""
        return optimizers.step_size(self.step_rule, self.rate * self.decay(clock), loss, gradient, batch.smoothness, gate)

    def descend(
        self, objective: Objective, theta: Float[Tensor, "k p"], batch: Batch, clock: Clock
    ) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k 1"]]:
        """The clipped gradient of the batch loss at theta, and the step along it."""
        loss, gradient = objective.gradient(theta, batch)
        return optimizers.clipped(gradient, self.clip), self.step_size(loss, gradient, batch, clock)

    def pack(self, vector: Float[Tensor, "*k p"], chosen: Bool[Tensor, "*k p"], draw: Draw) -> Packet:
        """The chosen entries of a vector as a message."""
        return sparse_packet(selection.positions(chosen), {"theta": vector}, self.bits, draw)

    def pack_dense(self, vector: Float[Tensor, "*k p"], draw: Draw) -> Packet:
        """All of a vector as a message."""
        return dense_packet({"theta": vector}, self.bits, draw)

    def read(self, packet: Packet, dtype: torch.dtype, rest: Mapping[str, Tensor] | None = None) -> dict[str, Float[Tensor, "*k _n"]]:
        """What a packet, or a stack of them, says, part by part, as full vectors: `rest` (or 0) where it is silent."""
        return {name: part.over((rest or {}).get(name), packet.size) for name, part in self.said(packet, dtype).items()}

    def said(self, packet: Packet, dtype: torch.dtype) -> dict[str, Part]:
        """The parts: every field, and every scalar as a vector of one."""
        fields = {name: Part(values.decode(dtype), packet.support) for name, values in packet.fields.items()}
        return fields | {name: Part(packet.scalar(name, dtype)[..., None]) for name in packet.scalars}

    def moved(self, packet: Packet, replies: Sequence[Reply], dtype: torch.dtype) -> dict[str, Float[Tensor, "k _n"]]:
        """Each reply less the broadcast, 0 where it is silent: an absent entry is no change. What was not broadcast is a difference."""
        sent = self.read(packet, dtype)
        return {name: said - sent[name] if name in sent else said for name, said in self.heard(replies, dtype, sent).items()}

    def heard(
        self, replies: Sequence[Reply], dtype: torch.dtype, rest: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, "k _n"]]:
        """What `read` says of each reply, all of one form at once."""
        if (stack := stacked(replies)) is not None:
            return self.read(stack, dtype, rest)
        said = [self.read(reply.packet, dtype, rest) for reply in replies]
        return {name: torch.stack([parts[name] for parts in said]) for name in said[0]}

    def shared_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """The coordinates that replies to a packet speak of by rule, whatever the data: its own, or all where clients choose."""
        return None

    def merged(
        self, packet: Packet, replies: Sequence[Reply], like: Float[Tensor, " p"], clock: Clock, draw: Draw
    ) -> dict[str, Float[Tensor, " _n"]]:
        """What the cohort says, part by part: the weighted mean, with 0 where a packet is silent (L152).

        A robust or private mean is the broadcast and a mean of the differences to it: there an absent entry is no change.
        """
        shares = cohort_weights(examples(replies), self.weights, like.dtype, like.device)
        if self.private is not None or self.mean is not Mean.WEIGHTED:
            sent, moved = self.read(packet, like.dtype), self.moved(packet, replies, like.dtype)
            if self.private is None:
                step = robust(moved, shares, self.mean, self.tolerate)
            else:
                step = noisy_mean(moved, self.private, self.shared_support(packet, clock), draw)
            return {name: sent[name] + part if name in sent else part for name, part in step.items()}
        stack = stacked(replies)
        if stack is None or self.weights is Weighting.RIEMANNIAN:
            said = self.heard(replies, like.dtype)
            return {name: mean(part, shares) if name in GATES else self.average(part, shares) for name, part in said.items()}
        return self.averaged(stack, shares)

    def averaged(self, stack: Packet, shares: Float[Tensor, " k"]) -> dict[str, Float[Tensor, " _n"]]:
        """The weighted mean of what a stack says, part by part."""
        return {name: sparse_mean(part, shares, stack.size) for name, part in self.said(stack, shares.dtype).items()}

    def average(self, vectors: Float[Tensor, "k n"], shares: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
        """The mean of vectors: plain, or on the sphere (decision D6)."""
        return riemannian_mean(vectors, shares) if self.weights is Weighting.RIEMANNIAN else mean(vectors, shares)


def examples(replies: Sequence[Reply]) -> tuple[int, ...]:
    """n_k of those who replied."""
    return tuple(replies.examples if isinstance(replies, Stack) else [reply.examples for reply in replies])


def exactly(kept: Budget, theta: Float[Tensor, " p"], layout: Layout) -> Float[Tensor, " p"]:
    """The final projection: the largest weights of the budget, zeros elsewhere (decision C5).

    A kept weight that rounding in dense messages made exactly zero becomes the smallest float: the count holds, the model is the same.
    """
    some = torch.where(theta == 0, torch.full_like(theta, torch.finfo(torch.float32).tiny), theta)
    return torch.where(selection.top(theta.abs(), kept, layout.groups), some, torch.zeros_like(theta))


def server_step(
    method: Method, moments: Moments, sent: Float[Tensor, " p"], mean: Float[Tensor, " p"]
) -> tuple[Float[Tensor, " p"], Moments]:
    """The server's move from what it sent towards the cohort's mean: sent - mean is its pseudo-gradient."""
    return optimizers.step(method.server, moments, sent, sent - mean, method.server_rate, momentum=method.server_momentum)


def at_least(least: float, **fields: float) -> None:
    """Refuse values below `least`."""
    for name, value in fields.items():
        if not value >= least:
            raise ValueError(f"{_flag(name)} must be at least {least}; got {value}")


def above_zero(**fields: float) -> None:
    """Refuse values that are not above 0."""
    for name, value in fields.items():
        if not value > 0:
            raise ValueError(f"{_flag(name)} must be above 0; got {value}")


def fraction(**fields: float) -> None:
    """Refuse values outside [0, 1]."""
    for name, value in fields.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{_flag(name)} is a fraction and must lie between 0 and 1; got {value}")


def _flag(name: str) -> str:
    return "algorithm." + name.replace("_", "-")
