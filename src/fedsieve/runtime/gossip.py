"""Rounds without a server: nodes take local steps, then exchange messages with their neighbours.

A round of every node: local steps from its own sparse model, then `mixing_steps` messages along the links of the topology. After the
search all nodes adopt the support of one of them, which spreads with the messages; from then on messages hold m values without positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedsieve import wire
from fedsieve.algorithms.gossip import NodeRules, Nodes
from fedsieve.core import topk
from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.random import Draw, client_sampler, derive_key
from fedsieve.core.topology import MixingStep, Topology, without_nodes
from fedsieve.core.types import ClientMemory, Clock, Traffic
from fedsieve.runtime.batched import cache_sized_chunks
from fedsieve.runtime.failures import Failures, find_offline
from fedsieve.runtime.local_training import ClientEngine
from fedsieve.runtime.rounds import RoundResult

SUPPORT, LEADER = "support", "leader"
"""What a node keeps besides the state of its algorithm: the support on which it settled, and which node chose it."""
SEARCHING = -1
LEADER_BYTES = 4
"""Bytes of the leader's number, in messages that name their support."""
MIN_SETTLED_BITS = 8
"""Bits per value after the search, when rounding is the only noise left."""


class Settled(NamedTuple):
    """The support of each node after the search, and which node chose it: the lowest leader wins."""

    support: Bool[Tensor, "n p"]
    leader: Int64[Tensor, " n"]
    """a node; nodes that were absent at the end of the search count behind all others; SEARCHING before"""

    @property
    def is_common(self) -> bool:
        """Whether all nodes have settled on one support."""
        return int(self.leader[0]) != SEARCHING and bool((self.leader == self.leader[0]).all())


class NodeTraffic(NamedTuple):
    """Bytes that each node sent and received in a round, and the parts of all messages."""

    sent: Int64[np.ndarray, " n"]
    received: Int64[np.ndarray, " n"]
    messages: Traffic


