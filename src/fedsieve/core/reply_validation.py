"""Validation of replies in every engine, so that one faulty or malicious client cannot damage the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from fedsieve.core.aggregation import delta_norms
from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.packets import GATE_VALUE_FIELDS, Packet
from fedsieve.core.protocols import Algorithm
from fedsieve.core.quantization import SCALED_CODINGS, Coding, QuantizedField
from fedsieve.core.types import Clock, ExchangeResult, Reply, StackedReplies, stack_replies

CODE_DTYPES = {Coding.FLOAT32: torch.float32, Coding.FLOAT16: torch.float16, Coding.UNIT8: torch.uint8}
"""Data types of codes; all other codings use int8."""
MAX_MAGNITUDE = 1e18
"""Limit of every decoded value, so that sums of squares over a cohort stay finite in single precision."""
MAX_LEVEL = 128
"""Largest level of a scaled coding, with its offset."""
MAX_GATE_MAGNITUDE = 1.01 * LOG_ALPHA_LIMIT
"""Limit of gates and log_alpha in a message, with 1 % for rounding."""
CLAIM_REASON = "it claims"
"""Beginning of the reason if a reply claims too many or too few examples."""


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
    expected, replies = algorithm.expected_reply_fields(packet, clock), result.replies
    if isinstance(replies, StackedReplies) and set(replies.clients) <= set(cohort) and len(set(replies.clients)) == len(replies):
        error = _find_error(expected, packet, replies.packet, (len(replies),), replies.num_examples, limits)
        if error is None and not any(_norm_outliers(algorithm, packet, replies, limits.max_norm_ratio, dtype)):
            return result  # all are valid; if not, each is checked alone
    valid: list[Reply] = []
    rejected = list(result.rejected)
    expected_clients = set(cohort)
    for reply in replies:
        error = "it is not in the cohort, or has replied already"
        if reply.client in expected_clients:
            error = _find_error(expected, packet, reply.packet, (), [reply.num_examples], limits)
        expected_clients.discard(reply.client)
        if error is None:
            valid.append(reply)
        else:
            rejected.append((reply.client, error))
    outliers = _norm_outliers(algorithm, packet, valid, limits.max_norm_ratio, dtype)
    reason = f"it moved more than {limits.max_norm_ratio:g} times as far as the cohort's median"
    rejected += [(reply.client, reason) for reply, is_outlier in zip(valid, outliers, strict=True) if is_outlier]
    return result._replace(replies=[reply for reply, is_outlier in zip(valid, outliers, strict=True) if not is_outlier], rejected=rejected)


def _norm_outliers(algorithm: Algorithm, packet: Packet, replies: Sequence[Reply], max_norm_ratio: float, dtype: torch.dtype) -> list[bool]:
    """Whether each reply moved too far from the broadcast."""
    if max_norm_ratio == inf or not replies:
        return [False] * len(replies)
    stack = stack_replies(replies)
    packets = [reply.packet.unsqueeze() for reply in replies] if stack is None else [stack]
    decoded = [algorithm.decode_sparse(each, dtype) for each in (packet, *packets)]
    parts, *stacks = [{name: part for name, part in vectors.items() if name not in GATE_VALUE_FIELDS} for vectors in decoded]
    sent = {name: part.densify(None, packet.size) for name, part in parts.items()}
    norms = torch.cat([delta_norms(vectors, sent, packet.size) for vectors in stacks])
    return ((norms > max_norm_ratio * norms.nanmedian()) & (norms > delta_norms(parts, {}, packet.size))).tolist()


def _find_error(
    expected_fields: frozenset[str],
    packet: Packet,
    reply: Packet,
    stack_shape: tuple[int, ...],
    num_examples: Sequence[float],
    limits: ReplyLimits,
) -> str | None:
    """The error of one reply or of a stack of them, or None; norms are checked elsewhere."""
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
    largest = [float(values.decode(torch.float32).abs().amax()) for name, values in reply.fields.items() if name in GATE_VALUE_FIELDS]
    largest += [float(scalar.abs().amax()) for name, scalar in reply.scalars.items() if name in GATE_VALUE_FIELDS]
    if any(size > MAX_GATE_MAGNITUDE for size in largest):
        return f"a gate is outside its limits: log_alpha stays within +-{LOG_ALPHA_LIMIT:g}"
    scales = [values.scale for values in reply.fields.values() if values.scale is not None]
    floats = [values.codes.numpy(force=True) for values in reply.fields.values() if values.scale is None]
    extremes = [MAX_LEVEL * scale for tensor in scales for scale in tensor.reshape(-1).tolist()]  # lists are faster than NumPy here
    extremes += [number for tensor in reply.scalars.values() for number in tensor.reshape(-1).tolist()]
    extremes += [extreme for codes in floats for extreme in (float(codes.min(initial=0)), float(codes.max(initial=0)))]  # NaN if one is
    if not all(abs(number) <= MAX_MAGNITUDE for number in extremes):
        return f"a value is not finite, or above {MAX_MAGNITUDE:g} after decoding"
    if not (min(num_examples) >= 1 and max(num_examples) <= limits.max_claimed_examples):
        return f"{CLAIM_REASON} {max(num_examples)} examples; between 1 and {limits.max_claimed_examples} may be claimed"
    return None


def _is_support(support: Tensor, size: int, stack_shape: tuple[int, ...]) -> bool:
    if support.dtype != torch.int64 or support.shape[:-1] != stack_shape or not support.ndim or not support.shape[-1]:
        return False
    indices = support.numpy(force=True)
    return bool((indices[..., 0] >= 0).all() and (indices[..., -1] < size).all() and (indices[..., 1:] > indices[..., :-1]).all())


def _has_valid_shape(field: QuantizedField, stack_shape: tuple[int, ...], num_values: int) -> bool:
    dtype = CODE_DTYPES.get(field.coding, torch.int8)
    scaled = field.scale is not None and field.scale.shape == stack_shape if field.coding in SCALED_CODINGS else field.scale is None
    return field.codes.shape == (*stack_shape, num_values) and field.codes.dtype == dtype and scaled
