"""How large a study is: a smoke test, an hour or two on two cores, or the paper's own size. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class ScaleName(StrEnum):
    """Sizes by the name a user types."""

    SMOKE = "smoke"
    """tiny rows and few rounds: shows that everything runs, no number means anything"""
    SHORT = "short"
    """full-size generated tasks, 5 seeds (many instances 10, attacks and other settings 3); real data with 3 seeds and 50 rounds"""
    PAPER = "paper"
    """10 seeds, 50 for the figure over many instances, real data with all rounds"""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes and seeds."""

    name: ScaleName
    seeds: Sequence[int]
    """of generated tasks; none of them was used for tuning"""
    sweep_seeds: Sequence[int]
    """of studies with many cells that are not the paper's"""
    instance_seeds: Sequence[int]
    """of the figure over many random instances"""
    real_seeds: Sequence[int]
    real_rounds: int | None = None
    """None: the method's own"""
    num_examples: int = 10_000
    num_features: int = 1000
    clients: int = 100
    gradient_rounds: int = 50
    """epochs of Tables 1 and 2 and the gate figures"""
    rounds: int = 100
    """rounds of methods that average parameters"""
    local_steps: int | None = None
    """local steps or exchanges a round; None: the method's own"""
    use_digits_only: bool = False
    """real data replaced by scikit-learn's digits, and labelled so"""

    @property
    def is_smoke_test(self) -> bool:
        """Whether numbers mean nothing."""
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
