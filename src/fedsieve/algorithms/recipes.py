"""Recipes: named sets of defaults for the options of an algorithm. Each algorithm declares its own as data."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from fedsieve.objectives.losses import Loss

Cls = TypeVar("Cls", bound=type)


class Recipe(StrEnum):
    """Where the defaults of an algorithm come from."""

    RECOMMENDED = "recommended"
    """the defaults of the class"""
    PAPER = "paper"
    """what the paper states, formulas as printed; the differences are listed in docs/differences.md"""


class ByLoss(NamedTuple):
    """A value for the squared loss, whose gradient grows with the error, and one for losses with bounded gradients."""

    squared: Any
    bounded: Any


Recipes = Mapping[Recipe, Mapping[str, Any]]
"""The option values of each recipe that differs from the defaults of the class."""


def parse_recipe(name: str) -> Recipe:
    """Return the recipe with this name."""
    if name not in list(Recipe):
        raise ValueError(f"algorithm.recipe is one of {', '.join(Recipe)}; got {name}")
    return Recipe(name)


def recipe_values(recipes: Recipes, recipe: Recipe, loss: Loss | None) -> dict[str, Any]:
    """Return the option values of a recipe for a loss; an unknown loss may have unbounded gradients."""
    bounded = loss is not None and loss is not Loss.SQUARED
    values = recipes.get(recipe, {})
    return {name: value[bounded] if isinstance(value, ByLoss) else value for name, value in values.items()}


def with_recipes(cls: Cls) -> Cls:
    """Make a dataclass fill options that the caller does not set from the recipe, and only then from the defaults of the class."""
    generated: Callable[..., None] = cls.__init__

    @wraps(generated)
    def init(self: Any, *, recipe: Recipe | str = Recipe.RECOMMENDED, **options: Any) -> None:
        recipe = parse_recipe(recipe)
        generated(self, recipe=recipe, **recipe_values(cls.recipes, recipe, None) | options)

    cls.__init__ = init  # pyright: ignore[reportAttributeAccessIssue]  # pyright takes it for the constructor of `type`
    return cls
