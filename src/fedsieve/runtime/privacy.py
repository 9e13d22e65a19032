"""Client-level differential privacy: settings, and what a run has spent. The accountant is loaded only when asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import Any

from fedsieve.core.aggregation import Mean, Weighting
from fedsieve.core.private_mean import Noise

ORDERS = (*range(2, 33), *range(36, 65, 4), 80, 96, 128)
"""Orders of Renyi divergence that are tried; whole ones are exact in the bound, and epsilon is the least over all."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Noise that hides each client; off unless there is some."""

    noise: float = 0.0
    """noise multiplier: its standard deviation over the most that one client can change; 0 is no privacy"""
    clip: float | None = None
    """longest difference of a client to the broadcast; longer ones are shortened (default: 1)"""
    gate_clip: float | None = None
    """the same for gates, which have a scale of their own (default: 1)"""
    delta: float | None = None
    """chance at which epsilon may fail (default: a tenth of 1 / clients)"""

    def __post_init__(self) -> None:
        """Refuse what would protect nobody."""
        if not 0 <= self.noise < inf:
            raise ValueError(f"privacy.noise is a noise multiplier and must be at least 0 and finite; got {self.noise:g}")
        for name in ("clip", "gate_clip", "delta"):
            value, flag = getattr(self, name), name.replace("_", "-")
            if value is not None and self.noise == 0:
                raise ValueError(f"privacy.{flag} without privacy.noise protects nobody; set privacy.noise too")
            if value is not None and not 0 < value < inf:
                raise ValueError(f"privacy.{flag} must be above 0 and finite; got {value:g}")
        if self.delta is not None and not self.delta < 1:
            raise ValueError(f"privacy.delta is a probability and must be below 1; got {self.delta:g}")
        if self.noise and find_spec("dp_accounting") is None:
            raise ValueError("privacy.noise needs an accountant that is not installed: pip install 'fedsieve[privacy]'")

    def check(self, federation: Any, reply_fields: frozenset[str]) -> None:
        """Refuse what would void the guarantee: one client's reply must not decide what another's counts, nor count more than once."""
        if not self.noise:
            return
        if federation.central:
            raise ValueError("privacy.noise hides one client among others, and federation.central has only one; leave one of them out")
        if federation.weights is not Weighting.UNIFORM:
            raise ValueError(
                f"privacy.noise gives every client one say, or one with many rows would show; "
                f"leave out federation.weights {federation.weights}"
            )
        if federation.mean is not Mean.WEIGHTED:
            raise ValueError(
                f"privacy.noise hides a client in a sum of clipped differences; how far one client can move federation.mean "
                f"{federation.mean} is not bounded that way; leave one of them out"
            )
        if federation.norm_limit not in (None, inf):
            raise ValueError(
                "federation.norm-limit compares a reply with those of others, so one client could decide whether another counts; "
                "privacy.clip bounds every reply already; leave out federation.norm-limit"
            )
        if federation.server_rows:
            raise ValueError(
                "privacy.noise is for replies of clients, and the server's own rows would be clipped and hidden like one; "
                "leave out federation.server-rows"
            )
        if self.gate_clip is not None and not any("gate" in name for name in reply_fields):
            raise ValueError("privacy.gate-clip is of methods that send gates, and this one sends none; leave it out")

    def settings(self, cohort: int) -> Noise | None:
        """What the server's mean needs to know."""
        return Noise(self.noise, self.clip or 1.0, self.gate_clip or 1.0, cohort) if self.noise else None


def spent(noise: float, delta: float, clients: int, cohort: int, exchanges: int, first: int = 0) -> Iterator[float]:
    """Epsilon after each round, from round `first` on: Renyi accounting of cohorts of fixed size drawn without replacement.

    The exchanges of a round see one cohort, so they are composed before the sampling is taken into account. Neighbours differ in one
    client replaced by another (Wang, Balle and Kasiviswanathan 2019).
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS, neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    release = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), exchanges)
    event = dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, release) if cohort < clients else release
    if first:
        accountant.compose(event, first)
    while True:
        accountant.compose(event)
        yield float(accountant.get_epsilon(delta))
