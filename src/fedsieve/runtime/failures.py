"""What goes wrong in a simulation, from named streams: clients that are away, that answer too late, that lie.

A wrapper around any exchange, so every method and both engines fail alike. Who fails when is a function of seed, round and client:
nothing is remembered, and a resumed run meets the same failures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.packets import FRACTION_SCALARS, GATE_FIELDS, Packet
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.random import derive_key, generator, uniforms
from fedsieve.core.types import Clock, Exchange, ExchangeResult, Reply, Traffic

LATE_REASON = "it came after its round was closed"


class Attack(StrEnum):
    """What a hostile client makes of its own reply; d is its difference to the broadcast."""

    FLIP = "flip"
    """-strength d: away from where it should go"""
    SCALE = "scale"
    """strength d: its own rows above all others"""
    RANDOM = "random"
    """Gaussian noise of length strength |d|"""
    NAN = "nan"
    """no numbers at all: a broken client"""


DEFAULT_ATTACK_SCALE = 5.0


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What goes wrong in a simulation."""

    dropout: float = 0.0
    """share of clients that are away at any time: they get nothing and send nothing"""
    return_probability: float | None = None
    """chance a round that a client who is away comes back (default: 1 - drop, each round anew); small is long absences"""
    straggler_fraction: float = 0.0
    """share of replies that come after their exchange was closed: their bytes crossed, they do not count"""
    malicious_fraction: float = 0.0
    """share of clients that alter their replies, the same ones throughout"""
    attack: Attack | None = None
    """how hostile clients alter their replies (default: flip)"""
    attack_scale: float | None = None
    """how strongly, in units of an honest difference to the broadcast (default: 5)"""

    def __post_init__(self) -> None:
        """Refuse what is no probability, and what would be ignored."""
        for name in ("dropout", "straggler_fraction", "malicious_fraction"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"failures.{name.replace('_', '-')} is a share and must be at least 0 and below 1; got {value:g}")
        if self.return_probability is not None:
            most = 1.0 if self.dropout == 0 else min(1.0, (1 - self.dropout) / self.dropout)
            if self.dropout == 0:
                raise ValueError("failures.return-probability says how long clients stay away, and nobody is; set failures.dropout too")
            if not 0 < self.return_probability <= most:
                raise ValueError(
                    f"failures.return-probability must be above 0 and at most {most:g}, or failures.dropout {self.dropout:g} could not be kept up; "
                    f"got {self.return_probability:g}"
                )
        if self.malicious_fraction == 0 and (self.attack is not None or self.attack_scale is not None):
            raise ValueError(
                "failures.attack and failures.attack-scale are of hostile clients, and there are none; set failures.malicious-fraction too"
            )
        if self.attack is Attack.NAN and self.attack_scale is not None:
            raise ValueError("failures.attack-scale has no meaning with failures.attack nan; leave it out")
        if self.attack_scale is not None and not self.attack_scale > 0:
            raise ValueError(f"failures.attack-scale must be above 0; got {self.attack_scale:g}")

    @property
    def is_active(self) -> bool:
        """Whether anything goes wrong."""
        return bool(self.dropout or self.straggler_fraction or self.malicious_fraction)


