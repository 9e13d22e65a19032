"""What every algorithm shares besides its options: budgets, step sizes, encoding, decoding and averaging of messages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.common_options import CommonOptions
from fedsieve.algorithms.recipes import Recipe
from fedsieve.core import budgets, optimizers, topk
from fedsieve.core.aggregation import (
    REPLIES_PER_MALICIOUS_CLIENT,
    Aggregator,
    ClientWeighting,
    client_weights,
    limited_mean,
    mean,
    quantized_mean,
    riemannian_mean,
    sparse_mean,
)
from fedsieve.core.budgets import Budget
from fedsieve.core.optimizers import Moments, StepRule
from fedsieve.core.packets import GATE_VALUE_FIELDS, Packet, SparseVector, sparse_packet, zero_packet
from fedsieve.core.private_mean import private_mean
from fedsieve.core.protocols import Algorithm, Objective, Workload
from fedsieve.core.quantization import choose_code, quantize_signs
from fedsieve.core.random import Draw
from fedsieve.core.robust_aggregation import robust_aggregate
from fedsieve.core.types import Batch, Clock, Layout, Reply, StackedReplies, stack_replies


@dataclass(frozen=True, kw_only=True)
class BaseAlgorithm(CommonOptions, Algorithm, ABC):
    """An algorithm with the common options; its class adds its own options and the steps of a round."""

    default_rounds: ClassVar[int] = 100
    default_participation: ClassVar[float] = 0.05
    weight_fields: ClassVar[tuple[str, ...]] = ("theta",)
    """fields of the server state that hold the weights"""

    # The round, as the `Algorithm` protocol describes it

    @property
    def workload(self) -> Workload:
        """One exchange per round with `local_steps` local steps."""
        batch_size = None if self.batch_size == "all" else self.batch_size
        return Workload(1, self.local_steps, batch_size, self.step_rule, self.batch_sampling)

    def end_round(self, server: Any, clock: Clock) -> Any:
        """Return the server state unchanged."""
        return server

    def diagnostics(self, server: Any) -> dict[str, Tensor]:
        """Return no numbers."""
        return {}

    def divergence_reason(self, server: Any) -> str | None:
        """Return which formula of the algorithm diverged and what helps, or None if only the learning rate is to blame."""
        return None

    @property
    @abstractmethod
    def all_reply_fields(self) -> frozenset[str]:
        """The fields and scalars that a reply of any round may have."""

    def expected_reply_fields(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """Return `all_reply_fields`: replies have the same fields in every round."""
        return self.all_reply_fields

    def decode_sparse(self, packet: Packet, dtype: torch.dtype) -> dict[str, SparseVector]:
        """Return every field, and every scalar as a vector of length one."""
        vectors = {name: SparseVector(values.decode(dtype), packet.support) for name, values in packet.fields.items()}
        return vectors | {name: SparseVector(packet.scalars[name].to(dtype)[..., None]) for name in packet.scalars}

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """Return the support of replies if it follows from the broadcast alone, or None if clients choose it."""
        return None

    def with_parameters(self, server: Any, theta: Float[Tensor, " p"]) -> Any:
        """Return the server state whose test-time parameters are theta, which has at most m weights."""
        return server._replace(**dict.fromkeys(self.weight_fields, theta))

    # Budgets

    def message_budget(self, layout: Layout, clock: Clock) -> Budget:
        """Return how many weights of each layer a message of this round has."""
        return self.allocate(layout, budgets.num_kept(self.message_density(clock), layout.num_gated))

    def final_budget(self, layout: Layout) -> Budget:
        """Return how many weights of each layer the final model keeps."""
        return self.allocate(layout, budgets.num_kept(self.density, layout.num_gated))

    def allocate(self, layout: Layout, num_weights: int) -> Budget:
        """Return how many of `num_weights` weights each layer has, in whole groups; ungated coordinates are added."""
        parts = budgets.allocate_budget(list(layout.layers.values()), num_weights, self.sparsity_allocation)
        if layout.groups is not None:
            parts = tuple((part, budgets.round_to_groups(kept, layout.groups[part])) for part, kept in parts)
        return (*parts, (slice(layout.num_gated, layout.size), layout.num_ungated)) if layout.num_ungated else parts

    def replies_have_equal_length(self, layout: Layout) -> bool:
        """Return whether all replies have the same number of entries: not if groups have unequal sizes."""
        groups = layout.groups
        return groups is None or all(budgets.groups_have_equal_size(groups[part]) for part, _ in self.final_budget(layout))

    # Local steps

    def step_size(
        self,
        objective: Objective,
        loss: Float[Tensor, " k"],
        gradient: Float[Tensor, "k p"],
        batch: Batch,
        clock: Clock,
        gate: Float[Tensor, "k p"] | None = None,
    ) -> Float[Tensor, "k 1"]:
        """Return each client's step size along the gradient (times its gates, if given), before clipping.

        Polyak's step takes a loss above that of the zero model for that loss (a step that went too far is not followed by a longer one)
        and is at most 1/L if a client has more examples than features (it assumes a minimal loss of 0): decision F13.
        """
        rate, smoothness = self.learning_rate * self.learning_rate_factor(clock), batch.smoothness
        if self.step_rule is StepRule.POLYAK:
            zero_loss = objective.zero_model_loss(batch)
            loss = loss.clamp_min(0).minimum(zero_loss)
            smoothness = None if smoothness is None else objective.local_smoothness(smoothness, loss / zero_loss)
        return optimizers.step_size(self.step_rule, rate, loss, gradient, smoothness, gate)

    def gradient_and_step_size(
        self, objective: Objective, theta: Float[Tensor, "k p"], batch: Batch, clock: Clock
    ) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k 1"]]:
        """Return the clipped gradient of the batch loss at theta, and the step size along it."""
        loss, gradient = objective.gradient(theta, batch)
        return optimizers.clip_norm(gradient, self.max_gradient_norm), self.step_size(objective, loss, gradient, batch, clock)

    # Messages

    def encode_best(
        self,
        name: str,
        vector: Float[Tensor, "1 p"],
        importance: Float[Tensor, "1 p"],
        layout: Layout,
        max_bytes: float,
        allowed_bits: tuple[int, ...],
        draw: Draw,
        min_entries: int = 1,
    ) -> Packet:
        """Return a message with the entries of one vector, and the bits per value, that explain most of it within `max_bytes`.

        The message is longer than the part of the vector that it holds, so that its projection on the vector is the whole vector: the
        scale of EDEN (Vargaftik et al. 2022, arXiv 2108.08842).
        """
        code = choose_code(vector[0, : layout.num_gated], importance[0, : layout.num_gated], max_bytes, allowed_bits)
        mask = topk.top_mask((vector * importance).abs(), self.allocate(layout, max(code.num_entries, min_entries)), layout.groups)
        support = topk.mask_to_indices(mask)
        packet = sparse_packet(support, {name: vector}, max(code.bits, 4), draw)
        field = quantize_signs(vector.gather(-1, support)) if code.bits == 1 else packet.fields[name]
        weighted = (vector * importance.square())[..., : layout.num_gated]
        energy = (weighted * vector[..., : layout.num_gated]).sum(-1)
        explained = (weighted * packet._replace(fields={name: field}).field_dense(name, vector.dtype)[..., : layout.num_gated]).sum(-1)
        packet.fields[name] = field.stretch(torch.where(explained > 0, energy / explained, 1.0))
        return packet

    def decode_dense(
        self, packet: Packet, dtype: torch.dtype, background: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, "*k _n"]]:
        """Return the vectors of a packet as dense vectors; missing entries are taken from `background`, or are 0."""
        vectors = self.decode_sparse(packet, dtype)
        return {name: vector.densify((background or {}).get(name), packet.size) for name, vector in vectors.items()}

    def decode_replies(
        self, replies: Sequence[Reply], dtype: torch.dtype, background: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, "k _n"]]:
        """Return `decode_dense` of every reply, stacked."""
        if (stack := stack_replies(replies)) is not None:
            return self.decode_dense(stack, dtype, background)
        decoded = [self.decode_dense(reply.packet, dtype, background) for reply in replies]
        return {name: torch.stack([vectors[name] for vectors in decoded]) for name in decoded[0]}

    def client_deltas(self, packet: Packet, replies: Sequence[Reply], dtype: torch.dtype) -> dict[str, Float[Tensor, "k _n"]]:
        """Return each reply minus the broadcast. An entry missing in a reply is no change. Without replies the stacks are empty."""
        sent = self.decode_dense(packet, dtype)
        if not replies:
            decoded = self.decode_dense(zero_packet(packet.size, self.all_reply_fields), dtype)
            return {name: vector.new_zeros(0, len(vector)) for name, vector in decoded.items()}
        decoded = self.decode_replies(replies, dtype, sent)
        return {name: vectors - sent[name] if name in sent else vectors for name, vectors in decoded.items()}

    def reply_weights(self, replies: Sequence[Reply], like: Float[Tensor, " p"]) -> Float[Tensor, " k"]:
        """Return the weight of each reply in their mean."""
        counts = replies.num_examples if isinstance(replies, StackedReplies) else [reply.num_examples for reply in replies]
        return client_weights(tuple(counts), self.client_weighting, like.dtype, like.device)

    def aggregate_replies(
        self,
        packet: Packet,
        replies: Sequence[Reply],
        like: Float[Tensor, " p"],
        clock: Clock,
        draw: Draw,
        *,
        limit: bool = True,
    ) -> dict[str, Float[Tensor, " _n"]]:
        """Return the weighted mean of the replies, by field; an entry missing in a reply counts as 0 (L152).

        Replies of large cohorts are limited (`limited_mean`), unless `limit` is false or the recipe is the paper's. Dense replies that
        never are, gradients, are averaged in quantized form. A robust or private aggregate is the broadcast plus an aggregate of the
        deltas; there a missing entry is no change.
        """
        weights = self.reply_weights(replies, like)
        if self.privacy is not None or self.aggregator is not Aggregator.WEIGHTED:
            sent, deltas = self.decode_dense(packet, like.dtype), self.client_deltas(packet, replies, like.dtype)
            if self.privacy is None:
                update = robust_aggregate(deltas, weights, self.aggregator, self.max_malicious_fraction)
            else:
                update = private_mean(deltas, self.privacy, self.public_support(packet, clock), draw)
            return {name: sent[name] + part if name in sent else part for name, part in update.items()}
        stack, riemannian = stack_replies(replies), self.client_weighting is ClientWeighting.RIEMANNIAN
        if riemannian:
            decoded = self.decode_replies(replies, like.dtype)
            return {
                name: mean(vectors, weights) if name in GATE_VALUE_FIELDS else riemannian_mean(vectors, weights)
                for name, vectors in decoded.items()
            }
        if not limit and stack is not None and stack.support is None:
            return {name: quantized_mean(values, weights) for name, values in stack.fields.items()}
        packets = [reply.packet.unsqueeze() for reply in replies] if stack is None else [stack]
        vectors = [self.decode_sparse(stacked, like.dtype) for stacked in packets]
        if not limit or len(replies) < REPLIES_PER_MALICIOUS_CLIENT or self.recipe is Recipe.PAPER:
            return {name: sparse_mean([part[name] for part in vectors], weights, packet.size) for name in vectors[0]}
        return limited_mean(vectors, self.decode_dense(packet, like.dtype), weights, packet.size)

    def server_update(self, moments: Moments, sent: Float[Tensor, " p"], mean: Float[Tensor, " p"]) -> tuple[Float[Tensor, " p"], Moments]:
        """Return the server's step from the broadcast towards the mean; sent - mean is the pseudo-gradient."""
        return optimizers.step(self.server_optimizer, moments, sent, sent - mean, self.server_learning_rate, momentum=self.server_momentum)

    # The model

    def project(self, theta: Float[Tensor, " p"], layout: Layout) -> Float[Tensor, " p"]:
        """Return the m largest weights, zeros elsewhere: the final projection (decision C5).

        A kept weight that quantization made exactly zero becomes the smallest float, so that the count is exact and the model the same.
        """
        nonzero = torch.where(theta == 0, torch.full_like(theta, torch.finfo(torch.float32).tiny), theta)
        return torch.where(topk.top_mask(theta.abs(), self.final_budget(layout), layout.groups), nonzero, torch.zeros_like(theta))

    def parameters(self, server: Any) -> Float[Tensor, " p"]:
        """Return the projection of `unprojected_parameters`."""
        return self.project(self.unprojected_parameters(server), server.layout)
