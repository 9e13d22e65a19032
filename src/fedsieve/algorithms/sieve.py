"""sieve: gates learn inside each client's round which weights matter, and cost two numbers a message (docs/theory.md).

First part of the rounds, searching: the uplink carries the signs of the largest *updates*, as many as tell most of them, the
downlink weights on trial beside those it keeps, and the server remembers what it does not send. Last part, polishing: the support
stands, the uplink carries its updates as numbers. Where the first round's updates lie in few weights, weights travel instead.
Which of these, for how long and in what steps is said in `sieve_rules.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.algorithms.base import num_examples, project_to_budget
from fedsieve.algorithms.gated import gate_diagnostics, initial_log_alpha, open_ungated
from fedsieve.algorithms.sieve_rules import BY_DENSITY, OPEN, Ending, Rules, Server, Uplink
from fedsieve.core import budgets, constraint, gates, optimizers, topk
from fedsieve.core.budgets import budget_total
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT
from fedsieve.core.optimizers import initial_moments
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.quantization import best_sign_count, quantize_signs
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, EngineSupport, Layout, Objective, Reply

GATES = ("kept_gate", "default_gate")
ROUND_LIMIT = OPEN
"""log_alpha stays within this during a client's round; the exact dual may move it to +-12 after it."""
AJAR = OPEN - 0.01
"""The most that gates of a support on trial are open: a broadcast with more says that the support is found."""


