"""What every method shares: the options that are nobody's privilege, and the arithmetic they stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.core import budgets, optimizers, schedules, topk
from fedsieve.core.aggregation import Aggregator, ClientWeighting, client_weights, mean, riemannian_mean, sparse_mean
from fedsieve.core.budgets import Budget, BudgetRule
from fedsieve.core.optimizers import Moments, Optimizer, StepRule
from fedsieve.core.packets import GATE_FIELDS, Packet, SparseVector, dense_packet, sparse_packet
from fedsieve.core.private_mean import GaussianMechanism, private_mean
from fedsieve.core.quantization import ALLOWED_BITS
from fedsieve.core.random import Draw
from fedsieve.core.robust_aggregation import robust_aggregate
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout, Objective, Reply, StackedReplies, stack_replies

DENSITY_SCHEDULE_OPTIONS = frozenset({"density_schedule", "initial_density", "anneal_start", "anneal_end", "warmup"})
"""Options about the density of messages: nothing to methods whose messages are dense, or have one support for good."""
INITIAL_DENSITY_FACTOR, MAX_INITIAL_DENSITY = 6.0, 0.3
"""Where a falling schedule begins: so many times its target, at most this density (decision H20)."""


@dataclass(frozen=True, kw_only=True)
class BaseAlgorithm:
    """Options of every method. A field's comment is its help text."""

    default_rounds: ClassVar[int] = 100
    default_participation: ClassVar[float] = 0.05
    default_max_norm_ratio: ClassVar[float] = 100.0
    """how many times as far as the cohort's median a reply may move; honest ones were seen to move 30 times as far"""
    holds_everywhere: ClassVar[bool] = False
    """whether the defaults of steps and schedules are one rule for all linear tasks, not to be replaced by what was tuned on one"""
    allowed_bits: ClassVar[tuple[int | None, ...]] = ALLOWED_BITS
    """bits a value may have in messages; None where the method has a rule"""
    unsupported_options: ClassVar[frozenset[str]] = frozenset()
    """options below that mean nothing to this method: it does not offer them and refuses another value"""

    density: float = field(default=0.05, metadata={"section": "run"})
    """fraction of weights that may be non-zero"""
    client_weighting: ClientWeighting = field(default=ClientWeighting.EXAMPLES, metadata={"section": "federation"})
    """how much each client of a cohort counts"""
    aggregator: Aggregator = field(default=Aggregator.WEIGHTED, metadata={"section": "federation"})
    """what stands in the middle of a cohort's replies"""
    max_malicious_fraction: float = field(default=0.3, metadata={"section": "federation"})
    """share of a cohort that may be hostile, for the trimmed mean and krum"""
    privacy: GaussianMechanism | None = field(default=None, metadata={"section": "privacy"})
    """how far one client's reply may move the mean, and the noise that hides it"""
    batch_size: int | Literal["all"] = 32
    """rows a client uses per step, or all of them"""
    local_steps: int = 30
    """n(B): local steps a round (for gradient methods: exchanges a round)"""
    learning_rate: float = 1.0
    """learning rate of the weights: a step size, or for the Polyak rule its factor"""
    final_learning_rate_fraction: float = 0.1
    """the rate falls along half a cosine to this fraction"""
    step_rule: StepRule = StepRule.POLYAK
    """a client's step: rate itself, capped at 1/L, or Polyak's"""
    max_gradient_norm: float = inf
    """longest gradient of a client; longer ones are shortened"""
    bits: Literal[32, 16, 8, 4] = 8
    """precision of the values in messages"""
    sparsity_allocation: BudgetRule = BudgetRule.GLOBAL
    """how kept weights are spread over layers"""
    density_schedule: DensitySchedule = DensitySchedule.CONSTANT
    """how the density of messages falls to its target"""
    initial_density: float | None = None
    """density of messages when a falling schedule begins (none: six times the target, .3 at most)"""
    anneal_start: float = 0.0
    """part of the rounds before a falling schedule begins to fall"""
    anneal_end: float = 0.5
    """part of the rounds after which the schedule has reached its target"""
    warmup: int = 0
    """first rounds with dense messages and no selection"""
    server_optimizer: Optimizer = Optimizer.SGD
    """the server's optimizer on the aggregate"""
    server_learning_rate: float = 1.0
    """the server's learning rate"""
    server_momentum: float = 0.9
    """how much of its last move the server repeats, with --algorithm.server-optimizer momentum or adam"""
    residual_decay: float = 0.0
    """how much of what a broadcast left out stays at the server for the next round"""

    def __post_init__(self) -> None:
        """Refuse what cannot work while a person can still mend it."""
        for name in sorted(self.unsupported_options):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{_option_name(name)} has no effect on {type(self).__name__}, so it cannot be set; got {getattr(self, name)}"
                )
        budgets.num_kept(self.density, 10**18)
        require_at_least(1, local_steps=self.local_steps, **({} if self.batch_size == "all" else {"batch_size": self.batch_size}))
        require_at_least(0, warmup=self.warmup, residual_decay=self.residual_decay or 0)
        require_positive(
            learning_rate=self.learning_rate,
            final_learning_rate_fraction=self.final_learning_rate_fraction,
            max_gradient_norm=self.max_gradient_norm,
            server_learning_rate=self.server_learning_rate,
        )
        require_fraction(
            initial_density=self.initial_message_density,
            final_learning_rate_fraction=self.final_learning_rate_fraction,
            server_momentum=self.server_momentum,
        )
        require_fraction(anneal_start=self.anneal_start, anneal_end=self.anneal_end)
        if self.resolved_schedule is not DensitySchedule.CONSTANT and not self.anneal_start < self.anneal_end:
            raise ValueError(f"algorithm.anneal-start {self.anneal_start:g} must be before algorithm.anneal-end {self.anneal_end:g}")
        if not 0 <= self.max_malicious_fraction < 0.5:
            raise ValueError(
                f"tolerate must be at least 0 and below 0.5: no mean outvotes a hostile majority; got {self.max_malicious_fraction:g}"
            )
        if self.aggregator is not Aggregator.WEIGHTED and self.client_weighting is ClientWeighting.RIEMANNIAN:
            raise ValueError(
                f"weights riemannian is a mean itself and cannot go with mean {self.aggregator}; use examples, sqrt or uniform"
            )
        if self.bits not in self.allowed_bits:
            raise ValueError(f"bits must be one of {', '.join(map(str, ALLOWED_BITS))}, the precisions of a message; got {self.bits}")

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """The options of this method, those of other sections apart."""
        return frozenset(f.name for f in fields(cls) if "section" not in f.metadata) - cls.unsupported_options

    # What the round needs to know

    @property
    def exchanges_per_round(self) -> int:
        """Exchanges a round: one, unless gradients are exchanged."""
        return 1

    @property
    def steps_per_exchange(self) -> int:
        """Local steps per exchange."""
        return self.local_steps

    @property
    def examples_per_step(self) -> int | None:
        """Rows a step; None is all of them."""
        return None if self.batch_size == "all" else self.batch_size

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """What a client's packet is made of."""
        return frozenset({"theta"})

    def expected_reply_fields(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """What replies to a packet are made of: the same in every round."""
        return self.all_reply_fields

    @property
    def needs_all_nonzero_weights(self) -> bool:
        """Whether a local step compares all weights with each other, so that none that is not zero may be left out of sight."""
        return False

    @property
    def unseen_weights_are_equal(self) -> bool:
        """Whether a client treats all weights alike that neither a sparse broadcast nor its rows speak of: one can stand for them."""
        return False

    @property
    def needs_smoothness(self) -> bool:
        """Only the capped step asks for L."""
        return self.step_rule is StepRule.CAPPED

    # Schedules

    def learning_rate_factor(self, clock: Clock) -> float:
        """The cosine factor of every learning rate."""
        return schedules.cosine_decay(clock.round / clock.num_rounds, self.final_learning_rate_fraction)

    @property
    def milestones(self) -> dict[str, float]:
        """The parts of the rounds after which the method changes what it does, by what happens there."""
        if self.resolved_schedule is DensitySchedule.CONSTANT:
            return {}
        return {"schedule begins": self.anneal_start, "schedule ends": self.anneal_end}

    @property
    def resolved_schedule(self) -> DensitySchedule:
        """The schedule of messages."""
        return self.density_schedule

    @property
    def initial_message_density(self) -> float:
        """The density of messages when a falling schedule begins."""
        return min(INITIAL_DENSITY_FACTOR * self.density, MAX_INITIAL_DENSITY) if self.initial_density is None else self.initial_density

    def message_density(self, clock: Clock) -> float:
        """The density of this round's messages: 1 while warming up, then the schedule's."""
        if clock.round < self.warmup:
            return 1.0
        begin = self.anneal_start * clock.num_rounds
        progress = (clock.round - begin) / max(self.anneal_end * clock.num_rounds - begin, 1)
        return schedules.scheduled_density(
            self.density, max(self.initial_message_density, self.density), max(progress, 0.0), self.resolved_schedule
        )

    def message_budget(self, layout: Layout, clock: Clock) -> Budget:
        """How many weights each layer may send this round."""
        return self.budget_for(layout, self.message_density(clock))

    def final_budget(self, layout: Layout) -> Budget:
        """How many weights each layer of the finished model has."""
        return self.budget_for(layout, self.density)

    def budget_for(self, layout: Layout, density: float) -> Budget:
        """How many weights of each layer a density is, in whole groups; free coordinates come on top."""
        parts = budgets.allocate_budget(list(layout.layers.values()), budgets.num_kept(density, layout.num_gated), self.sparsity_allocation)
        if layout.groups is not None:
            parts = tuple((part, self._round_to_groups(kept, layout.groups[part])) for part, kept in parts)
        return (*parts, (slice(layout.num_gated, layout.size), layout.num_ungated)) if layout.num_ungated else parts

    @staticmethod
    def _round_to_groups(kept: int, groups: Tensor) -> int:
        """The most coordinates that whole groups can hold; where their sizes differ, what they may hold at most."""
        sizes = (groups - groups.amin()).bincount()
        least = int(sizes.amin())
        if kept < least:
            raise ValueError(f"a budget of {kept} weights is less than one group of {least}; ask for a higher density")
        return kept - kept % least if budgets.groups_have_equal_size(groups) else kept

    def replies_have_equal_length(self, layout: Layout) -> bool:
        """Whether all clients' messages have one length: not where a budget is filled with groups of unequal size."""
        return layout.groups is None or all(budgets.groups_have_equal_size(layout.groups[part]) for part, _ in self.final_budget(layout))

    # One step and one message

    def fused_sparse_step(self, objective: Objective, client: Any, at: Int64[Tensor, " n"], batch: Batch, clock: Clock) -> bool:
        """`client_step` on the features `at` some places of a client that holds more, where they stand: not by this method."""
        return False

    def apply_skipped_steps(self, client: Any, missed: Float[Tensor, "k p"], clock: Clock) -> Any:
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
        return optimizers.step_size(
            self.step_rule, self.learning_rate * self.learning_rate_factor(clock), loss, gradient, batch.smoothness, gate
        )

    def gradient_and_step_size(
        self, objective: Objective, theta: Float[Tensor, "k p"], batch: Batch, clock: Clock
    ) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k 1"]]:
        """The clipped gradient of the batch loss at theta, and the step along it."""
        loss, gradient = objective.gradient(theta, batch)
        return optimizers.clip_norm(gradient, self.max_gradient_norm), self.step_size(loss, gradient, batch, clock)

    def encode_sparse(self, vector: Float[Tensor, "*k p"], chosen: Bool[Tensor, "*k p"], draw: Draw) -> Packet:
        """The chosen entries of a vector as a message."""
        return sparse_packet(topk.mask_to_indices(chosen), {"theta": vector}, self.bits, draw)

    def encode_dense(self, vector: Float[Tensor, "*k p"], draw: Draw) -> Packet:
        """All of a vector as a message."""
        return dense_packet({"theta": vector}, self.bits, draw)

    def decode_dense(
        self, packet: Packet, dtype: torch.dtype, rest: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, "*k _n"]]:
        """What a packet, or a stack of them, says, part by part, as full vectors: `rest` (or 0) where it is silent."""
        return {name: part.densify((rest or {}).get(name), packet.size) for name, part in self.decode_sparse(packet, dtype).items()}

    def decode_sparse(self, packet: Packet, dtype: torch.dtype) -> dict[str, SparseVector]:
        """The parts: every field, and every scalar as a vector of one."""
        fields = {name: SparseVector(values.decode(dtype), packet.support) for name, values in packet.fields.items()}
        return fields | {name: SparseVector(packet.scalar(name, dtype)[..., None]) for name in packet.scalars}

    def client_deltas(self, packet: Packet, replies: Sequence[Reply], dtype: torch.dtype) -> dict[str, Float[Tensor, "k _n"]]:
        """Each reply less the broadcast, 0 where it is silent: an absent entry is no change. What was not broadcast is a difference."""
        sent = self.decode_dense(packet, dtype)
        return {name: said - sent[name] if name in sent else said for name, said in self.decode_replies(replies, dtype, sent).items()}

    def decode_replies(
        self, replies: Sequence[Reply], dtype: torch.dtype, rest: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, "k _n"]]:
        """What `read` says of each reply, all of one form at once."""
        if (stack := stack_replies(replies)) is not None:
            return self.decode_dense(stack, dtype, rest)
        said = [self.decode_dense(reply.packet, dtype, rest) for reply in replies]
        return {name: torch.stack([parts[name] for parts in said]) for name in said[0]}

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """The coordinates that replies to a packet speak of by rule, whatever the data: its own, or all where clients choose."""
        return None

    def aggregate_replies(
        self, packet: Packet, replies: Sequence[Reply], like: Float[Tensor, " p"], clock: Clock, draw: Draw
    ) -> dict[str, Float[Tensor, " _n"]]:
        """What the cohort says, part by part: the weighted mean, with 0 where a packet is silent (L152).

        A robust or private mean is the broadcast and a mean of the differences to it: there an absent entry is no change.
        """
        shares = client_weights(num_examples(replies), self.client_weighting, like.dtype, like.device)
        if self.privacy is not None or self.aggregator is not Aggregator.WEIGHTED:
            sent, moved = self.decode_dense(packet, like.dtype), self.client_deltas(packet, replies, like.dtype)
            if self.privacy is None:
                step = robust_aggregate(moved, shares, self.aggregator, self.max_malicious_fraction)
            else:
                step = private_mean(moved, self.privacy, self.public_support(packet, clock), draw)
            return {name: sent[name] + part if name in sent else part for name, part in step.items()}
        stack = stack_replies(replies)
        if stack is None or self.client_weighting is ClientWeighting.RIEMANNIAN:
            said = self.decode_replies(replies, like.dtype)
            return {name: mean(part, shares) if name in GATE_FIELDS else self.mean_vector(part, shares) for name, part in said.items()}
        return self.weighted_mean(stack, shares)

    def weighted_mean(self, stack: Packet, shares: Float[Tensor, " k"]) -> dict[str, Float[Tensor, " _n"]]:
        """The weighted mean of what a stack says, part by part."""
        return {name: sparse_mean(part, shares, stack.size) for name, part in self.decode_sparse(stack, shares.dtype).items()}

    def mean_vector(self, vectors: Float[Tensor, "k n"], shares: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
        """The mean of vectors: plain, or on the sphere (decision D6)."""
        return riemannian_mean(vectors, shares) if self.client_weighting is ClientWeighting.RIEMANNIAN else mean(vectors, shares)


def num_examples(replies: Sequence[Reply]) -> tuple[int, ...]:
    """n_k of those who replied."""
    return tuple(replies.num_examples if isinstance(replies, StackedReplies) else [reply.num_examples for reply in replies])


def project_to_budget(kept: Budget, theta: Float[Tensor, " p"], layout: Layout) -> Float[Tensor, " p"]:
    """The final projection: the largest weights of the budget, zeros elsewhere (decision C5).

    A kept weight that rounding in dense messages made exactly zero becomes the smallest float: the count holds, the model is the same.
    """
    some = torch.where(theta == 0, torch.full_like(theta, torch.finfo(torch.float32).tiny), theta)
    return torch.where(topk.top_mask(theta.abs(), kept, layout.groups), some, torch.zeros_like(theta))


def server_update(
    method: BaseAlgorithm, moments: Moments, sent: Float[Tensor, " p"], mean: Float[Tensor, " p"]
) -> tuple[Float[Tensor, " p"], Moments]:
    """The server's move from what it sent towards the cohort's mean: sent - mean is its pseudo-gradient."""
    return optimizers.step(
        method.server_optimizer, moments, sent, sent - mean, method.server_learning_rate, momentum=method.server_momentum
    )


def require_at_least(least: float, **fields: float) -> None:
    """Refuse values below `least`."""
    for name, value in fields.items():
        if not value >= least:
            raise ValueError(f"{_option_name(name)} must be at least {least}; got {value}")


def require_positive(**fields: float) -> None:
    """Refuse values that are not above 0."""
    for name, value in fields.items():
        if not value > 0:
            raise ValueError(f"{_option_name(name)} must be above 0; got {value}")


def require_fraction(**fields: float) -> None:
    """Refuse values outside [0, 1]."""
    for name, value in fields.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{_option_name(name)} is a fraction and must lie between 0 and 1; got {value}")


def _option_name(name: str) -> str:
    return "algorithm." + name.replace("_", "-")
