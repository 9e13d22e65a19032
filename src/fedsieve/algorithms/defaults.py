"""Settings that go with a kind of model, whichever method trains it."""

from collections.abc import Mapping
from typing import Any

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.optimizers import StepRule
from fedsieve.core.schedules import DensitySchedule

DENSITY_ANNEALING = {"density_schedule": DensitySchedule.CUBIC}
"""Messages are denser at first: selection by a start that has learned little keeps the wrong weights."""
NETWORK_DEFAULTS = {
    **DENSITY_ANNEALING,
    "sparsity_allocation": BudgetRule.ERK,
    "step_rule": StepRule.CONSTANT,
    "learning_rate": 0.8,
    "max_gradient_norm": 1.0,
    "local_steps": 60,
}
"""For networks, whose flat regions make Polyak's step explode: per-layer budgets, a density schedule, short steps."""


def select_supported(method: type[BaseAlgorithm], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that a method has; one with a schedule of its own keeps it."""
    own = method.option_names()
    if method.density_schedule is DensitySchedule.CUBIC:
        own -= {*DENSITY_ANNEALING, "anneal_end"}
    return {name: value for name, value in settings.items() if name in own}
