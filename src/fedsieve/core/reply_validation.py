"""Replies looked at before they count: one broken or hostile client must not spoil the model. Every engine's replies pass here."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.packets import GATES, SCALED, SHARES, Coding, Packet, Part, Values
from fedsieve.core.types import Algorithm, Clock, Exchanged, Reply, Stack, stacked

KINDS = {Coding.FLOAT32: torch.float32, Coding.FLOAT16: torch.float16, Coding.UNIT8: torch.uint8}
"""How codes are held; of all others as int8."""
GATE_LIMIT = 1.01 * LOG_ALPHA_LIMIT
"""A gate lies in [0, 1], a log_alpha within its limit; rounding may add a hair."""


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What a reply may be at most."""

    norm_limit: float = inf
    """norm of a reply's difference to the broadcast, over the median norm of the cohort"""
    most_examples: int = 2**63 - 1
    """examples a client may claim"""


def screened(
    algorithm: Algorithm, packet: Packet, came: Exchanged, cohort: Sequence[int], clock: Clock, screen: Screen, dtype: torch.dtype
) -> Exchanged:
    """The replies that may count; the others beside those rejected already, each with its reason.

    Form, claims and gates first, reply by reply. Then the norms: a difference in weights is too long if it is `norm_limit` times the
    cohort's median and longer than what was broadcast. Where most clients have come to rest an honest one may still move a million
    times as far as the median, but hardly as far as the whole model.
    """
    expected = algorithm.answers(packet, clock)
    if isinstance(came.replies, Stack) and _all_sound(algorithm, packet, came.replies, cohort, expected, screen, dtype):
        return came
    sound: list[Reply] = []
    rejected = list(came.rejected)
    waited = set(cohort)
    for reply in came.replies:
        problem = "it was not asked, or has answered already"
        if reply.client in waited:
            problem = _problem(expected, packet, reply.packet, (), [reply.examples], screen)
        waited.discard(reply.client)
        if problem is None:
            sound.append(reply)
        else:
            rejected.append((reply.client, problem))
    if not sound:
        return came._replace(replies=[], rejected=rejected)
    finite = torch.tensor([_is_finite(reply.packet) for reply in sound])
    bounded = screen.norm_limit < inf
    far = _far(algorithm, packet, sound, finite, screen.norm_limit, dtype) if bounded else torch.zeros_like(finite)
    for reply, is_finite, is_far in zip(sound, finite.tolist(), far.tolist(), strict=True):
        if not is_finite:
            rejected.append((reply.client, "a value is not finite"))
        elif is_far:
            rejected.append((reply.client, f"it moved more than {screen.norm_limit:g} times as far as the cohort's median"))
    refused = (~finite | far).tolist()
    return came._replace(replies=[reply for reply, no in zip(sound, refused, strict=True) if not no], rejected=rejected)


def _all_sound(
    algorithm: Algorithm,
    packet: Packet,
    stack: Stack,
    cohort: Sequence[int],
    expected: frozenset[str],
    screen: Screen,
    dtype: torch.dtype,
) -> bool:
    """One look at all replies; where something is wrong, a look at each says with which."""
    asked = set(stack.clients) <= set(cohort) and len(set(stack.clients)) == len(stack)
    if not asked or _problem(expected, packet, stack.packet, (len(stack),), stack.examples, screen) or not _is_finite(stack.packet):
        return False
    if screen.norm_limit == inf:
        return True
    everyone = torch.ones(len(stack), dtype=torch.bool)
    return not bool(_far(algorithm, packet, stack, everyone, screen.norm_limit, dtype).any())


def _is_finite(packet: Packet) -> bool:
    """Every number; the few scales and scalars as a list, which NumPy takes longer to look at."""
    scales = [values.scale for values in packet.fields.values() if values.scale is not None]
    few = all(all(map(isfinite, number.reshape(-1).tolist())) for number in (*scales, *packet.scalars.values()))
    return few and all(np.isfinite(values.codes.numpy(force=True)).all() for values in packet.fields.values() if values.scale is None)