@dataclass(frozen=True, kw_only=True)
class Gossip:
    """A run without a server."""

    rules: NodeRules
    engine: ClientEngine
    topology: Topology
    mixing_steps: int
    failures: Failures
    sample_bytes: bool = False
    """encode one message per step and count it for all"""

    def train(self, start: Any, rounds: int, first_round: int, memories: Mapping[int, ClientMemory]) -> Iterator[RoundResult]:
        """Yield the rounds from `first_round` on. The server state of a round is the mean of its nodes, which are in `memories`."""
        num_nodes = self.topology.num_nodes
        nodes, settled = restore_nodes(self.rules.start(start), memories, num_nodes)
        for round in range(first_round, rounds):
            absent = np.array(find_offline(self.failures, self.engine.context.seed, round, range(num_nodes)))
            clock = Clock(round, rounds)
            nodes, settled, traffic = self.run_round(nodes, settled, clock, absent)
            present, both = np.flatnonzero(~absent).tolist(), traffic.sent + traffic.received
            columns = self.agreement(nodes) | {"node_bytes": float(both.mean()), "busiest_node_bytes": float(both.max())}
            kept, messages = store_nodes(nodes, settled, clock), traffic.messages
            server, everyone = self.rules.as_server(mean_node(nodes)), list(range(num_nodes))
            yield RoundResult(round, server, everyone, present, [], messages, messages, kept, None, columns)

    def node_states(self, result: RoundResult) -> list[Any]:
        """Return the state of each node after a round."""
        nodes, _ = restore_nodes(self.rules.start(result.server), result.memories, self.topology.num_nodes)
        return [self.rules.as_server(node_state(nodes, i)) for i in range(self.topology.num_nodes)]

    def run_round(self, nodes: Nodes, settled: Settled, clock: Clock, absent: Bool[np.ndarray, " n"]) -> tuple[Nodes, Settled, NodeTraffic]:
        """Return the nodes after local steps and mixing. In the last round they mix until all have one support."""
        present, num_nodes = torch.from_numpy(~absent), len(absent)
        if int(settled.leader[0]) == SEARCHING and clock.round >= self.first_settled_round(clock):
            leader = torch.arange(num_nodes) + num_nodes * (1 - present.to(torch.int64))
            settled = Settled(self.rules.support_mask(nodes), leader)
            nodes = self.rules.restrict(nodes, settled.support)
        nodes = self.take_local_steps(nodes, settled, clock, np.flatnonzero(~absent).tolist())
        traffic = NodeTraffic(np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64), Traffic())
        must_settle, number = clock.round == clock.num_rounds - 1 and self.rules.settle_fraction is not None, 0
        while number < self.mixing_steps or (must_settle and not settled.is_common):
            step = self.topology.step(clock.round * self.mixing_steps + number)
            step = without_nodes(step, absent) if number < self.mixing_steps else step  # the last messages reach all nodes
            nodes, settled, traffic = self.mix(nodes, settled, step, clock._replace(exchange=number), traffic)
            number += 1
        return where_nodes(present, self.rules.end_round(nodes, clock), nodes), settled, traffic

    def first_settled_round(self, clock: Clock) -> float:
        """Return the round in which the nodes settle on their supports."""
        fraction = self.rules.settle_fraction
        return inf if fraction is None else min(fraction * clock.num_rounds, clock.num_rounds - 1)

    def take_local_steps(self, nodes: Nodes, settled: Settled, clock: Clock, present: list[int]) -> Nodes:
        """Return the nodes after their local steps, each from its own sparse model."""
        context, algorithm = self.engine.context, self.engine.context.algorithm
        if not present:
            return nodes
        parts = []
        for chunk in cache_sized_chunks(context, self.engine.data, present):
            part = select_nodes(nodes, chunk)
            start = self.rules.start_packet(part, clock, self.draw("start", clock, chunk))
            client = algorithm.client_init(start, context.objective.layout, clock, context.dtype)
            parts.append(self.rules.after_steps(part, start, self.engine.take_steps(client, clock, chunk), clock))
        nodes = replace_nodes(nodes, present, parts)
        return nodes if int(settled.leader[0]) == SEARCHING else self.rules.restrict(nodes, settled.support)

    def mix(
        self, nodes: Nodes, settled: Settled, step: MixingStep, clock: Clock, traffic: NodeTraffic
    ) -> tuple[Nodes, Settled, NodeTraffic]:
        """Return the nodes, their supports and the traffic after one step: every node sends one message to its receivers."""
        dtype, draw = self.engine.context.dtype, self.draw("message", clock, range(self.topology.num_nodes))
        if int(settled.leader[0]) == SEARCHING:
            nodes, packet, decoded = self.rules.encode(nodes, clock, draw)
            nodes = self.rules.mix(nodes, {name: mixing_change(step, values) for name, values in decoded.items()}, clock)
            return nodes, settled, self.count(traffic, packet, step, clock)
        weights, bits = self.rules.weights(nodes), max(self.rules.algorithm.bits, MIN_SETTLED_BITS)
        support = topk.mask_to_indices(settled.support)
        packet = sparse_packet(support, {self.rules.vector: weights}, bits, draw)
        change = mixing_change(step, packet.field_dense(self.rules.vector, dtype))
        nodes = nodes._replace(**{self.rules.vector: weights + change})
        sent = (None, LEADER_BYTES) if self.sends_positions(clock) else (support[0], 0)
        traffic = self.count(traffic, packet, step, clock, *sent)
        settled = adopt_leaders(settled, step)
        return self.rules.restrict(nodes, settled.support), settled, traffic

    def sends_positions(self, clock: Clock) -> bool:
        """Return whether messages after the search name their support: until all know it, and always if nodes may be absent."""
        num_steps = (clock.round - ceil(self.first_settled_round(clock))) * self.mixing_steps + clock.exchange
        return self.failures.dropout > 0 or num_steps < self.flooding_steps

    @cached_property
    def flooding_steps(self) -> int:
        """Upper bound of the steps in which news reaches all nodes, whichever step of a cycle is first."""
        return self.topology.flooding_steps + len(self.topology.steps) - 1

    def count(
        self,
        traffic: NodeTraffic,
        packet: Packet,
        step: MixingStep,
        clock: Clock,
        reference: Tensor | None = None,
        leader_bytes: int = 0,
    ) -> NodeTraffic:
        """Return the traffic with the messages of one step; `reference` is a support that all nodes have."""
        is_used = step.weights > 0
        copies = np.bincount(step.senders[is_used], minlength=len(step.senders))
        message_id, num_nodes = self.engine.context.message_id(clock), len(copies)
        if self.sample_bytes:
            encoded = wire.encode_stack(packet.rows([0]), 1, message_id, reference) * num_nodes
        else:
            encoded = wire.encode_stack(packet, num_nodes, message_id, reference)
        lengths = np.array([message.length for message in encoded]) + leader_bytes
        sent = copies * lengths
        received = np.where(is_used, lengths[step.senders], 0).sum(1)
        messages = wire.measure_traffic([message for message, count in zip(encoded, copies, strict=True) for _ in range(count)])
        named = int(copies.sum()) * leader_bytes
        messages = messages + Traffic(total=named, header=named)
        return NodeTraffic(traffic.sent + sent, traffic.received + received, traffic.messages + messages)

    def draw(self, purpose: str, clock: Clock, nodes: Sequence[int]) -> Draw:
        """Return the noise of the nodes' messages."""
        context = self.engine.context
        seed = derive_key(context.seed, "gossip", purpose)
        return client_sampler(seed, clock.round, clock.exchange, 0, nodes, context.dtype, context.device)

    def agreement(self, nodes: Nodes) -> dict[str, float]:
        """Return the consensus distance mean_i |x_i - mean|^2 / |mean|^2, and the mean overlap (IoU) of two nodes' supports."""
        weights = self.rules.weights(nodes)
        mean = weights.mean(0)
        distance = (weights - mean).square().sum(-1).mean() / mean.square().sum().clamp_min(torch.finfo(mean.dtype).tiny)
        mask = self.rules.support_mask(nodes).to(weights)
        both, sizes = mask @ mask.T, mask.sum(-1)
        overlap = both / (sizes[:, None] + sizes - both)
        num_pairs = len(mask) * (len(mask) - 1)
        return {"consensus_distance": float(distance), "support_agreement": float((overlap.sum() - len(mask)) / num_pairs)}


