"""Client-level differential privacy: options and accounting. The accountant is imported on first use."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from secrets import token_bytes
from typing import Any

from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.packets import GATE_FIELDS
from fedsieve.core.private_mean import GaussianMechanism

SECRET_BYTES = 32
RENYI_ORDERS = (*range(2, 33), *range(36, 65, 4), 80, 96, 128)
"""Orders of the Renyi divergence; the bound is exact for integers, and epsilon is the minimum over all orders."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Options of client-level differential privacy; it is off if the noise multiplier is 0."""

    noise_multiplier: float = 0.0
    """standard deviation of the noise over the largest change by one client; 0: no privacy"""
    clip: float | None = None
    """maximum norm of a client's difference to the broadcast; longer differences are clipped (default: 1)"""
    gate_clip: float | None = None
    """maximum norm of a client's difference in gates (default: 1)"""
    delta: float | None = None
    """delta of (epsilon, delta)-differential privacy (default: 0.1 / clients)"""

    def __post_init__(self) -> None:
        """Validate the options; an option without effect is an error."""
        if not 0 <= self.noise_multiplier < inf:
            raise ValueError(
                f"privacy.noise-multiplier is a noise multiplier and must be at least 0 and finite; got {self.noise_multiplier:g}"
            )
        for name in ("clip", "gate_clip", "delta"):
            value, flag = getattr(self, name), name.replace("_", "-")
            if value is not None and self.noise_multiplier == 0:
                raise ValueError(f"privacy.{flag} has no effect without privacy.noise-multiplier; set privacy.noise-multiplier too")
            if value is not None and not 0 < value < inf:
                raise ValueError(f"privacy.{flag} must be above 0 and finite; got {value:g}")
        if self.delta is not None and not self.delta < 1:
            raise ValueError(f"privacy.delta is a probability and must be below 1; got {self.delta:g}")
        if self.noise_multiplier and find_spec("dp_accounting") is None:
            raise ValueError("privacy.noise-multiplier needs an accountant that is not installed: pip install 'fedsieve[privacy]'")

    def validate(self, federation: Any, reply_fields: frozenset[str], *, centralized: bool) -> None:
        """Raise ValueError if a setting voids the guarantee: a client's reply must not influence the weight of other replies."""
        if not self.noise_multiplier:
            return
        if centralized:
            raise ValueError(
                "privacy.noise-multiplier protects one client among others, and --centralized has only one client; leave out one of them"
            )
        if federation.client_weighting is not ClientWeighting.UNIFORM:
            raise ValueError(
                f"privacy.noise-multiplier needs equal client weights, or the number of examples would be revealed; "
                f"leave out federation.client-weighting {federation.client_weighting}"
            )
        if federation.aggregator is not Aggregator.WEIGHTED:
            raise ValueError(
                f"privacy.noise-multiplier bounds one client's influence on a mean of clipped differences, not on federation.aggregator "
                f"{federation.aggregator}; leave out one of them"
            )
        if federation.max_norm_ratio not in (None, inf):
            raise ValueError(
                "federation.max-norm-ratio compares a reply with others, so one client could decide whether another is aggregated; "
                "privacy.clip bounds every reply already; leave out federation.max-norm-ratio"
            )
        if federation.server_examples:
            raise ValueError(
                "privacy.noise-multiplier clips and perturbs all replies, and would do so with the server's own examples; "
                "leave out federation.server-examples"
            )
        if self.gate_clip is not None and not GATE_FIELDS & reply_fields:
            raise ValueError("privacy.gate-clip has no effect, since this algorithm sends no gates; leave it out")

    def mechanism(self, cohort: int) -> GaussianMechanism | None:
        """Return the mechanism of the server's mean, or None without privacy."""
        return GaussianMechanism(self.noise_multiplier, self.clip or 1.0, self.gate_clip or 1.0, cohort) if self.noise_multiplier else None


def new_secret() -> bytes:
    """Return a secret of the server, from the entropy of the operating system."""
    return token_bytes(SECRET_BYTES)


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, which only its owner may read."""
    try:
        content, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise ValueError(
            f"the secret of the noise and the cohorts, {path}, cannot be read: {error.strerror}; name its file with --secret-file"
        ) from None
    if len(content) < SECRET_BYTES:
        raise ValueError(f"a secret has at least {SECRET_BYTES} random bytes, so that it cannot be guessed; {path} has {len(content)}")
    if os.name == "posix" and mode & 0o077:
        raise ValueError(f"{path} can be read by others, and then it is no secret; run chmod 600 {path}, or make a new one")
    return content


def epsilon_by_round(noise: float, delta: float, clients: int, cohort: int, exchanges: int, first: int = 0) -> Iterator[float]:
    """Yield epsilon after each round, from `first_round` on: Renyi accounting of cohorts sampled without replacement.

    The exchanges of a round have the same cohort, so they are composed before subsampling. Neighbouring data sets differ in one
    replaced client (Wang, Balle and Kasiviswanathan 2019).
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