class Client(NamedTuple):
    """A stack of clients: theta~, phi, and the broadcast they all began with."""

    weights: Tensor
    log_alpha: Tensor
    packet: Packet
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Sieve(Rules):
    """Saliency gates, sign-coded updates while searching, an L0 constraint that holds exactly at the end."""

    # What matters

    def top_mask(
        self, vector: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, density: float
    ) -> Bool[Tensor, "*k p"]:
        """The largest entries of a vector, each counted as often as its gate is open."""
        return topk.top_mask(self.importance(vector, log_alpha), self.budget_for(layout, density), layout.groups)

    def importance(self, vector: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """|v| P(z != 0)."""
        return vector.abs() * gates.active_probability(self.shape, log_alpha)

    # The round

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """All gates alike."""
        none = torch.zeros_like(weights[0])
        log_alpha = open_ungated(torch.full_like(weights, initial_log_alpha(self.initial_gate_probability)), layout)
        width, changed = torch.full_like(none, BY_DENSITY), torch.full_like(none, -1)
        return Server(weights, log_alpha, none, initial_moments(weights), none, none, width, changed, layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """The largest m weights and those on trial, and the two log_alpha; where it departs from the usual, what is to travel, how fast."""
        now = self.fitted(float(server.width), found=self.found(server, clock))
        chosen = now.top_mask(server.weights, server.log_alpha, server.layout, now.sent(server, clock))
        bits = now.precision(fine=not now.searching(clock))
        packet = sparse_packet(topk.mask_to_indices(chosen), {"weights": server.weights}, bits, draw)
        most = AJAR if now.searching(clock) else LOG_ALPHA_LIMIT
        packet.scalars.update({name: mean.clamp_max(most) for name, mean in two_means(server.log_alpha, chosen, server.layout).items()})
        asked = now.signs(server, clock)
        if now.counts_signs and now.searching(clock) and asked < now.most_signs(clock):
            packet.scalars["signs"] = torch.tensor(asked, dtype=torch.float32)
        if now.searching(clock) and (pace := now.pace(server)) < 1:
            packet.scalars["pace"] = torch.tensor(pace, dtype=torch.float32)
        if server.width >= 0:
            packet.scalars["width"] = server.width.to(torch.float32)
        return packet

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """theta~ from the broadcast, 0 off the support; one log_alpha on it, one off it."""
        weights, mask = packet.field_dense("weights", dtype), packet.support_mask(dtype)
        log_alpha = torch.where(mask > 0, packet.scalar("kept_gate", dtype), packet.scalar("default_gate", dtype))
        return Client(weights, open_ungated(log_alpha, layout), packet, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta~ -= eta z g; phi -= gate_rate * saliency / rms, saliency = theta~ g, rms over m entries.

        Polyak's step divides by the whole gradient, also where gates are shut: by z g it would grow manyfold as they close. It counts a
        loss above that of no model at all as that one: a step that went too far is not followed by a longer one (decision H26).
        """
        now, layout = self.heeding(client.packet), objective.layout
        gate = now.gate(client.log_alpha, layout, clock, draw)
        loss, gradient = objective.gradient(client.weights * gate, batch)
        size = now.stride * now.step_size(objective, loss, gradient, batch, clock)
        gradient = optimizers.clip_norm(gradient, now.max_gradient_norm)
        saliency = budgets.sum_within_groups(client.weights * gradient, layout.groups)
        kept = budget_total(now.message_budget(client.layout, clock))
        rms = (saliency.square().sum(-1, keepdim=True) / kept).sqrt().clamp_min(torch.finfo(saliency.dtype).tiny)
        log_alpha = (client.log_alpha - now.gate_rate * saliency / rms).clamp(-ROUND_LIMIT, ROUND_LIMIT)
        if now.ending is Ending.FROZEN and not now.searching(clock):
            log_alpha = client.log_alpha
        log_alpha = open_ungated(log_alpha, layout)
        weights = client.weights - size * gate * gradient
        if now.cuts:
            weights = now.projected(weights, log_alpha, client.layout, layout, clock)
        return client._replace(weights=weights, log_alpha=log_alpha)

    def gate(self, log_alpha: Float[Tensor, "k n"], layout: Layout, clock: Clock, draw: Draw) -> Float[Tensor, "k n"]:
        """Sampled, one draw a group, or all open."""
        if self.ungated(clock):
            return torch.ones_like(log_alpha)
        noise = budgets.broadcast_within_groups(draw("gates", log_alpha.shape[-1]), layout.groups)
        return gates.sample(self.shape, log_alpha, noise).value

    def projected(
        self, weights: Float[Tensor, "k n"], log_alpha: Float[Tensor, "k n"], whole: Layout, layout: Layout, clock: Clock
    ) -> Float[Tensor, "k n"]:
        """The largest |theta~| P(z != 0) of the round's budget, zeros elsewhere; what is out of sight (sparse rows) is zero already."""
        parts = self.message_budget(whole, clock)
        if layout.size != whole.size:
            parts = budgets.restrict_budget(parts, layout.num_gated, layout.num_ungated)
        return torch.where(topk.top_mask(self.importance(weights, log_alpha), parts, layout.groups), weights, torch.zeros_like(weights))

    def public_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """All while searching, then the broadcast's."""
        return None if self.heeding(packet).searching(clock) else packet.support

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """All that replies of some round may hold."""
        left_open = frozenset({"update", "weights", "signs", "spread"}) if self.uplink is None and self.trusting else frozenset()
        return left_open | {self.field, *GATES, *(("signs",) if self.counts_signs else ())}

    def expected_reply_fields(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """Updates or weights, the two log_alpha, how many signs would tell most, and in the first round how far updates are spread."""
        now, told = self.heeding(packet), ("spread",) if self.measures(clock) else ()
        return frozenset({now.field, *GATES, *told, *(("signs",) if now.counts_signs else ())})

    @property
    def field(self) -> str:
        """The name of what a reply carries."""
        return "update" if self.travels is Uplink.UPDATES else "weights"

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Searching: signs of the largest updates, or the largest weights. Polishing: numbers for the broadcast's support."""
        now, weights, layout = self.heeding(client.packet), client.weights, client.layout
        kept = now.top_mask(weights, client.log_alpha, layout, now.message_density(clock))
        vector = weights - client.packet.field_dense("weights", weights.dtype) if now.travels is Uplink.UPDATES else weights
        if not now.searching(clock):
            sent = (client.packet.support_mask(weights.dtype) > 0).expand_as(weights)
        elif now.travels is Uplink.UPDATES:
            most: float = now.most_signs(clock)
            asked = client.packet.scalars.get("signs", most)
            sent = now.top_mask(vector, client.log_alpha, layout, float(asked))
        else:
            sent = kept
        support = topk.mask_to_indices(sent)
        packet = sparse_packet(support, {now.field: vector}, now.precision(fine=False), draw)
        if now.searching(clock) and now.travels is Uplink.UPDATES:
            packet.fields[now.field] = quantize_signs(vector.gather(-1, support))
        packet.scalars.update(two_means(client.log_alpha, kept, layout))
        if now.counts_signs:
            most = budgets.num_kept(now.most_signs(clock), layout.num_gated)
            packet.scalars["signs"] = telling(now.importance(vector, client.log_alpha), most, layout)
        if self.measures(clock):
            packet.scalars["spread"] = telling(
                (weights - client.packet.field_dense("weights", weights.dtype)).abs(), layout.num_gated, layout
            )
        return packet

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta <- sent + server step along the mean update + memory * (what the broadcast left out); then the dual, solved."""
        now, sent = self.heeding(packet), packet.field_dense("weights", server.weights.dtype)
        merged = now.aggregate_replies(packet, replies, server.weights, clock, draw)
        update = merged[now.field] - (sent if now.travels is Uplink.WEIGHTS else 0)
        server = self.told(server, now, merged, replies, clock)
        rate = now.boldness(server, len(replies), clock)
        moved, moments = optimizers.step(now.server_optimizer, server.moments, sent, -update, rate, momentum=now.server_momentum)
        theta = moved + now.remembered(server) * (server.weights - sent)
        then = clock._replace(round=clock.round + 1)
        wide = now.sent(server, clock) if now.searching(then) else now.message_density(clock)
        chosen = now.top_mask(theta, server.log_alpha, server.layout, wide)
        stayed = wide == self.density and bool((chosen == packet.support_mask(theta.dtype).bool()).all())
        changed = server.changed if stayed else torch.full_like(server.changed, clock.round)
        server = server._replace(weights=theta, moments=moments, changed=changed)
        both = torch.cat([merged[name] for name in GATES])
        log_alpha, shift = now.tightened(server.layout, chosen, both, clock, found=self.found(server, then))
        return server._replace(log_alpha=log_alpha, multiplier=-shift)

    def told(self, server: Server, now: "Sieve", merged: dict[str, Tensor], replies: Sequence[Reply], clock: Clock) -> Server:
        """What replies say beside their updates: rows, how many signs tell most; in the first round what `now` is to be from then on."""
        if now.privacy is None:
            server = server._replace(rows=server.rows + (sum(num_examples(replies)) - server.rows) / (clock.round + 1))
        if now.counts_signs:
            server = server._replace(signs=merged["signs"][0])
        if self.measures(clock):
            server = server._replace(width=torch.full_like(server.width, self.decided(replies, server.layout)))
        return server

    def tightened(
        self, layout: Layout, chosen: Bool[Tensor, " p"], both: Float[Tensor, " 2"], clock: Clock, *, found: bool
    ) -> tuple[Float[Tensor, " p"], Float[Tensor, ""]]:
        """The gates' means on the support and off it, shifted so that the constraint is tight; and the shift."""
        if found and self.ending is Ending.FROZEN:
            both = torch.tensor([LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT]).to(both)
        kept = chosen[: layout.num_gated].to(both).mean()
        target = self.message_density(clock) if found else self.open_density(clock)
        shift = constraint.bisect_shift(self.shape, both, target, torch.stack((kept, 1 - kept)))
        on, off = constraint.shift_log_alpha(both, shift)
        if found and on < OPEN:
            on, off = self.parted(kept, self.message_density(clock))
        return open_ungated(torch.where(chosen, on, off), layout), shift

    def parted(self, kept: Float[Tensor, ""], density: float) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The support open, the rest as the constraint needs: the dual solved for the rest alone."""
        on = torch.full_like(kept, OPEN)
        rest = (density - kept * gates.active_probability(self.shape, on[None])[0]) / (1 - kept).clamp_min(GATE_MARGIN)
        off = torch.logit(rest.clamp(1e-9, 0.5)) - self.shape.offset
        return on, off.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)

    @property
    def engine_support(self) -> EngineSupport:
        """Local steps may be projected to a budget, which compares all nonzero weights."""
        return EngineSupport(
            vector_fields=("weights", "log_alpha"),
            replies_have_equal_length=self.replies_have_equal_length,
            projected_field="weights" if self.needs_all_nonzero_weights else None,
        )

    # The model

    def parameters(self, server: Server) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate, the m largest (decision C5)."""
        gate = gates.compute_test_gates(self.shape, server.log_alpha).clamp_min(GATE_MARGIN)
        return project_to_budget(self.final_budget(server.layout), server.weights * gate, server.layout)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate."""
        return server.weights * gates.compute_test_gates(self.shape, server.log_alpha)

    def diagnostics(self, server: Server) -> dict[str, Tensor]:
        """Density as expected and at test time, the shift of the exact dual, the violation, and the density of messages."""
        log_alpha = server.log_alpha[: server.layout.num_gated]
        return gate_diagnostics(self.shape, server, self.density) | {
            "message_density": (log_alpha == log_alpha.amax()).to(log_alpha).mean()
        }


def telling(sizes: Float[Tensor, "k p"], most: int, layout: Layout) -> Float[Tensor, " k"]:
    """The part of all magnitudes, free coordinates apart, that tells most of a vector when sent as signs: at most so many of them."""
    return (best_sign_count(sizes[..., : layout.num_gated], most) / layout.num_gated).to(torch.float32)


def two_means(log_alpha: Float[Tensor, "*k p"], chosen: Bool[Tensor, "*k p"], layout: Layout) -> dict[str, Float[Tensor, "*k"]]:
    """The mean log_alpha of what was chosen and of the rest, free coordinates apart: all that a message says of the gates."""
    inside, log_alpha = chosen[..., : layout.num_gated].to(log_alpha), log_alpha[..., : layout.num_gated]
    total, kept = log_alpha.sum(-1), (log_alpha * inside).sum(-1)
    count = inside.sum(-1)
    on, off = kept / count.clamp_min(1), (total - kept) / (layout.num_gated - count).clamp_min(1)
    return {"kept_gate": on.to(torch.float32), "default_gate": off.to(torch.float32)}
