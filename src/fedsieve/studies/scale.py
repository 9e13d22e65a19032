"""Sizes of a study: a smoke test, an hour or two on two cores, or the size of the paper. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ScaleName(StrEnum):
    """Names of the sizes."""

    SMOKE = "smoke"
    """little data and few rounds: checks that everything runs; the numbers mean nothing"""
    SHORT = "short"
    """full-size synthetic tasks, 5 seeds (many instances 10, sweeps 3); real data with 3 seeds and 50 rounds"""
    PAPER = "paper"
    """10 seeds, 50 for the figure over many instances, real data with all rounds"""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes and seeds of a study."""

    name: ScaleName
    seeds: Sequence[int]
    """seeds of synthetic tasks; none of them was used for tuning"""
    sweep_seeds: Sequence[int]
    """seeds of large studies that are not in the paper"""
    instance_seeds: Sequence[int]
    """seeds of the figure over many random instances"""
    real_seeds: Sequence[int]
    """seeds of real data"""
    real_rounds: int | None = None
    """rounds on real data; None: the algorithm's default"""
    num_examples: int = 10_000
    num_features: int = 1000
    clients: int = 100
    gradient_rounds: int = 50
    """epochs of Tables 1 and 2 and of the gate figures"""
    rounds: int = 100
    """rounds of algorithms that average parameters"""
    local_steps: int | None = None
    """local steps or exchanges per round; None: the algorithm's default"""
    use_digits_only: bool = False
    """replace real data by scikit-learn's digits, and label them so"""

    @property
    def is_smoke_test(self) -> bool:
        """Whether the numbers mean nothing."""
        return self.name is ScaleName.SMOKE


SCALES = {
    ScaleName.SMOKE: Scale(
        name=ScaleName.SMOKE,
        seeds=(0, 1),
        sweep_seeds=(0,),
        instance_seeds=(0, 1),
        real_seeds=(0,),
        real_rounds=3,
        num_examples=200,
        num_features=40,
        clients=10,
        gradient_rounds=4,
        rounds=4,
        local_steps=3,
        use_digits_only=True,
    ),
    ScaleName.SHORT: Scale(
        name=ScaleName.SHORT, seeds=range(5), sweep_seeds=range(3), instance_seeds=range(10), real_seeds=range(3), real_rounds=50
    ),
    ScaleName.PAPER: Scale(name=ScaleName.PAPER, seeds=range(10), sweep_seeds=range(10), instance_seeds=range(50), real_seeds=range(10)),
}
