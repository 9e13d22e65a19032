"""Validation of replies in every engine, so that one faulty or malicious client cannot damage the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.packets import FRACTION_SCALARS, GATE_FIELDS, Packet, SparseVector
from fedsieve.core.quantization import SCALED_CODINGS, Coding, QuantizedField
from fedsieve.core.types import Algorithm, Clock, ExchangeResult, Reply, StackedReplies, stack_replies

CODE_DTYPES = {Coding.FLOAT32: torch.float32, Coding.FLOAT16: torch.float16, Coding.UNIT8: torch.uint8}
"""Data types of codes; all other codings use int8."""
MAX_GATE_MAGNITUDE = 1.01 * LOG_ALPHA_LIMIT
"""Limit of gates and log_alpha in a message, with 1 % for rounding."""


@dataclass(frozen=True, kw_only=True)
class ReplyLimits:
    """Upper limits of a reply."""

    max_norm_ratio: float = inf
    """norm of a reply's difference to the broadcast, over the median norm of the cohort"""
    max_claimed_examples: int = 2**63 - 1
    """number of examples that a client may claim"""


def validate_replies(
    algorithm: Algorithm,
    packet: Packet,
    result: ExchangeResult,
    cohort: Sequence[int],
    clock: Clock,
    limits: ReplyLimits,
    dtype: torch.dtype,
) -> ExchangeResult:
    """Remove invalid replies and add them to the rejected ones, each with its reason.

    Format, claims and gates are checked reply by reply, then the norms. A difference in weights is too large if its norm exceeds
    `max_norm_ratio` times the cohort's median and the norm of the broadcast: after most clients have converged, an honest client may
    still exceed the median a million times, but hardly the norm of the whole model.
    """
    expected = algorithm.expected_reply_fields(packet, clock)
    if isinstance(result.replies, StackedReplies) and _all_valid(algorithm, packet, result.replies, cohort, expected, limits, dtype):
        return result
    valid: list[Reply] = []
    rejected = list(result.rejected)
    expected_clients = set(cohort)
    for reply in result.replies:
        error: str | None = "it was not asked, or has answered already"
        if reply.client in expected_clients:
            error = _find_error(expected, packet, reply.packet, (), [reply.num_examples], limits)
        expected_clients.discard(reply.client)
        if error is None:
            valid.append(reply)
        else:
            rejected.append((reply.client, error))
    if not valid:
        return result._replace(replies=[], rejected=rejected)
    finite = torch.tensor([_is_finite(reply.packet) for reply in valid])
    bounded = limits.max_norm_ratio < inf
    far = _norm_outliers(algorithm, packet, valid, finite, limits.max_norm_ratio, dtype) if bounded else torch.zeros_like(finite)
    for reply, is_finite, is_far in zip(valid, finite.tolist(), far.tolist(), strict=True):
        if not is_finite:
            rejected.append((reply.client, "a value is not finite"))
        elif is_far:
            rejected.append((reply.client, f"it moved more than {limits.max_norm_ratio:g} times as far as the cohort's median"))
    refused = (~finite | far).tolist()
    return result._replace(replies=[reply for reply, no in zip(valid, refused, strict=True) if not no], rejected=rejected)


def _all_valid(
    algorithm: Algorithm,
    packet: Packet,
    replies: StackedReplies,
    cohort: Sequence[int],
    expected_fields: frozenset[str],
    limits: ReplyLimits,
    dtype: torch.dtype,
) -> bool:
    """Whether all replies are valid, checked at once; if not, the replies are checked one by one."""
    asked = set(replies.clients) <= set(cohort) and len(set(replies.clients)) == len(replies)
    if (
        not asked
        or _find_error(expected_fields, packet, replies.packet, (len(replies),), replies.num_examples, limits)
        or not _is_finite(replies.packet)
    ):
        return False
    if limits.max_norm_ratio == inf:
        return True
    everyone = torch.ones(len(replies), dtype=torch.bool)
    return not bool(_norm_outliers(algorithm, packet, replies, everyone, limits.max_norm_ratio, dtype).any())


def _is_finite(packet: Packet) -> bool:
    """Whether every value is finite. Scales and scalars are few, and a list is faster for them than NumPy."""
    scales = [values.scale for values in packet.fields.values() if values.scale is not None]
    few = all(all(map(isfinite, number.reshape(-1).tolist())) for number in (*scales, *packet.scalars.values()))
    return few and all(np.isfinite(values.codes.numpy(force=True)).all() for values in packet.fields.values() if values.scale is None)


