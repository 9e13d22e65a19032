"""Client-level differential privacy: settings, and what a run has spent. The accountant is loaded only when asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import Any

from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.private_mean import GaussianMechanism

RENYI_ORDERS = (*range(2, 33), *range(36, 65, 4), 80, 96, 128)
"""Orders of Renyi divergence that are tried; whole ones are exact in the bound, and epsilon is the least over all."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Noise that hides each client; off unless there is some."""

    noise_multiplier: float = 0.0
    """noise multiplier: its standard deviation over the most that one client can change; 0 is no privacy"""
    clip: float | None = None
    """longest difference of a client to the broadcast; longer ones are shortened (default: 1)"""
    gate_clip: float | None = None
    """the same for gates, which have a scale of their own (default: 1)"""
    delta: float | None = None
    """chance at which epsilon may fail (default: a tenth of 1 / clients)"""

    def __post_init__(self) -> None:
        """Refuse what would protect nobody."""
        if not 0 <= self.noise_multiplier < inf:
            raise ValueError(
                f"privacy.noise-multiplier is a noise multiplier and must be at least 0 and finite; got {self.noise_multiplier:g}"
            )
        for name in ("clip", "gate_clip", "delta"):
            value, flag = getattr(self, name), name.replace("_", "-")
            if value is not None and self.noise_multiplier == 0:
                raise ValueError(f"privacy.{flag} without privacy.noise-multiplier protects nobody; set privacy.noise-multiplier too")
            if value is not None and not 0 < value < inf:
                raise ValueError(f"privacy.{flag} must be above 0 and finite; got {value:g}")
        if self.delta is not None and not self.delta < 1:
            raise ValueError(f"privacy.delta is a probability and must be below 1; got {self.delta:g}")
        if self.noise_multiplier and find_spec("dp_accounting") is None:
            raise ValueError("privacy.noise-multiplier needs an accountant that is not installed: pip install 'fedsieve[privacy]'")

    def validate(self, federation: Any, reply_fields: frozenset[str], *, centralized: bool) -> None:
        """Refuse what would void the guarantee: one client's reply must not decide what another's counts, nor count more than once."""
        if not self.noise_multiplier:
            return
        if centralized:
            raise ValueError(
                "privacy.noise-multiplier hides one client among others, and --centralized has only one; leave one of them out"
            )
        if federation.client_weighting is not ClientWeighting.UNIFORM:
            raise ValueError(
                f"privacy.noise-multiplier gives every client one say, or one with many rows would show; "
                f"leave out federation.client-weighting {federation.client_weighting}"
            )
        if federation.aggregator is not Aggregator.WEIGHTED:
            raise ValueError(
                f"privacy.noise-multiplier hides a client in a sum of clipped differences; how far one client can move federation.aggregator "
                f"{federation.aggregator} is not bounded that way; leave one of them out"
            )
        if federation.max_norm_ratio not in (None, inf):
            raise ValueError(
                "federation.max-norm-ratio compares a reply with those of others, so one client could decide whether another counts; "
                "privacy.clip bounds every reply already; leave out federation.max-norm-ratio"
            )
        if federation.server_examples:
            raise ValueError(
                "privacy.noise-multiplier is for replies of clients, and the server's own rows would be clipped and hidden like one; "
                "leave out federation.server-examples"
            )
        if self.gate_clip is not None and not any("gate" in name for name in reply_fields):
            raise ValueError("privacy.gate-clip is of methods that send gates, and this one sends none; leave it out")

    def mechanism(self, cohort: int) -> GaussianMechanism | None:
        """What the server's mean needs to know."""
        return GaussianMechanism(self.noise_multiplier, self.clip or 1.0, self.gate_clip or 1.0, cohort) if self.noise_multiplier else None


def epsilon_by_round(noise: float, delta: float, clients: int, cohort: int, exchanges: int, first: int = 0) -> Iterator[float]:
    """Epsilon after each round, from round `first` on: Renyi accounting of cohorts of fixed size drawn without replacement.

    The exchanges of a round see one cohort, so they are composed before the sampling is taken into account. Neighbours differ in one
    client replaced by another (Wang, Balle and Kasiviswanathan 2019).
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(RENYI_ORDERS, neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    release = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), exchanges)
    event = dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, release) if cohort < clients else release
    if first:
        accountant.compose(event, first)
    while True:
        accountant.compose(event)
        yield float(accountant.get_epsilon(delta))
