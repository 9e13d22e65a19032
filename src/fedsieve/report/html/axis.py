"""Linear and logarithmic axes with round ticks."""

import math
from collections.abc import Iterable
from typing import NamedTuple


class AxisScale(NamedTuple):
    """An axis that maps [low, high] to the pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a number."""
        low, high, value = (
            (math.log10(max(v, 1e-300)) for v in (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        )
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, max_ticks: int = 6) -> list[float]:
        """Return the ticks of the axis."""
        if self.is_log and self.high / self.low > 5:
            return log_ticks(self.low, self.high, max_ticks)
        return linear_ticks(self.low, self.high, max_ticks)


def linear_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / max_ticks))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= max_ticks)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return powers of ten, with 2 and 5 between them if there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**n for n in decades for factor in factors if low * 0.999 <= factor * 10.0**n <= high * 1.001]
        if len(found) <= max_ticks:
            return found
    return found[:: math.ceil(len(found) / max_ticks)]


def format_tick(value: float) -> str:
    """Return a short label of a tick."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}".replace("e-0", "e-")


def value_range(values: Iterable[float | None], *, include_zero: bool = False) -> tuple[float, float]:
    """Return the smallest and the largest finite number, never equal; optionally with zero."""
    finite = [v for v in values if v is not None and math.isfinite(v)] + ([0.0] if include_zero else [])
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))