@dataclass(frozen=True, kw_only=True)
class FaultyExchange:
    """An exchange in which things go wrong."""

    exchange: Exchange
    resolve_seed: Callable[[Packet, Clock], Packet]
    """what clients make of a broadcast that is only a seed"""
    failures: Failures
    clients_with_data: Sequence[int]
    """clients that hold rows"""
    seed: int

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> ExchangeResult:
        """Send to those who are there; lose what is late, alter what hostile clients send."""
        gone = find_offline(self.failures, self.seed, clock.round, clients)
        there = [client for client, is_away in zip(clients, gone, strict=True) if not is_away]
        if not there:
            return ExchangeResult([], [], Traffic(), Traffic())
        came = self.exchange(clock, packet, there)
        replies, rejected = [], list(came.rejected)
        late = client_uniforms(self.seed, ("late", clock.round, clock.exchange), there) < self.failures.straggler_fraction
        delayed = {client for client, is_late in zip(there, late, strict=True) if is_late}
        hostile = sample_malicious_clients(self.failures, self.clients_with_data, self.seed)
        sent = self.resolve_seed(packet, clock) if hostile else packet
        for reply in came.replies:
            if reply.client in delayed:
                rejected.append((reply.client, LATE_REASON))
            else:
                replies.append(self.corrupt_reply(reply, sent, clock) if reply.client in hostile else reply)
        return came._replace(replies=replies, rejected=rejected)

    def corrupt_reply(self, reply: Reply, sent: Packet, clock: Clock) -> Reply:
        """What a hostile client sends in the place of its reply: every field, and every scalar, as its attack says."""
        draw = generator(self.seed, "attack", clock.round, clock.exchange, reply.client)
        said, rest = reply.packet, sent.scalars.get("default_gate", 0.0)
        fields = {}
        for name, values in said.fields.items():
            honest = values.decode(torch.float32)
            whole = sent.field_dense(name, torch.float32, rest if name in GATE_FIELDS else 0.0) if name in sent.fields else None
            base = torch.zeros_like(honest) if whole is None else whole if said.support is None else whole[said.support]
            fields[name] = QuantizedField(self.corrupt_field(name, honest, base, draw), None, Coding.FLOAT32)
        scalars = {
            name: self.corrupt_field(name, value[None], sent.scalars.get(name, torch.zeros(()))[None].to(value), draw)[0]
            for name, value in said.scalars.items()
        }
        return reply._replace(packet=said._replace(fields=fields, scalars=scalars))

    def corrupt_field(self, name: str, honest: Tensor, base: Tensor, draw: np.random.Generator) -> Tensor:
        """Gates and shares stay within their limits: a reply outside them would be found out."""
        moved, strength = honest - base, self.failures.attack_scale or DEFAULT_ATTACK_SCALE
        match self.failures.attack or Attack.FLIP:
            case Attack.FLIP:
                found = base - strength * moved
            case Attack.SCALE:
                found = base + strength * moved
            case Attack.RANDOM:
                noise = torch.from_numpy(draw.standard_normal(len(moved))).to(moved)
                found = base + strength * torch.linalg.vector_norm(moved) / len(moved) ** 0.5 * noise
            case Attack.NAN:
                return torch.full_like(honest, torch.nan)
        if name == "gates" or name in FRACTION_SCALARS:
            return found.clamp(0.0, 1.0)
        return found.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT) if name in GATE_FIELDS else found


def client_uniforms(seed: int, purpose: tuple[str | int, ...], clients: Sequence[int]) -> np.ndarray:
    """One uniform number a client, named by the path."""
    return uniforms(derive_key(seed, *purpose), clients, np.zeros(1, dtype=np.int64))[:, 0]


def sample_malicious_clients(failures: Failures, clients_with_data: Sequence[int], seed: int) -> frozenset[int]:
    """floor(hostile N) of the clients that hold rows."""
    if not failures.malicious_fraction:
        return frozenset()
    picked = generator(seed, "hostile").choice(
        len(clients_with_data), floor_of_decimal(failures.malicious_fraction, len(clients_with_data)), replace=False
    )
    return frozenset(int(clients_with_data[i]) for i in picked)


def find_offline(failures: Failures, seed: int, round: int, clients: Sequence[int]) -> list[bool]:
    """Who is away in a round: a chain of two states for each client, away for a share `drop` of the time.

    Who is away stays so with probability 1 - c, who is there leaves with c drop / (1 - drop). One number a round decides both, so most
    rounds do not depend on the one before; going back to the last such round gives the state without remembering any.
    """
    if not failures.dropout:
        return [False] * len(clients)
    back = 1 - failures.dropout if failures.return_probability is None else failures.return_probability
    stay, leave = 1 - back, back * failures.dropout / (1 - failures.dropout)
    same = np.ones(len(clients), dtype=bool)  # whether the state asked for is that of the round looked at, or its opposite
    found = np.full(len(clients), -1)
    for number in range(round, -1, -1):
        number_of = client_uniforms(seed, ("away", number), clients)
        free = found < 0
        found[free & (number_of < min(stay, leave))] = 1
        found[free & (number_of >= max(stay, leave))] = 0
        known = found >= 0
        found[free & known] ^= ~same[free & known]
        if known.all():
            break
        if leave > stay:
            same[~known] ^= True
    first = (client_uniforms(seed, ("away", "first"), clients) < failures.dropout).astype(int)
    return np.where(found >= 0, found, first ^ ~same).astype(bool).tolist()