def _far(
    algorithm: Algorithm, packet: Packet, replies: Sequence[Reply], finite: Bool[Tensor, " k"], limit: float, dtype: torch.dtype
) -> Bool[Tensor, " k"]:
    parts, stack = algorithm.said(packet.alone(), dtype), stacked(replies)
    sent = {name: part.over(None, packet.size)[0] for name, part in parts.items() if name not in GATES | SHARES}
    packets = [reply.packet.alone() for reply in replies] if stack is None else [stack]
    length = torch.cat([_distance(algorithm.said(said, dtype), sent, packet.size) for said in packets])
    model = _distance(parts, {}, packet.size)
    return (length > limit * length[finite].nanmedian()) & (length > model)


def _distance(parts: dict[str, Part], sent: dict[str, Tensor], size: int) -> Float[Tensor, " k"]:
    """The norm of each client's difference to what was sent, all parts together, gates and shares apart."""
    apart = [part.distance(sent.get(name), size) for name, part in parts.items() if name not in GATES | SHARES]
    return torch.stack(apart).square().sum(0).sqrt()


def _problem(
    expected: frozenset[str], packet: Packet, said: Packet, among: tuple[int, ...], examples: Sequence[float], screen: Screen
) -> str | None:
    """What is wrong with one reply, or with a stack of them (`among` its client axis), numbers aside."""
    named = {*said.fields, *said.scalars}
    if said.seed is not None or named != expected:
        return f"it holds {', '.join(sorted(named)) or 'nothing'}; expected {', '.join(sorted(expected))}"
    if said.size != packet.size:
        return f"it is for {said.size} parameters; this model has {packet.size}"
    if said.support is not None and not _is_support(said.support, said.size, among):
        return "its positions are not increasing numbers below the number of parameters"
    count = said.size if said.support is None else said.support.shape[-1]
    fits = all(_fits(values, among, count) for values in said.fields.values())
    if not fits or any(scalar.shape != among for scalar in said.scalars.values()):
        return f"a field has not one value for each of {count} positions"
    largest = [_largest(values) for name, values in said.fields.items() if name in GATES]
    largest += [float(scalar.abs().amax()) for name, scalar in said.scalars.items() if name in GATES]
    if any(size > GATE_LIMIT for size in largest):
        return f"a gate is outside its limits: log_alpha stays within +-{LOG_ALPHA_LIMIT:g}"
    for name in SHARES & said.scalars.keys():
        share = said.scalars[name]
        if not ((share >= 0) & (share <= 1)).all():
            return f"{name} is a part of all and lies between 0 and 1"
    if not (min(examples) >= 1 and max(examples) <= screen.most_examples):
        return f"it claims {max(examples)} examples; between 1 and {screen.most_examples} may be claimed"
    return None


def _largest(values: Values) -> float:
    """The largest magnitude, by NumPy, as there is a call for every reply."""
    codes = values.codes.numpy(force=True)
    ends = torch.from_numpy(np.stack((codes.min(-1), codes.max(-1)), axis=-1))
    ends = Values(ends, values.scale, values.coding).decode(torch.float32)
    return float(ends.abs().amax())


def _is_support(support: Tensor, size: int, among: tuple[int, ...]) -> bool:
    if support.dtype != torch.int64 or support.shape[:-1] != among or not support.ndim or not support.shape[-1]:
        return False
    places = support.numpy(force=True)
    return bool((places[..., 0] >= 0).all() and (places[..., -1] < size).all() and (places[..., 1:] > places[..., :-1]).all())


def _fits(values: Values, among: tuple[int, ...], count: int) -> bool:
    kind = KINDS.get(values.coding, torch.int8)
    scaled = values.scale is not None and values.scale.shape == among if values.coding in SCALED else values.scale is None
    return values.codes.shape == (*among, count) and values.codes.dtype == kind and scaled