def _norm_outliers(
    algorithm: Algorithm,
    packet: Packet,
    replies: Sequence[Reply],
    finite_mask: Bool[Tensor, " k"],
    max_norm_ratio: float,
    dtype: torch.dtype,
) -> Bool[Tensor, " k"]:
    parts, stack = algorithm.decode_sparse(packet.unsqueeze(), dtype), stack_replies(replies)
    sent = {name: part.densify(None, packet.size)[0] for name, part in parts.items() if name not in GATE_FIELDS | FRACTION_SCALARS}
    packets = [reply.packet.unsqueeze() for reply in replies] if stack is None else [stack]
    length = torch.cat([_delta_norms(algorithm.decode_sparse(stacked, dtype), sent, packet.size) for stacked in packets])
    model = _delta_norms(parts, {}, packet.size)
    return (length > max_norm_ratio * length[finite_mask].nanmedian()) & (length > model)


def _delta_norms(vectors: dict[str, SparseVector], broadcast: dict[str, Tensor], size: int) -> Float[Tensor, " k"]:
    """The norm of each client's difference to the broadcast over all fields except gates and fractions."""
    distances = [
        part.distance_to(broadcast.get(name), size) for name, part in vectors.items() if name not in GATE_FIELDS | FRACTION_SCALARS
    ]
    return torch.stack(distances).square().sum(0).sqrt()


def _find_error(
    expected_fields: frozenset[str],
    packet: Packet,
    reply: Packet,
    stack_shape: tuple[int, ...],
    num_examples: Sequence[float],
    limits: ReplyLimits,
) -> str | None:
    """The error of one reply or of a stack of them, or None; finiteness and norms are checked elsewhere."""
    names = {*reply.fields, *reply.scalars}
    if reply.seed is not None or names != expected_fields:
        return f"it holds {', '.join(sorted(names)) or 'nothing'}; expected {', '.join(sorted(expected_fields))}"
    if reply.size != packet.size:
        return f"it is for {reply.size} parameters; this model has {packet.size}"
    if reply.support is not None and not _is_support(reply.support, reply.size, stack_shape):
        return "its positions are not increasing numbers below the number of parameters"
    count = reply.size if reply.support is None else reply.support.shape[-1]
    fits = all(_has_valid_shape(values, stack_shape, count) for values in reply.fields.values())
    if not fits or any(scalar.shape != stack_shape for scalar in reply.scalars.values()):
        return f"a field has not one value for each of {count} positions"
    largest = [_max_abs(values) for name, values in reply.fields.items() if name in GATE_FIELDS]
    largest += [float(scalar.abs().amax()) for name, scalar in reply.scalars.items() if name in GATE_FIELDS]
    if any(size > MAX_GATE_MAGNITUDE for size in largest):
        return f"a gate is outside its limits: log_alpha stays within +-{LOG_ALPHA_LIMIT:g}"
    for name in FRACTION_SCALARS & reply.scalars.keys():
        share = reply.scalars[name]
        if not ((share >= 0) & (share <= 1)).all():
            return f"{name} is a part of all and lies between 0 and 1"
    if not (min(num_examples) >= 1 and max(num_examples) <= limits.max_claimed_examples):
        return f"it claims {max(num_examples)} examples; between 1 and {limits.max_claimed_examples} may be claimed"
    return None


def _max_abs(field: QuantizedField) -> float:
    """The largest magnitude; NumPy is faster here, and there is one call per reply."""
    codes = field.codes.numpy(force=True)
    ends = torch.from_numpy(np.stack((codes.min(-1), codes.max(-1)), axis=-1))
    ends = QuantizedField(ends, field.scale, field.coding).decode(torch.float32)
    return float(ends.abs().amax())


def _is_support(support: Tensor, size: int, stack_shape: tuple[int, ...]) -> bool:
    if support.dtype != torch.int64 or support.shape[:-1] != stack_shape or not support.ndim or not support.shape[-1]:
        return False
    indices = support.numpy(force=True)
    return bool((indices[..., 0] >= 0).all() and (indices[..., -1] < size).all() and (indices[..., 1:] > indices[..., :-1]).all())


def _has_valid_shape(field: QuantizedField, stack_shape: tuple[int, ...], num_values: int) -> bool:
    dtype = CODE_DTYPES.get(field.coding, torch.int8)
    scaled = field.scale is not None and field.scale.shape == stack_shape if field.coding in SCALED_CODINGS else field.scale is None
    return field.codes.shape == (*stack_shape, num_values) and field.codes.dtype == dtype and scaled
