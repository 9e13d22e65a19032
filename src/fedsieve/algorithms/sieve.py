"""sieve: gates learn inside each client's round which weights matter, and cost two numbers a message (docs/theory.md).

First part of the rounds, searching: the uplink carries the signs of the largest *updates*, as many as tell most of them, the
downlink weights on trial beside those it keeps, and the server remembers what it does not send. Last part, polishing: the support
stands, the uplink carries its updates as numbers. Where the first round's updates lie in few weights, weights travel instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve.algorithms.gated import facts, opened
from fedsieve.algorithms.method import Method, above_zero, at_least, exactly, examples, fraction
from fedsieve.core import constraint, gates, optimizers, selection
from fedsieve.core.aggregation import Mean, Weighting
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT, HardConcrete
from fedsieve.core.optimizers import Moments, no_moments
from fedsieve.core.packets import PRECISIONS, Packet, round_signs, sparse_packet, telling_signs
from fedsieve.core.selection import BudgetRule, Schedule, total_kept
from fedsieve.core.streams import Draw
from fedsieve.core.types import Batch, Clock, Layout, Objective, Reply

GATES = ("kept_gate", "rest_gate")
ROUND_LIMIT = 8.0
"""log_alpha stays within this during a client's round; the exact dual may move it to +-12 after it."""
OPEN = ROUND_LIMIT
"""log_alpha of the support once it is found: its gates are 1 but for one draw in 600, and noise no longer hides the weights (H10)."""
ALONG_SIGNS, FROM_FEW_ROWS = 2.0, 3.0
"""Steps along the mean of signs, over the server's rate (decision H13)."""
THIN = 0.4
"""Rows a round has for each weight, below which these steps are the longer ones."""
ENOUGH = 5
"""Replies whose signs the server follows at its full rate; the mean of fewer is noisier by the root of their number, the step as short."""
SIGNS = 0.15
"""Part of all updates whose signs are sent at most, unless the model keeps more (decision H11)."""
COARSE, FINE = 4, 8
"""Bits a value, unless they are typed: coarse for updates and for broadcasts that gates' noise hides, fine for others (decision H19)."""
SPARSEST = 0.01
"""Density up to which weights travel: which of many alike are kept is decided by their size, of which signs say nothing (decision H15)."""
NARROW, EVEN = 0.12, 0.2
"""Parts of all weights that the first round's updates are spread over: below the first weights travel at every density, below the
second signs do (decision H25)."""
ENOUGH_ROWS = 64
"""Rows of a client, in the mean of the first round, from which it can tell: the update of a few rows is narrow whatever they are."""
WIDER, FILLED = 1.25, 0.03
"""Messages of weights begin wide where updates are spread over so many times what the model keeps, and a round has so many rows for
each weight they would hold; else they are as narrow as the model from the start."""
BRISK = 1.5
"""Steps of weights, over their rate, where local steps are cut to messages that fall (decision H25)."""
BY_DENSITY = -1.0
"""The width of messages where the density alone decides what travels."""
LONG_SEARCH, SHARE = 0.8, 0.08
"""Parts of the rounds: the longest search, and its length times the density; where much is kept, numbers do more than a search (H14)."""
FALL, LATE_FALL = 3, 4
"""The expected density falls along 1 - t to this power, later where one round says little: gates are open for most of the search (H24)."""
MEMORY, LONG_MEMORY = 0.97, 0.98
"""How much of what a broadcast left out stays at the server, unless it is typed; more where one round says little (decision H24)."""
FEW = 0.075
"""Rows a round has for each weight, below which the first choice of a support is little better than chance (decision H8)."""
TRIAL = 0.5
"""Weights then on trial when the search begins, over those the model keeps."""
SETTLED = 0.25
"""Where the server's rate ends while polishing, unless rows are few: what still moves there is mostly noise (decision H16)."""
GENTLE = 0.25
"""Steps of weights and gates, over their rates, where so few weights are kept that weights travel by rule (decision H17)."""


class Uplink(StrEnum):
    """What clients send while searching."""

    UPDATES = "updates"
    """signs of the largest updates, `reach` times as many as the model keeps at most; an absent entry is no change"""
    WEIGHTS = "weights"
    """the largest weights, as many as the model keeps; an absent entry is zero"""


