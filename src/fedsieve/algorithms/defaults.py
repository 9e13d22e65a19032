"""Settings that go with a kind of model, whichever method trains it."""

from collections.abc import Mapping
from typing import Any

from fedsieve.algorithms.base import Method
from fedsieve.core.optimizers import StepRule
from fedsieve.core.selection import BudgetRule, Schedule

FALLING = {"schedule": Schedule.CUBIC}
"""Messages are denser at first: selection by a start that has learned little keeps the wrong weights."""
CAREFUL = {
    **FALLING,
    "budget": BudgetRule.ERK,
    "step_rule": StepRule.CONSTANT,
    "rate": 0.8,
    "clip": 1.0,
    "steps": 60,
}
"""For networks, whose flat regions make Polyak's step explode: per-layer budgets, a density schedule, short steps."""


def fitting(method: type[Method], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that a method has; one with a schedule of its own keeps it."""
    own = method.offered()
    if method.schedule is Schedule.CUBIC:
        own -= {*FALLING, "schedule_end"}
    return {name: value for name, value in settings.items() if name in own}
