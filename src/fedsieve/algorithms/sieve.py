"""sieve: an m-sparse broadcast with error feedback at the server, saliency gates, and replies coded as well as their bytes allow.

1. The server keeps what a broadcast leaves out: theta <- sent + server_rate * mean update + residual_decay * (theta - sent).
2. In a round log_alpha follows the saliency theta~ g; between rounds only its means on and off the support are kept.
3. A reply has the bytes of m 8-bit entries; the update decides whether they hold many signs or few numbers (`encode_best`).
4. The expected density falls to the target, held in every round by one shift of log_alpha; in the last rounds the support is fixed.

Prior work: signs of the top k with one magnitude, STC (Sattler et al. 2019, arXiv 1903.02891); error feedback (Karimireddy et al. 2019,
arXiv 1901.09847); hard thresholding over a network, DIHT (Patterson et al. 2013, arXiv 1308.6086). docs/theory.md says what is new.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.algorithms.error_feedback import ErrorFeedback
from fedsieve.algorithms.log_alpha import gate_diagnostics, initial_log_alpha, open_nonzero, open_ungated
from fedsieve.algorithms.option_rules import require_at_least, require_positive
from fedsieve.core import budgets, constraint, gates, optimizers, topk
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.gates import GATE_MARGIN, LOG_ALPHA_LIMIT, HardConcrete
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.protocols import EngineSupport, Objective
from fedsieve.core.quantization import CODE_BITS, position_bits
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


class Server(NamedTuple):
    """All weights, the two values of log_alpha (on and off the support), and the last shift of the dual."""

    weights: Tensor
    log_alpha: Tensor
    multiplier: Tensor
    layout: Layout


class Client(NamedTuple):
    """A stack of clients: theta~, phi, and the broadcast from which all of them started."""

    weights: Tensor
    log_alpha: Tensor
    packet: Packet
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Sieve(ErrorFeedback):
    """Saliency gates, error feedback at the server, and an L0 constraint that holds in every round."""

    shape: ClassVar[HardConcrete] = HardConcrete()
    """the distribution of the gates"""
    learning_rate: float = 2.0
    batch_size: int | Literal["all"] = 64
    client_weighting: ClientWeighting = field(default=ClientWeighting.SQRT, metadata={"section": "federation"})
    learn_gates: bool = True
    """whether gates follow the saliency and are sampled in local steps; sampled gates are noise in every layer of a network"""
    gate_rate: float = 0.3
    """step of log_alpha along the saliency, in units of its root mean square over m weights"""
    reply_budget: float = 1.0
    """size of a reply while searching, relative to the m largest entries with 8 bits"""
    reply_bits: Literal[8, 4, 1, "best"] = "best"
    """bits per value of a reply while searching: those that explain most of the update, or a fixed number (1: signs)"""
    initial_gate_probability: float = 0.5
    """rho_init: log_alpha starts at its logit, and the expected density falls from there to the target"""
    dual_update: Literal[DualUpdate.BISECTION, DualUpdate.OFF] = DualUpdate.BISECTION
    """how the constraint is held while searching: by a shift of log_alpha, found by bisection, or not at all"""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        require_at_least(0, gate_rate=self.gate_rate)
        require_positive(reply_budget=self.reply_budget)
        initial_log_alpha(self.initial_gate_probability)

    def init(self, layout: Layout, weights: Float[Tensor, " p"], draw: Draw) -> Server:
        """Start with equal gates."""
        log_alpha = open_ungated(torch.full_like(weights, initial_log_alpha(self.initial_gate_probability)), layout)
        return Server(weights, log_alpha, torch.zeros_like(weights[0]), layout)

    def broadcast(self, server: Server, clock: Clock, draw: Draw) -> Packet:
        """Send the top m weights and the two values of log_alpha."""
        mask = self.support_mask(server.weights, server.log_alpha, server.layout, clock)
        packet = sparse_packet(topk.mask_to_indices(mask), {"weights": server.weights}, self.broadcast_bits(clock), draw)
        packet.scalars.update(mean_gates(server.log_alpha, mask, server.layout))
        return packet

    def support_mask(
        self, weights: Float[Tensor, "*k p"], log_alpha: Float[Tensor, "*k p"], layout: Layout, clock: Clock
    ) -> Bool[Tensor, "*k p"]:
        """Return the mask of the largest |theta~| P(z != 0) within the round's budget."""
        importance = weights.abs() * gates.active_probability(self.shape, log_alpha)
        return topk.top_mask(importance, self.message_budget(layout, clock), layout.groups)

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: torch.dtype) -> Client:
        """Start from the broadcast: theta~ is 0 off the support, log_alpha has one value on it and one off it."""
        weights, mask = packet.field_dense("weights", dtype), packet.support_mask(dtype)
        on, off = (packet.scalars[name].to(dtype)[..., None] for name in ("kept_gate", "default_gate"))
        log_alpha = torch.where(mask > 0, on, off)
        return Client(weights, open_ungated(log_alpha, layout), packet, layout)

    def client_step(self, objective: Objective, client: Client, batch: Batch, clock: Clock, draw: Draw) -> Client:
        """theta~ <- theta~ - eta z g; phi <- phi - gate_rate s / rms(s), with the saliency s = theta~ g.

        Gates are sampled while searching and open afterwards; gates that are not learned are always open here. The Polyak step divides by
        the whole gradient, because |z g| tends to 0 as gates close.
        """
        weights, log_alpha, layout = client.weights, client.log_alpha, objective.layout
        if not self.learn_gates:
            gradient, step_size = self.gradient_and_step_size(objective, weights, batch, clock)
            return client._replace(weights=weights - step_size * gradient)
        gate = torch.ones_like(log_alpha)
        if self.is_searching(clock):
            noise = budgets.broadcast_within_groups(draw("gates", log_alpha.shape[-1]), layout.groups)
            gate = gates.sample(self.shape, log_alpha, noise).value
        loss, gradient = objective.gradient(weights * gate, batch)
        step_size = self.step_size(objective, loss, gradient, batch, clock)
        gradient = optimizers.clip_norm(gradient, self.max_gradient_norm)
        num_kept, limit = client.packet.fields["weights"].codes.shape[-1], LOG_ALPHA_LIMIT
        step = (gradient, gate, step_size, self.gate_rate, num_kept, limit, layout.groups)
        weights, log_alpha = gates.saliency_step(weights, log_alpha, *step)
        return client._replace(weights=weights, log_alpha=open_ungated(log_alpha, layout))

    def client_reply(self, client: Client, clock: Clock, draw: Draw) -> Packet:
        """Send the best code of the update while searching, then its values on the support of the broadcast; and the mean gates."""
        weights, log_alpha, layout = client.weights, client.log_alpha, client.layout
        update = weights - client.packet.field_dense("weights", weights.dtype)
        if self.is_searching(clock):
            num_kept = budgets.num_kept(self.message_density(clock), layout.num_gated)
            allowed_bits = CODE_BITS if self.reply_bits == "best" else (self.reply_bits,)
            min_entries = 1 if layout.groups is None else num_kept
            max_bytes = self.reply_budget * (num_kept + position_bits(num_kept, layout.num_gated) / 8)
            probability = gates.active_probability(self.shape, log_alpha)
            packet = self.encode_best("update", update, probability, layout, max_bytes, allowed_bits, draw, min_entries)
        else:
            packet = self.encode_on_support(client.packet, update, draw)
        packet.scalars.update(mean_gates(log_alpha, self.support_mask(weights, log_alpha, layout, clock), layout))
        return packet

    def aggregate(self, server: Server, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Server:
        """theta <- sent + server_rate * mean update + residual_decay * (theta - sent); then the dual, by bisection."""
        mean = self.aggregate_updates(packet, replies, server.weights, clock, draw)
        weights = self.apply_update(server.weights, packet, mean["update"], clock)
        mask = self.support_mask(weights, server.log_alpha, server.layout, clock)
        gate_means = torch.cat((mean["kept_gate"], mean["default_gate"]))
        shift = torch.zeros_like(server.multiplier)
        if not self.is_searching(clock._replace(round=clock.round + 1)):
            gate_means = torch.tensor([LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT]).to(gate_means)
        elif self.dual_update is DualUpdate.BISECTION:
            kept = mask[: server.layout.num_gated].to(weights).mean()
            shift = constraint.bisect_shift(self.shape, gate_means, self.expected_density(clock), torch.stack((kept, 1 - kept)))
        on, off = constraint.shift_log_alpha(gate_means, shift)
        return Server(weights, open_ungated(torch.where(mask, on, off), server.layout), -shift, server.layout)

    def expected_density(self, clock: Clock) -> float:
        """Return the mean P(z != 0) after this round: it falls along 1 - t^3 from its start to the target at the end of the search."""
        target = self.message_density(clock)
        start = torch.tensor([initial_log_alpha(self.initial_gate_probability)])
        initial = max(float(gates.active_probability(self.shape, start)[0]), target)
        progress = min((clock.round + 1) / (self.search_fraction * clock.num_rounds), 1.0)
        return target + (initial - target) * (1 - progress**3)

    def parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return the m largest theta~ z, with the test-time gate z (decision C5)."""
        return self.project(server.weights * self.test_gates(server).clamp_min(GATE_MARGIN), server.layout)

    def unprojected_parameters(self, server: Server) -> Float[Tensor, " p"]:
        """Return theta~ z, with the test-time gate z."""
        return server.weights * self.test_gates(server)

    def with_parameters(self, server: Server, theta: Float[Tensor, " p"]) -> Server:
        """Return the server state whose test-time parameters are theta: gates are open on its nonzero weights only."""
        return super().with_parameters(server, theta)._replace(log_alpha=open_nonzero(theta))

    def test_gates(self, server: Server) -> Float[Tensor, " p"]:
        """Return the gates of the model: those at test time if they are learned, else open, as in local steps."""
        return gates.compute_test_gates(self.shape, server.log_alpha) if self.learn_gates else torch.ones_like(server.log_alpha)

    def diagnostics(self, server: Server) -> dict[str, Tensor]:
        """Return densities, the shift of the dual, and the violation of the constraint."""
        return gate_diagnostics(self.shape, server, self.density)

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """The update and the mean gates."""
        return frozenset({"update", "kept_gate", "default_gate"})

    @property
    def engine_support(self) -> EngineSupport:
        """Each update decides how many entries its reply has."""
        return EngineSupport(vector_fields=("weights", "log_alpha"), replies_have_equal_length=lambda _: False)


def mean_gates(log_alpha: Float[Tensor, "*k p"], mask: Bool[Tensor, "*k p"], layout: Layout) -> dict[str, Float[Tensor, "*k"]]:
    """Return the mean log_alpha on and off the mask, without ungated coordinates."""
    inside, log_alpha = mask[..., : layout.num_gated].to(log_alpha), log_alpha[..., : layout.num_gated]
    total, kept, num_inside = log_alpha.sum(-1), (log_alpha * inside).sum(-1), inside.sum(-1)
    on, off = kept / num_inside.clamp_min(1), (total - kept) / (layout.num_gated - num_inside).clamp_min(1)
    return {"kept_gate": on.to(torch.float32), "default_gate": off.to(torch.float32)}