class Ending(StrEnum):
    """What holds the constraint while polishing."""

    EXACT = "exact"
    """the exact dual: gates of the support open, all others as the constraint needs, their expected number m"""
    FROZEN = "frozen"
    """gates of the support wide open, all others shut"""


class Server(NamedTuple):
    """theta~ with all it remembers, two log_alpha (on the support and off it), and the shift that made the constraint tight."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    moments: Moments
    rows: Tensor
    """how many a round has had so far, in the mean; 0 where clients are hidden"""
    signs: Tensor
    """the part of all updates whose signs say most, in the mean of the last replies; 0 where nobody has said"""
    width: Tensor
    """what the first round decided: weights travel, in messages of this density at first, or 0: signs do; below 0 the density decides"""
    layout: Layout


class Client(NamedTuple):
    """A stack of clients: theta~, phi, and the broadcast they all began with."""

    weights: Tensor
    log_alpha: Tensor
    packet: Packet
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Sieve(Method):
    """Saliency gates, sign-coded updates while searching, an L0 constraint that holds exactly at the end."""

    holds_everywhere: ClassVar[bool] = True
    precisions: ClassVar[tuple[int | None, ...]] = (*PRECISIONS, None)
    shape: ClassVar[HardConcrete] = HardConcrete()
    """the gates' distribution"""

    rate: float = 2.0
    batch: int | Literal["all"] = 64
    weights: Weighting = field(default=Weighting.SQRT, metadata={"section": "federation"})
    server_rate: float = 1.0
    """the server's learning rate; along signs twice that, three times where rows are few"""
    memory: float | None = None
    """how much of what a broadcast left out stays at the server (none: .97, or .98 where rows are few or weights travel)"""
    gate_rate: float = 0.3
    """step of log_alpha along the saliency, in units of its root mean square"""
    bits: Literal[32, 16, 8, 4] | None = None
    """precision of the values in messages (none: by rule; 4 where updates travel, but 8 in broadcasts once the support is found)"""
    schedule: Schedule | None = None
    """how the density of messages falls to its target (none: cubic where weights travel by rule and rows fill them, else constant)"""
    uplink: Uplink | None = None
    """what clients send while searching (none: by the first round; signs of many updates, or weights where few matter)"""
    reach: float = 4.0
    """signs of updates a client sends at most while searching, over the weights the model keeps; never above .15 of all or what it keeps"""
    search: float | None = None
    """part of the rounds in which the support is searched (none: .8, less at densities above .1: .08 / density)"""
    ending: Ending = Ending.EXACT
    """what holds the constraint after the search: the exact dual, or a frozen support"""

    def __post_init__(self) -> None:
        """Refuse what could find nothing."""
        super().__post_init__()
        at_least(0, gate_rate=self.gate_rate)
        at_least(1, reach=self.reach)
        fraction(search=self.searched)
        above_zero(search=self.searched)

    # What the first round decides

    def measures(self, clock: Clock) -> bool:
        """Whether this is the round that shows what is to travel: the first, where it is left open and replies may tell."""
        return self.uplink is None and self.trusting and clock.round == 0

    @property
    def trusting(self) -> bool:
        """Whether replies may say what messages should be: not where clients are hidden or not trusted.

        Nor where layers have budgets of their own: one number would not fit them all.
        """
        return self.private is None and self.mean is Mean.WEIGHTED and self.budget is BudgetRule.GLOBAL

    def decided(self, replies: Sequence[Reply], layout: Layout) -> float:
        """The width of messages by what the replies of the first round say, each counted by its rows; too few rows tell nothing."""
        counts = examples(replies)
        if sum(counts) < ENOUGH_ROWS * len(counts):
            return BY_DENSITY
        told = sum(count * float(reply.packet.scalars["spread"]) for count, reply in zip(counts, replies, strict=True))
        return self.wanted(told / sum(counts), sum(counts), layout)

    def wanted(self, spread: float, rows: float, layout: Layout) -> float:
        """The width of messages by what the first round told: over which part of all weights updates are spread, and its rows (H25).

        Spread over few, weights tell more than signs; over more than the model keeps, in wide messages, which fall, where rows fill
        them. Spread less than evenly, signs tell more than weights at low densities too.
        """
        if spread < NARROW:
            wide = max(self.first_density, self.density)
            return wide if spread >= WIDER * self.density and rows >= FILLED * wide * layout.gated else self.density
        return 0.0 if self.density <= SPARSEST and spread < EVEN else BY_DENSITY

    def fitted(self, width: float) -> "Sieve":
        """The method with what it left open filled in."""
        return self if width < 0 else _filled(self, width)

    def heeding(self, packet: Packet) -> "Sieve":
        """The method as a broadcast asks for it."""
        return self.fitted(float(packet.scalars.get("width", BY_DENSITY)))

    # Schedules

    @property
    def searched(self) -> float:
        """The part of the rounds in which the support is searched: the shorter, the more the model keeps."""
        return min(LONG_SEARCH, SHARE / self.density) if self.search is None else self.search

    @property
    def turns(self) -> dict[str, float]:
        """The end of the search, beside the schedule's turns."""
        return super().turns | {"search ends": self.searched}

    def searching(self, clock: Clock) -> bool:
        """Whether the support may still change."""
        return clock.round < self.searched * clock.rounds

    def open_density(self, server: Server, clock: Clock) -> float:
        """The mean P(z != 0) the exact dual asks for after this round: gates at log_alpha 0 first, the density when the search ends."""
        target = self.message_density(clock)
        free = float(gates.active_probability(self.shape, torch.zeros(1))[0])
        done = min((clock.round + 1) / (self.searched * clock.rounds), 1.0)
        power = LATE_FALL if self.says_little(server) else FALL
        return target + max(free - target, 0.0) * (1 - done**power)

    @property
    def travels(self) -> Uplink:
        """What clients send while searching."""
        return self.uplink or (Uplink.WEIGHTS if self.density <= SPARSEST and self.budget is BudgetRule.GLOBAL else Uplink.UPDATES)

    def precision(self, *, fine: bool) -> int:
        """Bits a value; a broadcast is fine once the support is found: then rounding is the only noise there is."""
        return self.bits or (COARSE if self.travels is Uplink.UPDATES and not fine else FINE)

    def pace(self, clock: Clock) -> float:
        """Of steps of weights and gates: gentle where a model keeps so few that its loss stays far from 0, which Polyak's step aims at.

        Not in the round that shows how far updates are spread, which steps of another length would change.
        """
        return GENTLE if self.fewest and not self.measures(clock) else 1.0

    @property
    def stride(self) -> float:
        """Of steps of weights alone: brisk where each is cut to a message that falls."""
        return BRISK if self.cuts else 1.0

    @property
    def fewest(self) -> bool:
        """Whether the model keeps so few weights that weights travel by rule."""
        return self.uplink is None and self.travels is Uplink.WEIGHTS

    @property
    def course(self) -> Schedule:
        """The schedule of messages: they fall where the model keeps fewest, whose first choice is little better than chance (H22)."""
        return self.schedule or (Schedule.CUBIC if self.fewest else Schedule.CONSTANT)

    @property
    def counts_signs(self) -> bool:
        """Whether replies say how many signs would tell most: not where weights travel."""
        return self.travels is Uplink.UPDATES and self.trusting

    def most_signs(self, clock: Clock) -> float:
        """The part of all updates whose signs are sent at most: a multiple of what the model keeps, bounded, or what a broadcast holds."""
        return max(min(self.reach * self.density, SIGNS), self.message_density(clock))

    def signs(self, server: Server, clock: Clock) -> float:
        """The part of all updates whose signs clients are asked for: what told most in the last round, at least the density (H23)."""
        most = self.most_signs(clock)
        return most if server.signs == 0 else min(max(float(server.signs), self.density), most)

    @staticmethod
    def fewer_rows(server: Server, least: float) -> bool:
        """Whether rounds have had fewer rows for each weight, as far as is known."""
        return 0 < float(server.rows) < least * server.layout.gated

    def says_little(self, server: Server) -> bool:
        """Whether one round says little of what matters: its rows are few, or clients send weights, each its own choice."""
        return self.travels is Uplink.WEIGHTS or self.fewer_rows(server, FEW)

    def remembered(self, server: Server) -> float:
        """How much of what a broadcast left out stays at the server."""
        return self.memory if self.memory is not None else LONG_MEMORY if self.says_little(server) else MEMORY

    def boldness(self, server: Server, replies: int, clock: Clock) -> float:
        """The server's rate: more along signs, in proportion to how well so many know the mean; then 1, falling where rows suffice."""
        if not self.searching(clock):
            found = self.searched * clock.rounds
            done = (clock.round - found) / (clock.rounds - found)
            return 1.0 if self.fewer_rows(server, FEW) else 1 + (SETTLED - 1) * done
        if self.travels is Uplink.WEIGHTS:
            return self.server_rate
        bold = FROM_FEW_ROWS if self.fewer_rows(server, THIN) else ALONG_SIGNS
        return self.server_rate * bold * min(replies / ENOUGH, 1.0) ** 0.5

    def sent(self, server: Server, clock: Clock) -> float:
        """The density of a broadcast: where rows are few, weights on trial come on top, fewer each round until the search ends.

        What is left out is judged by updates of a zero, what is sent by what it becomes beside the others: without a trial the first
        stay. A falling schedule is such a trial itself; where weights travel, clients would send those on trial too.
        """
        density = self.message_density(clock)
        if not self.fewer_rows(server, FEW) or self.course is not Schedule.CONSTANT or self.travels is Uplink.WEIGHTS:
            return density
        left = max(1 - clock.round / (self.searched * clock.rounds), 0.0)
        return min(density * (1 + TRIAL * left), 1.0)

    # What matters

    def chosen(
        self, vector: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, density: float
    ) -> Bool[Tensor, "*k p"]:
        """The largest entries of a vector, each counted as often as its gate is open."""
        return selection.top(self.score(vector, log_alpha), self.budget_of(layout, density), layout.groups)

    def score(self, vector: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
        """|v| P(z != 0)."""
        return vector.abs() * gates.active_probability(self.shape, log_alpha)

    # The round

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """All gates alike."""
        none = torch.zeros_like(weights[0])
        log_alpha = opened(torch.zeros_like(weights), layout)
        return Server(weights, log_alpha, none, no_moments(weights), none, none, torch.full_like(none, BY_DENSITY), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """The largest m weights and those on trial, and the two log_alpha; where it is not the density's, what is to travel."""
        now = self.fitted(float(server.width))
        chosen = now.chosen(server.weights, server.log_alpha, server.layout, now.sent(server, clock))
        bits = now.precision(fine=not now.searching(clock))
        packet = sparse_packet(selection.positions(chosen), {"weights": server.weights}, bits, draw)
        packet.scalars.update(two_means(server.log_alpha, chosen, server.layout))
        asked = now.signs(server, clock)
        if now.counts_signs and now.searching(clock) and asked < now.most_signs(clock):
            packet.scalars["signs"] = torch.tensor(asked, dtype=torch.float32)
        if server.width >= 0:
            packet.scalars["width"] = server.width.to(torch.float32)
        return packet

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """theta~ from the broadcast, 0 off the support; one log_alpha on it, one off it."""
        weights, mask = packet.dense("weights", dtype), packet.mask(dtype)
        log_alpha = torch.where(mask > 0, packet.scalar("kept_gate", dtype), packet.scalar("rest_gate", dtype))
        return Client(weights, opened(log_alpha, layout), packet, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta~ -= eta z g; phi -= gate_rate * saliency / rms, saliency = theta~ g, rms over m entries; both at the method's pace.

        Polyak's step divides by the whole gradient, also where gates are shut: by z g it would grow manyfold as they close. It counts a
        loss above that of no model at all as that one: a step that went too far is not followed by a longer one (decision H26).
        """
        now, layout = self.heeding(client.packet), objective.layout
        gate = now.gate(client.log_alpha, layout, clock, draw)
        loss, gradient = objective.gradient(client.weights * gate, batch)
        size = now.pace(clock) * now.stride * now.step_size(loss.minimum(objective.empty_loss(batch)), gradient, batch, clock)
        gradient = optimizers.clipped(gradient, now.clip)
        saliency = selection.shared(client.weights * gradient, layout.groups)
        kept = total_kept(now.message_budget(client.layout, clock))
        rms = (saliency.square().sum(-1, keepdim=True) / kept).sqrt().clamp_min(torch.finfo(saliency.dtype).tiny)
        log_alpha = (client.log_alpha - now.pace(clock) * now.gate_rate * saliency / rms).clamp(-ROUND_LIMIT, ROUND_LIMIT)
        if now.ending is Ending.FROZEN and not now.searching(clock):
            log_alpha = client.log_alpha
        log_alpha = opened(log_alpha, layout)
        weights = client.weights - size * gate * gradient
        if now.cuts:
            weights = now.projected(weights, log_alpha, client.layout, layout, clock)
        return client._replace(weights=weights, log_alpha=log_alpha)

    def gate(self, log_alpha: Float[Tensor, "k n"], layout: Layout, clock: Clock, draw: Draw) -> Float[Tensor, "k n"]:
        """Sampled; all open while the support is polished (decision H18), and from the start where the model keeps fewest (H21).

        Other weights then take up what is a client's own, or what so few cannot say.
        """
        alone = self.ending is Ending.FROZEN or self.uplink is Uplink.WEIGHTS or self.density >= SIGNS
        if not alone and (self.fewest or not self.searching(clock)):
            return torch.ones_like(log_alpha)
        noise = selection.one_per_group(draw("gates", log_alpha.shape[-1]), layout.groups)
        return gates.sample(self.shape, log_alpha, noise).value

    @property
    def cuts(self) -> bool:
        """Where weights travel under a falling schedule, not by density, a local step keeps only as many as a message holds (H9)."""
        return self.uplink is Uplink.WEIGHTS and self.course is not Schedule.CONSTANT

    @property
    def projects(self) -> bool:
        """Whether local steps may be cut."""
        return self.cuts or (self.uplink is None and self.trusting)

    def projected(
        self, weights: Float[Tensor, "k n"], log_alpha: Float[Tensor, "k n"], whole: Layout, layout: Layout, clock: Clock
    ) -> Float[Tensor, "k n"]:
        """The largest |theta~| P(z != 0) of the round's budget, zeros elsewhere; what is out of sight (sparse rows) is zero already."""
        parts = self.message_budget(whole, clock)
        if layout.size != whole.size:
            parts = selection.narrowed(parts, layout.gated, layout.free)
        return torch.where(selection.top(self.score(weights, log_alpha), parts, layout.groups), weights, torch.zeros_like(weights))

    def shared_support(self, packet: Packet, clock: Clock) -> Int64[Tensor, " m"] | None:
        """All while searching, then the broadcast's."""
        return None if self.searching(clock) else packet.support

    @property
    def reply_fields(self) -> frozenset[str]:
        """All that replies of some round may hold."""
        left_open = frozenset({"update", "weights", "signs", "spread"}) if self.uplink is None and self.trusting else frozenset()
        return left_open | {self.field, *GATES, *(("signs",) if self.counts_signs else ())}

    def answers(self, packet: Packet, clock: Clock) -> frozenset[str]:
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
        kept = now.chosen(weights, client.log_alpha, layout, now.message_density(clock))
        vector = weights - client.packet.dense("weights", weights.dtype) if now.travels is Uplink.UPDATES else weights
        if not now.searching(clock):
            sent = (client.packet.mask(weights.dtype) > 0).expand_as(weights)
        elif now.travels is Uplink.UPDATES:
            asked = client.packet.scalars.get("signs", now.most_signs(clock))
            sent = now.chosen(vector, client.log_alpha, layout, float(asked))
        else:
            sent = kept
        support = selection.positions(sent)
        packet = sparse_packet(support, {now.field: vector}, now.precision(fine=False), draw)
        if now.searching(clock) and now.travels is Uplink.UPDATES:
            packet.fields[now.field] = round_signs(vector.gather(-1, support))
        packet.scalars.update(two_means(client.log_alpha, kept, layout))
        if now.counts_signs:
            most = selection.kept_count(now.most_signs(clock), layout.gated)
            packet.scalars["signs"] = telling(now.score(vector, client.log_alpha), most, layout)
        if self.measures(clock):
            packet.scalars["spread"] = telling((weights - client.packet.dense("weights", weights.dtype)).abs(), layout.gated, layout)
        return packet

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta <- sent + server step along the mean update + memory * (what the broadcast left out); then the dual, solved."""
        now, dtype, layout = self.heeding(packet), server.weights.dtype, server.layout
        sent = packet.dense("weights", dtype)
        merged = now.merged(packet, replies, server.weights, clock, draw)
        update = merged[now.field] - (sent if now.travels is Uplink.WEIGHTS else 0)
        if now.private is None:
            server = server._replace(rows=server.rows + (sum(examples(replies)) - server.rows) / (clock.round + 1))
        if now.counts_signs:
            server = server._replace(signs=merged["signs"][0])
        if self.measures(clock):
            server = server._replace(width=torch.full_like(server.width, self.decided(replies, layout)))
        rate = now.boldness(server, len(replies), clock)
        moved, moments = optimizers.step(now.server, server.moments, sent, -update, rate, momentum=now.server_momentum)
        theta = moved + now.remembered(server) * (server.weights - sent)
        both = torch.cat([merged[name] for name in GATES])
        found = not now.searching(clock._replace(round=clock.round + 1))
        if found and now.ending is Ending.FROZEN:
            both = torch.tensor([LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT]).to(both)
        chosen = now.chosen(theta, server.log_alpha, layout, now.message_density(clock) if found else now.sent(server, clock))
        kept = chosen[: layout.gated].to(dtype).mean()
        shift = constraint.exact_shift(now.shape, both, now.open_density(server, clock), torch.stack((kept, 1 - kept)))
        on, off = constraint.shifted(both, shift)
        if found and on < OPEN:
            on, off = now.parted(kept, now.message_density(clock))
        log_alpha = opened(torch.where(chosen, on, off), layout)
        return server._replace(weights=theta, log_alpha=log_alpha, multiplier=-shift, moments=moments)

    def parted(self, kept: Float[Tensor, ""], density: float) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The support open, the rest as the constraint needs: the dual solved for the rest alone."""
        on = torch.full_like(kept, OPEN)
        rest = (density - kept * gates.active_probability(self.shape, on[None])[0]) / (1 - kept).clamp_min(GATE_MARGIN)
        off = torch.logit(rest.clamp(1e-9, 0.5)) - self.shape.offset
        return on, off.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)

    def close(self, server: Server, clock: Clock) -> Server:
        """Nothing is left to do at the end of a round."""
        return server

    # The model

    def theta(self, server: Server) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate, the m largest (decision C5)."""
        gate = gates.at_test_time(self.shape, server.log_alpha).clamp_min(GATE_MARGIN)
        return exactly(self.final_budget(server.layout), server.weights * gate, server.layout)

    def full_theta(self, server: Server) -> Float[Tensor, " p"]:
        """theta~ times the test-time gate."""
        return server.weights * gates.at_test_time(self.shape, server.log_alpha)

    def info(self, server: Server) -> dict[str, Tensor]:
        """Density as expected and at test time, the shift of the exact dual, the violation, and the density of messages."""
        log_alpha = server.log_alpha[: server.layout.gated]
        return facts(self.shape, server, self.density) | {"message_density": (log_alpha == log_alpha.amax()).to(log_alpha).mean()}


@lru_cache(maxsize=64)
def _filled(method: Sieve, width: float) -> Sieve:
    """The method with its open options set for messages of weights that begin so wide, or, at 0, for signs of updates."""
    if width == 0:
        return replace(method, uplink=Uplink.UPDATES)
    if method.schedule is not None:
        return replace(method, uplink=Uplink.WEIGHTS, bits=method.bits or (FINE if method.schedule is Schedule.CONSTANT else COARSE))
    if width <= 1.01 * method.density:  # the width was rounded on its way
        return replace(method, uplink=Uplink.WEIGHTS, schedule=Schedule.CONSTANT, bits=method.bits or FINE)
    end = method.searched if method.schedule_end == Sieve.schedule_end else method.schedule_end
    return replace(method, uplink=Uplink.WEIGHTS, schedule=Schedule.CUBIC, schedule_end=end, bits=method.bits or COARSE)


def telling(sizes: Float[Tensor, "k p"], most: int, layout: Layout) -> Float[Tensor, " k"]:
    """The part of all magnitudes, free coordinates apart, that tells most of a vector when sent as signs: at most so many of them."""
    return (telling_signs(sizes[..., : layout.gated], most) / layout.gated).to(torch.float32)


def two_means(log_alpha: Float[Tensor, "*k p"], chosen: Bool[Tensor, "*k p"], layout: Layout) -> dict[str, Float[Tensor, "*k"]]:
    """The mean log_alpha of what was chosen and of the rest, free coordinates apart: all that a message says of the gates."""
    inside, log_alpha = chosen[..., : layout.gated].to(log_alpha), log_alpha[..., : layout.gated]
    total, kept = log_alpha.sum(-1), (log_alpha * inside).sum(-1)
    count = inside.sum(-1)
    on, off = kept / count.clamp_min(1), (total - kept) / (layout.gated - count).clamp_min(1)
    return {"kept_gate": on.to(torch.float32), "rest_gate": off.to(torch.float32)}
