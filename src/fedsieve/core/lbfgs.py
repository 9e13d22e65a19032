"""L-BFGS for a smooth convex function of which only gradients are known (Liu & Nocedal 1989)."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

NUM_PAIRS = 10
"""The number of steps from which the curvature is estimated."""
MAX_SLOPE_RATIO = 0.5
"""A step is too long if the slope at its end is positive and above this fraction of the slope at its start."""


def minimize(
    gradient: Callable[[Float[Tensor, " m"]], Float[Tensor, " m"] | None],
    start: Float[Tensor, " m"],
    slope: Float[Tensor, " m"],
    *,
    max_gradients: int,
    max_decrease: float,
) -> Float[Tensor, " m"]:
    """Return a point where L-BFGS expects to decrease the function by at most `max_decrease`, after at most `max_gradients` gradients.

    `slope` is the gradient at `start`, and counts as one. A step that is too long is shortened to the zero of the slope along it, by the
    secant. None as gradient ends the search.
    """
    count, point, pairs = 1, start, []
    while count < max_gradients:
        direction = -inverse_hessian_product(slope, pairs)
        descent = -(slope * direction).sum()
        if descent <= (2 * max_decrease if pairs else 0):
            break
        step, is_too_long = 1.0, True
        while is_too_long:
            if count == max_gradients:
                return point
            trial = point + step * direction
            new_slope, count = gradient(trial), count + 1
            if new_slope is None:
                return point
            along = (new_slope * direction).sum()
            is_too_long = bool(along > MAX_SLOPE_RATIO * descent)
            step = step * float(descent / (descent + along)) if is_too_long else step
        moved, change = trial - point, new_slope - slope
        if (moved * change).sum() > 0:
            pairs = [*pairs, (moved, change)][-NUM_PAIRS:]
        point, slope = trial, new_slope
    return point


def inverse_hessian_product(
    vector: Float[Tensor, " m"], pairs: list[tuple[Float[Tensor, " m"], Float[Tensor, " m"]]]
) -> Float[Tensor, " m"]:
    """Return H v by the two-loop recursion; without pairs H is the identity."""
    factors = []
    for moved, change in reversed(pairs):
        factor = (moved * vector).sum() / (moved * change).sum()
        vector = vector - factor * change
        factors.append(factor)
    if pairs:
        moved, change = pairs[-1]
        vector = vector * ((moved * change).sum() / (change * change).sum())
    for (moved, change), factor in zip(pairs, reversed(factors), strict=True):
        vector = vector + (factor - (change * vector).sum() / (moved * change).sum()) * moved
    return vector
