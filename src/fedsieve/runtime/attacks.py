"""Attacks of malicious clients, for simulations: each is a function of the honest differences to the broadcast.

Colluding attacks see the honest replies of all malicious clients in an exchange, and all send the same.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.packets import GATE_VALUE_FIELDS, SEED_SCALARS, Packet
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.random import generator
from fedsieve.core.types import Clock, Reply


class Attack(StrEnum):
    """How a malicious client changes its reply; d is the difference of the honest reply to the broadcast."""

    FLIP = "flip"
    """-scale d: the opposite direction"""
    SCALE = "scale"
    """scale d: the client's own examples outweigh all others"""
    RANDOM = "random"
    """Gaussian noise of norm scale |d|"""
    NAN = "nan"
    """not a number: a broken client"""
    COMMON = "common"
    """one random direction, the same of all malicious clients in all rounds, of norm scale |d|"""
    OPPOSITE = "opposite"
    """-scale times the mean d of the malicious clients"""
    ALIE = "alie"
    """the mean d of the malicious clients minus scale times its standard deviation, by coordinate (Baruch et al. 2019)"""
    FREE_RIDE = "free-ride"
    """no change: the broadcast"""
    LABEL_FLIP = "label-flip"
    """honest training on wrong labels: class c of C is C - 1 - c, and targets of regression are reflected in the same way"""
    CLAIMS = "claims"
    """the honest weights, with gates at the wrong limit, and the largest number of examples of the cohort"""


COLLUDING = frozenset({Attack.COMMON, Attack.OPPOSITE, Attack.ALIE})
"""Attacks in which all malicious clients send the same."""
DEFAULT_SCALES = {Attack.FLIP: 5.0, Attack.SCALE: 5.0, Attack.RANDOM: 5.0, Attack.COMMON: 1.0, Attack.OPPOSITE: 1.0, Attack.ALIE: 1.0}
"""Those of colluding attacks make a reply as long as an honest one or shorter, so that its length does not give it away."""

Noise = Callable[[], Float[Tensor, " m"]]


def attack_weights(attack: Attack, deltas: Float[Tensor, "k m"], scale: float, noise: Noise) -> Float[Tensor, "#k m"]:
    """Return what malicious clients send instead of their honest differences to the broadcast."""
    match attack:
        case Attack.FLIP:
            return -scale * deltas
        case Attack.SCALE:
            return scale * deltas
        case Attack.RANDOM:
            return scale * torch.linalg.vector_norm(deltas, dim=-1, keepdim=True) / deltas.shape[-1] ** 0.5 * noise()
        case Attack.NAN:
            return torch.full_like(deltas, torch.nan)
        case Attack.COMMON:
            direction = noise()
            length = torch.linalg.vector_norm(deltas, dim=-1).mean()
            return (scale * length / torch.linalg.vector_norm(direction) * direction)[None]
        case Attack.OPPOSITE:
            return -scale * deltas.mean(0, keepdim=True)
        case Attack.ALIE:
            return deltas.mean(0, keepdim=True) - scale * deltas.std(0, correction=0, keepdim=True)
        case Attack.FREE_RIDE:
            return torch.zeros_like(deltas)
        case _:
            return deltas


def attack_replies(
    attack: Attack, scale: float | None, replies: Sequence[Reply], sent: Packet, clock: Clock, seed: int, max_examples: float
) -> list[Reply]:
    """Return what malicious clients send instead of their honest replies: every field and scalar changes except seeds."""
    if attack is Attack.LABEL_FLIP:  # the data are wrong (`ClientData.flip_labels`), not the replies
        return list(replies)
    scale = DEFAULT_SCALES.get(attack, 1.0) if scale is None else scale
    if attack in COLLUDING:
        return _attack_group(attack, scale, replies, sent, generator(seed, "attack"))
    attacked = []
    for reply in replies:
        draw = generator(seed, "attack", clock.round, clock.exchange, reply.client)
        attacked += _attack_group(attack, scale, [reply], sent, draw)
    return [reply._replace(num_examples=max_examples) for reply in attacked] if attack is Attack.CLAIMS else attacked


def _attack_group(attack: Attack, scale: float, replies: Sequence[Reply], sent: Packet, draw: np.random.Generator) -> list[Reply]:
    """Attack replies as a stack, at all positions that any of them has."""
    default_gate = sent.scalars.get("default_gate", 0.0)
    supports = [reply.packet.support for reply in replies if reply.packet.support is not None]
    support = torch.cat(supports).unique() if len(supports) == len(replies) else None
    everywhere = slice(None) if support is None else support

    def change(name: str, honest: Float[Tensor, "k m"], base: Float[Tensor, " m"], positions: slice | Tensor, size: int) -> list[Tensor]:
        def noise() -> Tensor:
            if attack is Attack.COMMON:  # the same direction whatever the positions
                return torch.from_numpy(draw.standard_normal(size))[positions].to(base)
            return torch.from_numpy(draw.standard_normal(len(base))).to(base)

        deltas = attack_weights(attack, honest - base, scale, noise).expand_as(honest)
        if attack is Attack.CLAIMS and name in GATE_VALUE_FIELDS:
            deltas = torch.full_like(honest, torch.inf if name == "default_gate" else -torch.inf)
        return list(_limit(name, base + deltas))

    fields, scalars = {}, {}
    for name in replies[0].packet.fields:
        default = default_gate if name in GATE_VALUE_FIELDS else 0.0
        full = sent.field_dense(name, torch.float32, default) if name in sent.fields else torch.zeros(sent.size)
        honest = []
        for reply in replies:
            values, own = reply.packet.fields[name].decode(torch.float32), reply.packet.support
            honest.append(values if own is None else full.to(values).scatter(0, own, values)[everywhere])
        fields[name] = change(name, torch.stack(honest), full[everywhere].to(honest[0]), everywhere, sent.size)
    for name in replies[0].packet.scalars:
        honest_scalars = torch.stack([reply.packet.scalars[name] for reply in replies])
        base = sent.scalars.get(name, torch.zeros(()))[None].to(honest_scalars)
        is_seed = name in SEED_SCALARS
        changed = list(honest_scalars[:, None]) if is_seed else change(name, honest_scalars[:, None], base, slice(None), 1)
        scalars[name] = [value[0] for value in changed]
    return [
        reply._replace(
            packet=reply.packet._replace(
                support=support,
                fields={name: QuantizedField(values[i], None, Coding.FLOAT32) for name, values in fields.items()},
                scalars={name: values[i] for name, values in scalars.items()},
            )
        )
        for i, reply in enumerate(replies)
    ]


def _limit(name: str, values: Tensor) -> Tensor:
    """Return the values; gates and fractions stay within their limits, since other replies are rejected."""
    if name == "gates":
        return values.clamp(0.0, 1.0)
    return values.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT) if name in GATE_VALUE_FIELDS else values
