"""Algorithms without a server: what a node does with its own local steps and with the messages of its neighbours.

A node holds the server state of its algorithm. Its message is the algorithm's broadcast, so it is as sparse and as rounded as one. With
C(x) for the decoded message of state x, a mixing step is

    x_i <- x_i + sum_j w_ij (C(x_j) - C(x_i)).

The part of x that a message leaves out stays at its node: error feedback. Symmetric weights leave the mean of all nodes unchanged.

Prior work: decentralised FedAvg (Sun et al. 2021, arXiv 2104.11375) is fed-avg here; gossip hard thresholding and DIHT (Patterson et al.
2013, arXiv 1308.6086) is fed-iter-ht; CHOCO-SGD (Koloskova et al. 2019, arXiv 1902.00340) is fed-ef, whose messages are differences to
public copies. The others mix differences as CHOCO does, but without copies, so that neighbours may change from step to step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.fed_avg import FedAvg, Server
from fedsieve.algorithms.fed_ef import FedEF
from fedsieve.algorithms.flops_pa import FlopsPA, GateEncoding
from fedsieve.algorithms.hard_thresholding import Thresholding
from fedsieve.algorithms.log_alpha import open_ungated
from fedsieve.algorithms.sieve import Sieve, mean_gates
from fedsieve.core import constraint, topk
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.optimizers import Optimizer, initial_moments
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.random import Draw
from fedsieve.core.types import Clock, Layout

CONSENSUS_RATE = 0.3
"""gamma of CHOCO-SGD. Its bound guarantees convergence and is far too small in practice."""
Nodes = Any
"""The server state of an algorithm, with a node axis in front of every tensor."""


@dataclass(frozen=True)
class NodeRules(ABC):
    """How nodes of one kind of algorithm use local steps and messages."""

    algorithm: Any
    vector: str = "theta"
    """the field of the state with the weights"""

    @property
    def settle_fraction(self) -> float | None:
        """The fraction of the rounds after which nodes agree on one support; None: never."""
        return self.algorithm.anneal_end

    def weights(self, nodes: Nodes) -> Float[Tensor, "n p"]:
        """Return the weights of all nodes."""
        return getattr(nodes, self.vector)

    @property
    def needs_fixed_links(self) -> bool:
        """Whether every neighbour must receive every message."""
        return False

    def start(self, server: Any) -> Any:
        """Return the state of a node at the start."""
        return server

    def as_server(self, node: Any) -> Any:
        """Return the state of a node as that of the algorithm's server, for its parameters."""
        return node

    def start_packet(self, nodes: Nodes, clock: Clock, draw: Draw) -> Packet:
        """Return what the nodes start their local steps from: their own sparse models."""
        return self.algorithm.broadcast(nodes, clock, draw)

    def copies(self, nodes: Nodes) -> dict[str, Float[Tensor, "n p"]]:
        """Return what all nodes know of each other before the first message; nothing if a message needs no earlier one."""
        return {}

    def encode(self, nodes: Nodes, clock: Clock, draw: Draw) -> tuple[Nodes, Packet]:
        """Return the nodes and their messages."""
        return nodes, self.algorithm.broadcast(nodes, clock, draw)

    def decode(self, packet: Packet, copies: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return decoded messages by field; `copies` is what this returned for the messages before."""
        return self.algorithm.decode_dense(packet, dtype)

    @abstractmethod
    def after_steps(self, nodes: Nodes, start: Packet, client: Any, clock: Clock) -> Nodes:
        """Return the nodes after local steps from `start`."""

    @abstractmethod
    def mix(self, nodes: Nodes, change: Mapping[str, Tensor], clock: Clock) -> Nodes:
        """Return the nodes plus the change of each decoded field."""

    def end_round(self, nodes: Nodes, clock: Clock) -> Nodes:
        """Return the nodes after the last mixing step of a round."""
        return nodes

    def support_mask(self, nodes: Nodes) -> Bool[Tensor, "n p"]:
        """Return the support on which each node would settle."""
        layout = nodes.layout
        return topk.top_mask(self.importance(nodes), self.algorithm.final_budget(layout), layout.groups)

    def importance(self, nodes: Nodes) -> Float[Tensor, "n p"]:
        """Return the scores by which the support is chosen."""
        return self.weights(nodes).abs()

    def restrict(self, nodes: Nodes, mask: Bool[Tensor, "n p"]) -> Nodes:
        """Return the nodes with nonzero weights exactly on a mask."""
        weights = self.weights(nodes)
        nonzero = torch.where(weights == 0, torch.finfo(torch.float32).tiny, weights)
        return nodes._replace(**{self.vector: torch.where(mask, nonzero, 0.0)})

    def keep_residual(self, weights: Float[Tensor, "n p"], start: Packet, trained: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        """Return trained + residual_decay * (weights - start)."""
        return trained + self.algorithm.residual_decay * (weights - start.field_dense(next(iter(start.fields)), weights.dtype))


@dataclass(frozen=True)
class ThetaRules(NodeRules):
    """FedAvg and the thresholding algorithms: one vector."""

    @property
    def settle_fraction(self) -> float | None:
        """FedAvg is dense until its end."""
        return None if isinstance(self.algorithm, FedAvg) else self.algorithm.anneal_end

    def after_steps(self, nodes: Nodes, start: Packet, client: Any, clock: Clock) -> Nodes:
        """theta <- trained theta, with the residual of the start."""
        return nodes._replace(theta=self.keep_residual(nodes.theta, start, client.theta))

    def mix(self, nodes: Nodes, change: Mapping[str, Tensor], clock: Clock) -> Nodes:
        """theta <- theta + change."""
        return nodes._replace(theta=nodes.theta + change["theta"])


class ChocoNode(NamedTuple):
    """The weights of a node, and the copy of them that all of its neighbours hold."""

    theta: Tensor
    public: Tensor
    layout: Layout


@dataclass(frozen=True)
class ChocoRules(NodeRules):
    """Fed-EF is CHOCO-SGD: q = C(theta - public); public <- public + q on both sides; theta + gamma sum_j w_ij (public_j - public_i)."""

    @property
    def settle_fraction(self) -> float | None:
        """CHOCO-SGD is dense until its end."""
        return None

    @property
    def needs_fixed_links(self) -> bool:
        """A neighbour that misses a message has another copy from then on."""
        return True

    def start(self, server: Any) -> ChocoNode:
        """All copies are those of the common start."""
        return ChocoNode(server.theta, server.theta, server.layout)

    def as_server(self, node: ChocoNode) -> Server:
        """Return the weights."""
        return Server(node.theta, initial_moments(node.theta), node.layout)

    def start_packet(self, nodes: ChocoNode, clock: Clock, draw: Draw) -> Packet:
        """Start from all weights."""
        return dense_packet({"theta": nodes.theta}, 32, draw)

    def after_steps(self, nodes: ChocoNode, start: Packet, client: Any, clock: Clock) -> ChocoNode:
        """theta <- trained theta."""
        return nodes._replace(theta=client.theta)

    def copies(self, nodes: ChocoNode) -> dict[str, Float[Tensor, "n p"]]:
        """Return the public copies."""
        return {"theta": nodes.public}

    def encode(self, nodes: ChocoNode, clock: Clock, draw: Draw) -> tuple[ChocoNode, Packet]:
        """Send the compressed difference to the public copies, which then include it."""
        packet = self.algorithm.compress(nodes.theta - nodes.public, nodes.layout, clock, draw)
        return nodes._replace(public=nodes.public + packet.field_dense("update", nodes.theta.dtype)), packet

    def decode(self, packet: Packet, copies: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the public copies of the senders."""
        return {"theta": copies["theta"] + packet.field_dense("update", dtype)}

    def mix(self, nodes: ChocoNode, change: Mapping[str, Tensor], clock: Clock) -> ChocoNode:
        """theta <- theta + gamma change."""
        return nodes._replace(theta=nodes.theta + CONSENSUS_RATE * change["theta"])


@dataclass(frozen=True)
class FlopsPARules(NodeRules):
    """FLoPS-PA: theta~ and log_alpha are mixed; each node ascends its own multiplier on its mixed gates."""

    vector: str = "weights"

    def after_steps(self, nodes: Nodes, start: Packet, client: Any, clock: Clock) -> Nodes:
        """theta~ and log_alpha <- trained ones."""
        weights = self.keep_residual(nodes.weights, start, client.weights)
        return nodes._replace(weights=weights, theta=weights, log_alpha=client.log_alpha)

    def mix(self, nodes: Nodes, change: Mapping[str, Tensor], clock: Clock) -> Nodes:
        """Add both changes; log_alpha stays within its limits."""
        log_alpha = self.algorithm.normalize_log_alpha(nodes.log_alpha + change["gate"], nodes.layout)
        weights = nodes.weights + change["theta"]
        return nodes._replace(weights=weights, theta=weights, log_alpha=log_alpha)

    def end_round(self, nodes: Nodes, clock: Clock) -> Nodes:
        """Take the dual step, scale log_alpha, as FLoPS-PA's server does after aggregation."""
        algorithm, layout = self.algorithm, nodes.layout
        multiplier, log_alpha = algorithm.ascend(nodes.multiplier, nodes.log_alpha, layout, clock), nodes.log_alpha
        if rounds_left := algorithm.scalings_left(clock):
            log_alpha = algorithm.scale_log_alpha(log_alpha, algorithm.top_mask(nodes.weights, log_alpha, layout, clock), rounds_left)
        return nodes._replace(multiplier=multiplier, log_alpha=algorithm.normalize_log_alpha(log_alpha, layout))

    def importance(self, nodes: Nodes) -> Float[Tensor, "n p"]:
        """|theta~| z."""
        return self.algorithm.importance(nodes.weights, nodes.log_alpha)

    def restrict(self, nodes: Nodes, mask: Bool[Tensor, "n p"]) -> Nodes:
        """Open the gates of the support and close the others."""
        nodes = super().restrict(nodes, mask)
        limit = min(self.algorithm.log_alpha_limit, LOG_ALPHA_LIMIT)
        return nodes._replace(theta=nodes.weights, log_alpha=open_ungated(torch.where(mask, limit, -limit).to(nodes.weights), nodes.layout))


@dataclass(frozen=True)
class SieveRules(NodeRules):
    """sieve: theta~ and the two gate logits are mixed; each node solves the dual by its own shift."""

    vector: str = "weights"

    @property
    def settle_fraction(self) -> float | None:
        """Nodes agree when the search ends."""
        return self.algorithm.search_fraction

    def after_steps(self, nodes: Nodes, start: Packet, client: Any, clock: Clock) -> Nodes:
        """theta~ <- trained theta~ with the residual; the gates' means on and off the client's support."""
        algorithm, layout = self.algorithm, nodes.layout
        weights = self.keep_residual(nodes.weights, start, client.weights)
        means = mean_gates(client.log_alpha, algorithm.support_mask(client.weights, client.log_alpha, layout, clock), layout)
        return self._with_gates(nodes._replace(weights=weights), means, clock)

    def mix(self, nodes: Nodes, change: Mapping[str, Tensor], clock: Clock) -> Nodes:
        """Add the changes of theta~ and of both logits."""
        mask = self.algorithm.support_mask(nodes.weights, nodes.log_alpha, nodes.layout, clock)
        means = mean_gates(nodes.log_alpha, mask, nodes.layout)
        means = {name: value.to(nodes.weights) + change[name][:, 0] for name, value in means.items()} if "kept_gate" in change else means
        return self._with_gates(nodes._replace(weights=nodes.weights + change["weights"]), means, clock)

    def end_round(self, nodes: Nodes, clock: Clock) -> Nodes:
        """Shift both logits so that the expected density is that of the schedule."""
        algorithm, layout = self.algorithm, nodes.layout
        if algorithm.dual_update is not DualUpdate.BISECTION:
            return nodes
        mask = algorithm.support_mask(nodes.weights, nodes.log_alpha, layout, clock)
        means = mean_gates(nodes.log_alpha, mask, layout)
        both = torch.stack((means["kept_gate"], means["default_gate"]), dim=-1).to(nodes.weights)
        kept = mask[0, : layout.num_gated].to(nodes.weights).mean()
        shift = constraint.bisect_shift(algorithm.shape, both, algorithm.expected_density(clock), torch.stack((kept, 1 - kept)))
        on, off = constraint.shift_log_alpha(both, shift).unbind(-1)
        return self._with_gates(nodes._replace(multiplier=-shift), {"kept_gate": on, "default_gate": off}, clock)

    def importance(self, nodes: Nodes) -> Float[Tensor, "n p"]:
        """|theta~|: log_alpha has one value on the support of a node and one off it, which says nothing about other supports."""
        return nodes.weights.abs()

    def restrict(self, nodes: Nodes, mask: Bool[Tensor, "n p"]) -> Nodes:
        """Open the gates of the support and close the others."""
        nodes = super().restrict(nodes, mask)
        return nodes._replace(log_alpha=open_ungated(torch.where(mask, LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT).to(nodes.weights), nodes.layout))

    def _with_gates(self, nodes: Nodes, means: Mapping[str, Tensor], clock: Clock) -> Nodes:
        """Return the nodes with one logit on the support of their weights and one off it."""
        mask = self.algorithm.support_mask(nodes.weights, nodes.log_alpha, nodes.layout, clock)
        on, off = (means[name].to(nodes.weights)[:, None] for name in ("kept_gate", "default_gate"))
        return nodes._replace(log_alpha=open_ungated(torch.where(mask, on, off), nodes.layout))


def node_rules(algorithm: BaseAlgorithm, name: str) -> NodeRules:
    """Return the rules of an algorithm, or raise ValueError if it needs a server."""
    if isinstance(algorithm, Sieve):
        return SieveRules(algorithm)
    if isinstance(algorithm, FlopsPA):
        if algorithm.gate_encoding is not GateEncoding.LOG_ALPHA:
            raise ValueError(
                f"without a server nodes average log_alpha, which algorithm.gate-encoding {algorithm.gate_encoding} does not send; "
                f"use --algorithm.gate-encoding log-alpha"
            )
        rules: NodeRules = FlopsPARules(algorithm)
    elif isinstance(algorithm, FedEF):
        rules = ChocoRules(algorithm)
    elif isinstance(algorithm, (FedAvg, Thresholding)):
        rules = ThetaRules(algorithm)
    else:
        raise ValueError(
            f"algorithm {name} needs a server; without one use sieve, flops-pa, fed-avg, fed-ef, fed-ht, fed-iter-ht or fed-round-ht, "
            f"or --topology star or tree"
        )
    if algorithm.server_optimizer is not Optimizer.SGD:
        raise ValueError(
            f"algorithm.server-optimizer {algorithm.server_optimizer} is of a server, and this topology has none; leave it out"
        )
    return rules