def mixing_change(step: MixingStep, values: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return sum_j w_ij (v_j - v_i), added sender by sender: the bits of a node do not depend on how many there are."""
    senders, weights = torch.from_numpy(step.senders), torch.from_numpy(step.weights).to(values)
    change = torch.zeros_like(values)
    for column in range(senders.shape[1]):
        change = change + weights[:, column, None] * (values[senders[:, column]] - values)
    return change


def adopt_leaders(settled: Settled, step: MixingStep) -> Settled:
    """Return the supports after a step: each node takes that of the lowest leader among itself and its senders."""
    own = torch.arange(len(settled.leader))
    sources = torch.cat((own[:, None], torch.where(torch.from_numpy(step.weights > 0), torch.from_numpy(step.senders), own[:, None])), 1)
    best = sources.gather(1, settled.leader[sources].argmin(1, keepdim=True))[:, 0]
    return Settled(settled.support[best], settled.leader[best])


# The states of all nodes, stacked


def stack_start(start: Any, num_nodes: int) -> Nodes:
    """Return the same start at all nodes."""
    return type(start)(*(torch.stack([part] * num_nodes) if isinstance(part, Tensor) else part for part in start))


def select_nodes(nodes: Nodes, chosen: Sequence[int]) -> Nodes:
    """Return some nodes."""
    rows = torch.as_tensor(chosen)
    return type(nodes)(*(part[rows] if isinstance(part, Tensor) else part for part in nodes))


def replace_nodes(nodes: Nodes, chosen: Sequence[int], parts: Sequence[Nodes]) -> Nodes:
    """Return the nodes with new states of some of them, which are in order."""
    rows = torch.as_tensor(chosen)
    columns = zip(nodes, *parts, strict=True)
    return type(nodes)(*(old.index_copy(0, rows, torch.cat(new)) if isinstance(old, Tensor) else old for old, *new in columns))


def where_nodes(condition: Bool[Tensor, " n"], new: Nodes, old: Nodes) -> Nodes:
    """Return the new state of each node for which the condition holds."""
    pairs = zip(new, old, strict=True)
    return type(new)(*(torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b) if isinstance(a, Tensor) else a for a, b in pairs))


def mean_node(nodes: Nodes) -> Any:
    """Return the mean of all nodes as the state of one."""
    return type(nodes)(*(part.mean(0) if isinstance(part, Tensor) else part for part in nodes))


def node_state(nodes: Nodes, node: int) -> Any:
    """Return the state of one node."""
    return type(nodes)(*(part[node] if isinstance(part, Tensor) else part for part in nodes))


def store_nodes(nodes: Nodes, settled: Settled, clock: Clock) -> dict[int, ClientMemory]:
    """Return what each node keeps until the next round."""
    tensors = {name: part for name, part in zip(nodes._fields, nodes, strict=True) if isinstance(part, Tensor)}
    tensors |= {SUPPORT: settled.support, LEADER: settled.leader}
    return {i: ClientMemory(clock.round, {name: part[i] for name, part in tensors.items()}) for i in range(len(settled.leader))}


def restore_nodes(start: Any, memories: Mapping[int, ClientMemory], num_nodes: int) -> tuple[Nodes, Settled]:
    """Return the nodes as they are stored, or all at the start."""
    nodes = stack_start(start, num_nodes)
    if not memories:
        return nodes, Settled(torch.zeros(num_nodes, start.layout.size, dtype=torch.bool), torch.full((num_nodes,), SEARCHING))
    stored = {name: torch.stack([memories[i].vectors[name] for i in range(num_nodes)]) for name in memories[0].vectors}
    settled = Settled(stored.pop(SUPPORT), stored.pop(LEADER))
    return nodes._replace(**stored), settled
