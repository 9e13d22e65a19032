"""Default options for a kind of model, for every algorithm."""

from dataclasses import fields
from typing import Any, TypeVar

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.option_rules import option_name
from fedsieve.algorithms.recipes import Recipe, recipe_values
from fedsieve.algorithms.ssfl import Saliency
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.optimizers import StepRule
from fedsieve.core.schedules import DensitySchedule
from fedsieve.objectives.losses import Loss

Algorithm = TypeVar("Algorithm", bound=BaseAlgorithm)
DENSITY_ANNEALING = {"density_schedule": DensitySchedule.CUBIC}
"""Messages are denser at first: a model that has learned little would select the wrong weights."""
NETWORK_DEFAULTS = {
    **DENSITY_ANNEALING,
    "sparsity_allocation": BudgetRule.ERK,
    "step_rule": StepRule.CONSTANT,
    "learning_rate": 0.8,
    "max_gradient_norm": 1.0,
    "local_steps": 60,
    "exchanges": 60,
    "saliency": Saliency.WEIGHT_TIMES_GRADIENT,
    "learn_gates": False,
}
"""For networks: budgets per layer, annealed density, clipped steps, as flat regions make the Polyak step diverge; no sampled gates in the
local steps of sieve, because their noise multiplies from layer to layer."""


def network_options(algorithm: type[BaseAlgorithm]) -> dict[str, Any]:
    """Return the defaults of an algorithm for networks: those it has an option for; an annealed density schedule of its own stays."""
    supported = algorithm.option_names()
    if algorithm.density_schedule is DensitySchedule.CUBIC:
        supported -= {*DENSITY_ANNEALING}
    return {name: value for name, value in NETWORK_DEFAULTS.items() if name in supported}


def batches_per_round(algorithm: type[BaseAlgorithm], count: int) -> dict[str, int]:
    """Return the option that sets n(B), the number of a client's mini-batches in a round."""
    return {"exchanges" if "exchanges" in algorithm.option_names() else "local_steps": count}


def recipe_options(algorithm: type[BaseAlgorithm], recipe: Recipe, loss: Loss | None) -> dict[str, Any]:
    """Return the options of the section `algorithm` that a recipe sets, and the recipe itself; nothing for the recommended defaults."""
    values = recipe_values(algorithm.recipes, recipe, loss)
    names = algorithm.option_names()
    return {} if recipe is Recipe.RECOMMENDED else {name: value for name, value in values.items() if name in names} | {"recipe": recipe}


def require_effect(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm, or raise ValueError if an option has another value than its recipe's and no effect beside the others."""
    defaults = {f.name: f.default for f in fields(algorithm)}
    recipes = [defaults | recipe_values(algorithm.recipes, algorithm.recipe, loss) for loss in Loss]
    for name, setting in algorithm.needed_settings.items():
        if name in algorithm.option_names() and getattr(algorithm, name) not in [values[name] for values in recipes]:
            value = getattr(algorithm, name)
            raise ValueError(f"{option_name(name)} {value} has no effect without --algorithm.{setting}; add that, or leave it out")
    return algorithm


def require_recipes(algorithm_name: str, recipe: object) -> None:
    """Raise ValueError if a recipe is set and the algorithm has none to choose from."""
    if recipe is not None and not algorithm_class(algorithm_name).recipes:
        having = ", ".join(name for name in ALGORITHMS if algorithm_class(name).recipes)
        raise ValueError(
            f"algorithm.recipe {recipe} needs an algorithm of the paper, and {algorithm_name} is none; "
            f"leave it out, or use one that has recipes: {having}"
        )
