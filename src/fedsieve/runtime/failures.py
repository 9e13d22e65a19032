"""Simulated failures: clients that drop out, reply too late or are malicious.

A wrapper around any exchange, so that failures are the same for every algorithm and both engines. Which client fails in which round is a
function of seed, round and client: there is no state, and a resumed run has the same failures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.packets import Packet
from fedsieve.core.random import derive_key, generator, uniforms
from fedsieve.core.types import NO_MEMORIES, ClientMemories, Clock, Exchange, ExchangeResult, Traffic
from fedsieve.runtime.attacks import DEFAULT_SCALES, Attack, attack_replies

LATE_REASON = "it arrived after the exchange was closed"


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Which failures a simulation has."""

    dropout: float = 0.0
    """fraction of clients that are offline at any time; they receive and send nothing"""
    return_probability: float | None = None
    """probability per round that an offline client returns (default: 1 - dropout, independent rounds); small values give long absences"""
    straggler_fraction: float = 0.0
    """fraction of replies that arrive after the exchange is closed; their bytes are counted, they are not aggregated"""
    malicious_fraction: float = 0.0
    """fraction of clients that are malicious, the same ones in all rounds"""
    attack: Attack | None = None
    """how malicious clients change their replies (default: flip)"""
    attack_scale: float | None = None
    """scale of the attack, relative to the honest difference to the broadcast (default: 5; 1 if malicious clients collude)"""

    def __post_init__(self) -> None:
        """Validate the options; an option without effect is an error."""
        for name in ("dropout", "straggler_fraction", "malicious_fraction"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"failures.{name.replace('_', '-')} is a fraction and must be at least 0 and below 1; got {value:g}")
        if self.return_probability is not None:
            most = 1.0 if self.dropout == 0 else min(1.0, (1 - self.dropout) / self.dropout)
            if self.dropout == 0:
                raise ValueError("failures.return-probability has no effect without failures.dropout; set failures.dropout too")
            if not 0 < self.return_probability <= most:
                raise ValueError(
                    f"failures.return-probability must be above 0 and at most {most:g}, or failures.dropout {self.dropout:g} cannot be "
                    f"maintained; got {self.return_probability:g}"
                )
        if self.malicious_fraction == 0 and (self.attack is not None or self.attack_scale is not None):
            raise ValueError(
                "failures.attack and failures.attack-scale have no effect without malicious clients; set failures.malicious-fraction too"
            )
        if self.attack_scale is not None and (self.attack or Attack.FLIP) not in DEFAULT_SCALES:
            raise ValueError(f"failures.attack-scale has no effect with failures.attack {self.attack}; leave it out")
        if self.attack_scale is not None and not self.attack_scale > 0:
            raise ValueError(f"failures.attack-scale must be above 0; got {self.attack_scale:g}")

    @property
    def is_active(self) -> bool:
        """Whether there are any failures."""
        return bool(self.dropout or self.straggler_fraction or self.malicious_fraction)


@dataclass(frozen=True, kw_only=True)
class FaultyExchange:
    """An exchange with failures."""

    exchange: Exchange
    resolve_seed: Callable[[Packet, Clock], Packet]
    """returns the initial broadcast for a packet that is only a seed"""
    failures: Failures
    clients_with_data: Sequence[int]
    """clients that have examples"""
    seed: int

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories = NO_MEMORIES) -> ExchangeResult:
        """Send the packet to clients that are online; reject late replies, corrupt those of malicious clients."""
        offline = find_offline(self.failures, self.seed, clock.round, clients)
        online = [client for client, is_offline in zip(clients, offline, strict=True) if not is_offline]
        if not online:
            return ExchangeResult([], [], Traffic(), Traffic())
        result = self.exchange(clock, packet, online, memories)
        replies, rejected = [], list(result.rejected)
        late = client_uniforms(self.seed, ("late", clock.round, clock.exchange), online) < self.failures.straggler_fraction
        stragglers = {client for client, is_late in zip(online, late, strict=True) if is_late}
        malicious = sample_malicious_clients(self.failures, self.clients_with_data, self.seed)
        sent = self.resolve_seed(packet, clock) if malicious else packet
        for reply in result.replies:
            if reply.client in stragglers:
                rejected.append((reply.client, LATE_REASON))
            else:
                replies.append(reply)
        if honest := [reply for reply in replies if reply.client in malicious]:
            attack, scale = self.failures.attack or Attack.FLIP, self.failures.attack_scale
            most = max(reply.num_examples for reply in replies)
            attacked = iter(attack_replies(attack, scale, honest, sent, clock, self.seed, most))
            replies = [next(attacked) if reply.client in malicious else reply for reply in replies]
        return result._replace(replies=replies, rejected=rejected)


def client_uniforms(seed: int, purpose: tuple[str | int, ...], clients: Sequence[int]) -> np.ndarray:
    """Return one uniform random number per client for a purpose."""
    return uniforms(derive_key(seed, *purpose), clients, np.zeros(1, dtype=np.int64))[:, 0]


def sample_malicious_clients(failures: Failures, clients_with_data: Sequence[int], seed: int) -> frozenset[int]:
    """Return floor(malicious_fraction N) of the clients that have examples."""
    if not failures.malicious_fraction:
        return frozenset()
    picked = generator(seed, "hostile").choice(
        len(clients_with_data), floor_of_decimal(failures.malicious_fraction, len(clients_with_data)), replace=False
    )
    return frozenset(int(clients_with_data[i]) for i in picked)


def find_offline(failures: Failures, seed: int, round: int, clients: Sequence[int]) -> list[bool]:
    """Return which clients are offline in a round: a two-state Markov chain per client, offline for a fraction `dropout` of the time.

    With return probability c, an offline client stays offline with probability 1 - c, an online client leaves with probability
    c dropout / (1 - dropout). One random number per round decides both, so that most rounds do not depend on the previous one; going
    back to the last such round gives the state without storing it.
    """
    if not failures.dropout:
        return [False] * len(clients)
    return_probability = 1 - failures.dropout if failures.return_probability is None else failures.return_probability
    stay, leave = 1 - return_probability, return_probability * failures.dropout / (1 - failures.dropout)
    same = np.ones(len(clients), dtype=bool)  # whether the requested state equals that of round `number`, or is its opposite
    state = np.full(len(clients), -1)
    for number in range(round, -1, -1):
        uniform = client_uniforms(seed, ("away", number), clients)
        unknown = state < 0
        state[unknown & (uniform < min(stay, leave))] = 1
        state[unknown & (uniform >= max(stay, leave))] = 0
        known = state >= 0
        state[unknown & known] ^= ~same[unknown & known]
        if known.all():
            break
        if leave > stay:
            same[~known] ^= True
    first = (client_uniforms(seed, ("away", "first"), clients) < failures.dropout).astype(int)
    return np.where(state >= 0, state, first ^ ~same).astype(bool).tolist()
