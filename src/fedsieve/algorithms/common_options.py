"""The options that all algorithms share, their validation, and the schedules that they describe."""

from dataclasses import dataclass, field, fields
from math import cos, inf, pi
from typing import ClassVar, Literal

from fedsieve.algorithms.option_rules import option_name, require_at_least, require_fraction, require_positive
from fedsieve.algorithms.recipes import Recipe, Recipes
from fedsieve.core import budgets
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.batches import BatchSampling
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.private_mean import GaussianMechanism
from fedsieve.core.quantization import ALLOWED_BITS
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Clock

DENSITY_SCHEDULE_OPTIONS = frozenset({"density_schedule", "initial_density", "anneal_start", "anneal_end", "warmup"})
"""Options of the density of messages. Algorithms with dense messages or a fixed support do not support them."""
SCHEDULE_DETAILS = ("initial_density", "anneal_start", "anneal_end")
"""Those that a constant density does not use."""


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every algorithm. The text below a field is its help text."""

    allowed_bits: ClassVar[tuple[int | None, ...]] = ALLOWED_BITS
    """bits per value in messages; None if the algorithm decides"""
    unsupported_options: ClassVar[frozenset[str]] = frozenset()
    """options below that have no effect on this algorithm; it does not offer them and rejects other values"""
    initial_density_factor: ClassVar[float] = 6.0
    max_initial_density: ClassVar[float] = 0.3
    """initial density of an annealed schedule: the factor times the target, at most this density (decision H8)"""
    recipes: ClassVar[Recipes] = {}
    """other sets of defaults; an algorithm without recipes does not offer the option `recipe`"""

    density: float = field(default=0.05, metadata={"section": "run"})
    """fraction of weights that may be nonzero"""
    client_weighting: ClientWeighting = field(default=ClientWeighting.EXAMPLES, metadata={"section": "federation"})
    """weights of clients in the average"""
    aggregator: Aggregator = field(default=Aggregator.WEIGHTED, metadata={"section": "federation"})
    """how client updates are aggregated"""
    max_malicious_fraction: float = field(default=0.3, metadata={"section": "federation"})
    """fraction of a cohort that may be malicious, for the trimmed mean and multi-Krum"""
    privacy: GaussianMechanism | None = field(default=None, metadata={"section": "privacy"})
    """clipping and noise of a differentially private mean; None: no privacy"""
    default_max_norm_ratio: float = field(default=100.0, metadata={"section": "federation"})
    """maximum norm of an update over the cohort's median norm, by default; ratios of 30 were observed for honest clients"""
    recipe: Recipe = Recipe.RECOMMENDED
    """defaults of the other options: recommended, or what the paper states (docs/differences.md)"""
    batch_size: int | Literal["all"] = 32
    """examples per local step, or all examples of the client"""
    batch_sampling: BatchSampling = BatchSampling.SHUFFLED
    """how mini-batches are drawn: from examples shuffled once per round, or each one independently as in the paper"""
    local_steps: int = 30
    """n(B): local steps per round"""
    learning_rate: float = 1.0
    """learning rate of the weights: the step size, or the factor of the Polyak step"""
    final_learning_rate_fraction: float = 0.02
    """the learning rate decays along a half cosine to this fraction"""
    step_rule: StepRule = StepRule.POLYAK
    """step size of a client: the learning rate, capped at 1/L, or Polyak's"""
    max_gradient_norm: float = inf
    """maximum norm of a client's gradient; longer gradients are clipped"""
    bits: Literal[32, 16, 8, 4] = 8
    """bits per value in messages"""
    sparsity_allocation: BudgetRule = BudgetRule.GLOBAL
    """how the kept weights are distributed over layers"""
    density_schedule: DensitySchedule = DensitySchedule.CONSTANT
    """how the density of messages approaches its target"""
    initial_density: float | None = None
    """density of messages at the start of an annealed schedule (default: six times the target, at most .3)"""
    anneal_start: float = 0.0
    """fraction of the rounds after which annealing starts"""
    anneal_end: float = 0.5
    """fraction of the rounds after which the target density is reached"""
    warmup: int = 0
    """number of first rounds with dense messages"""
    server_optimizer: Optimizer = Optimizer.SGD
    """optimizer of the server"""
    server_learning_rate: float = 1.0
    """learning rate of the server"""
    server_momentum: float = 0.9
    """momentum of the server's optimizer (momentum and adam)"""
    residual_decay: float = 0.0
    """fraction of the weights left out of a broadcast that the server keeps for the next round (error feedback)"""

    def __post_init__(self) -> None:
        """Validate the options."""
        for name in sorted(self.unsupported_options):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{option_name(name)} has no effect on {type(self).__name__}, so it cannot be set; got {getattr(self, name)}"
                )
        if self.recipe is not Recipe.RECOMMENDED and self.recipe not in self.recipes:
            raise ValueError(f"algorithm.recipe {self.recipe} is none of {type(self).__name__}, which has no recipes; leave it out")
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
            initial_density=self.initial_density or 0,
            final_learning_rate_fraction=self.final_learning_rate_fraction,
            server_momentum=self.server_momentum,
            anneal_start=self.anneal_start,
            anneal_end=self.anneal_end,
        )
        if self.density_schedule is not DensitySchedule.CONSTANT and not self.anneal_start < self.anneal_end:
            raise ValueError(f"algorithm.anneal-start {self.anneal_start:g} must be before algorithm.anneal-end {self.anneal_end:g}")
        if not 0 <= self.max_malicious_fraction < 0.5:
            raise ValueError(
                f"federation.max-malicious-fraction must be at least 0 and below 0.5: no aggregator tolerates a malicious majority; "
                f"got {self.max_malicious_fraction:g}"
            )
        if self.aggregator is not Aggregator.WEIGHTED and self.client_weighting is ClientWeighting.RIEMANNIAN:
            raise ValueError(
                f"federation.client-weighting riemannian is a mean itself and cannot be combined with federation.aggregator "
                f"{self.aggregator}; use examples, sqrt or uniform"
            )
        if self.bits not in self.allowed_bits:
            raise ValueError(f"algorithm.bits must be one of {', '.join(map(str, ALLOWED_BITS))}; got {self.bits}")

    @classmethod
    def option_names(cls) -> frozenset[str]:
        """Return the names of the options in the section `algorithm`."""
        names = frozenset(f.name for f in fields(cls) if "section" not in f.metadata) - cls.unsupported_options
        return names if cls.recipes else names - {"recipe"}

    @property
    def needed_settings(self) -> dict[str, str]:
        """Options without effect beside the others, each with the setting that it needs."""
        needed = {} if self.density_schedule is not DensitySchedule.CONSTANT else dict.fromkeys(SCHEDULE_DETAILS, "density-schedule cubic")
        return needed | ({"server_momentum": "server-optimizer momentum"} if self.server_optimizer is Optimizer.SGD else {})

    def learning_rate_factor(self, clock: Clock) -> float:
        """Return the factor of every learning rate in this round: from 1 to the final fraction along half a cosine."""
        final = self.final_learning_rate_fraction
        return final + (1 - final) * (1 + cos(pi * min(clock.round / clock.num_rounds, 1.0))) / 2

    @property
    def milestones(self) -> dict[str, float]:
        """The fractions of the rounds after which the algorithm changes its behaviour, by description."""
        if self.density_schedule is DensitySchedule.CONSTANT:
            return {}
        return {"schedule begins": self.anneal_start, "schedule ends": self.anneal_end}

    def message_density(self, clock: Clock) -> float:
        """Return the density of this round's messages: 1 during warm-up, then constant or a cubic decrease (Zhu & Gupta 2017)."""
        if clock.round < self.warmup:
            return 1.0
        if self.density_schedule is DensitySchedule.CONSTANT:
            return self.density
        begin = self.anneal_start * clock.num_rounds
        progress = (clock.round - begin) / max(self.anneal_end * clock.num_rounds - begin, 1)
        initial = min(self.initial_density_factor * self.density, self.max_initial_density)
        initial = max(initial if self.initial_density is None else self.initial_density, self.density)
        return self.density + (initial - self.density) * (1 - min(max(progress, 0.0), 1.0)) ** 3
