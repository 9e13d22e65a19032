"""Rounds without a server: nodes take local steps, then exchange messages with their neighbours.

A round of every node: local steps from its own sparse model, then `mixing_steps` messages along the links of the topology. After the
search all nodes adopt the support of one of them, which spreads with the messages; from then on messages hold m values without positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
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
from fedsieve.runtime.delivery import Delivery
from fedsieve.runtime.failures import Failures, find_offline
from fedsieve.runtime.local_training import ClientEngine
from fedsieve.runtime.node_states import (
    LEADER,
    SEARCHING,
    SUPPORT,
    NodeSupports,
    mean_node,
    node_state,
    replace_nodes,
    restore_nodes,
    select_nodes,
    store_nodes,
    tensors_of,
    where_nodes,
)
from fedsieve.runtime.rounds import RoundResult

LEADER_BYTES = 4
"""Bytes of the leader's number, in messages that name their support."""
MIN_SETTLED_BITS = 8
"""Bits per value after the search, when rounding is the only noise left."""


class NodeTraffic(NamedTuple):
    """Bytes of the messages of own nodes in a round."""

    steps: list[MixingStep]
    lengths: list[Int64[np.ndarray, " k"]]
    """of each step: the length of each node's message"""
    messages: Int64[Tensor, "k 8"]
    """the parts of all messages of each node, as in `Traffic`"""


@dataclass(frozen=True, kw_only=True)
class Gossip:
    """A run without a server."""

    rules: NodeRules
    engine: ClientEngine
    topology: Topology
    mixing_steps: int
    failures: Failures
    delivery: Delivery
    sample_bytes: bool = False
    """encode one message per step and count it for all"""

    def train(self, start: Any, rounds: int, first_round: int, memories: Mapping[int, ClientMemory]) -> Iterator[RoundResult]:
        """Yield the rounds from `first_round` on. The server state of a round is the mean of its nodes, which are in `memories`.

        On a cluster only the first process yields them.
        """
        num_nodes, own = self.topology.num_nodes, self.delivery.own
        everyone, node_supports = restore_nodes(self.rules.start(start), memories, num_nodes)
        shared = self.delivery.share(
            {"round": torch.tensor(first_round), SUPPORT: node_supports.support, LEADER: node_supports.leader} | tensors_of(everyone)
        )
        everyone = everyone._replace(**{name: shared[name] for name in tensors_of(everyone)})
        nodes, copies = select_nodes(everyone, own), self.rules.copies(everyone)
        node_supports = NodeSupports(shared[SUPPORT][own.start : own.stop], shared[LEADER])
        for round in range(int(shared["round"]), rounds):
            absent = np.array(find_offline(self.failures, self.engine.context.seed, round, range(num_nodes)))
            clock = Clock(round, rounds)
            nodes, node_supports, copies, traffic = self.run_round(nodes, node_supports, copies, clock, absent)
            rows = {SUPPORT: node_supports.support, "lengths": torch.from_numpy(np.stack(traffic.lengths, 1)), "messages": traffic.messages}
            if (gathered := self.delivery.gather(rows | tensors_of(nodes))) is None:
                continue
            everyone = everyone._replace(**{name: gathered[name] for name in tensors_of(everyone)})
            sent, received = bytes_of_nodes(traffic.steps, gathered["lengths"].numpy())
            both, messages = sent + received, Traffic(*gathered["messages"].sum(0).tolist())
            columns = self.agreement(everyone) | {"node_bytes": float(both.mean()), "busiest_node_bytes": float(both.max())}
            kept = store_nodes(everyone, NodeSupports(gathered[SUPPORT], node_supports.leader), clock)
            server, present = self.rules.as_server(mean_node(everyone)), np.flatnonzero(~absent).tolist()
            yield RoundResult(round, server, list(range(num_nodes)), present, [], messages, messages, kept, None, columns)

    def node_states(self, result: RoundResult) -> list[Any]:
        """Return the state of each node after a round."""
        nodes, _ = restore_nodes(self.rules.start(result.server), result.memories, self.topology.num_nodes)
        return [self.rules.as_server(node_state(nodes, i)) for i in range(self.topology.num_nodes)]

    def run_round(
        self, nodes: Nodes, node_supports: NodeSupports, copies: Mapping[str, Tensor], clock: Clock, absent: Bool[np.ndarray, " n"]
    ) -> tuple[Nodes, NodeSupports, Mapping[str, Tensor], NodeTraffic]:
        """Return the nodes after local steps and mixing. In the last round they mix until all have one support."""
        own, num_nodes = self.delivery.own, len(absent)
        present = torch.from_numpy(~absent)
        if int(node_supports.leader[0]) == SEARCHING and clock.round >= self.first_round_after_search(clock):
            leader = torch.arange(num_nodes) + num_nodes * (1 - present.to(torch.int64))
            node_supports = NodeSupports(self.rules.support_mask(nodes), leader)
            nodes = self.rules.restrict(nodes, node_supports.support)
        nodes = self.take_local_steps(nodes, node_supports, clock, [node for node in own if not absent[node]])
        traffic = NodeTraffic([], [], torch.zeros(len(own), len(fields(Traffic)), dtype=torch.int64))
        must_settle, number = clock.round == clock.num_rounds - 1 and self.rules.settle_fraction is not None, 0
        while number < self.mixing_steps or (must_settle and not node_supports.is_common):
            step = self.topology.step(clock.round * self.mixing_steps + number)
            step = without_nodes(step, absent) if number < self.mixing_steps else step  # the last messages reach all nodes
            nodes, node_supports, copies, traffic = self.mix(nodes, node_supports, copies, step, clock._replace(exchange=number), traffic)
            number += 1
        nodes = where_nodes(present[own.start : own.stop], self.rules.end_round(nodes, clock), nodes)
        return nodes, node_supports, copies, traffic

    def first_round_after_search(self, clock: Clock) -> float:
        """Return the round in which the nodes settle on their supports."""
        fraction = self.rules.settle_fraction
        return inf if fraction is None else min(fraction * clock.num_rounds, clock.num_rounds - 1)

    def take_local_steps(self, nodes: Nodes, node_supports: NodeSupports, clock: Clock, present: list[int]) -> Nodes:
        """Return the nodes after their local steps, each from its own sparse model."""
        context, algorithm, first = self.engine.context, self.engine.context.algorithm, self.delivery.own.start
        if not present:
            return nodes
        parts = []
        for chunk in cache_sized_chunks(context, self.engine.data, present):
            part = select_nodes(nodes, [node - first for node in chunk])
            start = self.rules.start_packet(part, clock, self.draw("start", clock, chunk))
            client = algorithm.client_init(start, context.objective.layout, clock, context.dtype)
            parts.append(self.rules.after_steps(part, start, self.engine.take_steps(client, clock, chunk), clock))
        nodes = replace_nodes(nodes, [node - first for node in present], parts)
        return nodes if int(node_supports.leader[0]) == SEARCHING else self.rules.restrict(nodes, node_supports.support)

    def mix(
        self, nodes: Nodes, node_supports: NodeSupports, copies: Mapping[str, Tensor], step: MixingStep, clock: Clock, traffic: NodeTraffic
    ) -> tuple[Nodes, NodeSupports, Mapping[str, Tensor], NodeTraffic]:
        """Return the nodes, their supports, their copies and the traffic after one step: every node sends one message to its receivers."""
        own, dtype = self.delivery.own, self.engine.context.dtype
        draw = self.draw("message", clock, own)
        if int(node_supports.leader[0]) == SEARCHING:
            nodes, packet = self.rules.encode(nodes, clock, draw)
            arrived, traffic = self.send(packet, step, clock, traffic)
            copies = self.rules.decode(arrived, copies, dtype)
            return self.rules.mix(nodes, self.changes(step, copies), clock), node_supports, copies, traffic
        weights, bits = self.rules.weights(nodes), max(self.rules.algorithm.bits, MIN_SETTLED_BITS)
        support = topk.mask_to_indices(node_supports.support)
        packet = sparse_packet(support, {self.rules.vector: weights}, bits, draw)
        known = (None, LEADER_BYTES) if self.sends_positions(clock) else (support[0], 0)
        arrived, traffic = self.send(packet, step, clock, traffic, *known)
        change = self.changes(step, {self.rules.vector: arrived.field_dense(self.rules.vector, dtype)})
        nodes = nodes._replace(**{self.rules.vector: weights + change[self.rules.vector]})
        node_supports = adopt_leaders(node_supports, arrived.support_mask(torch.bool).expand(len(node_supports.leader), -1), step, own)
        return self.rules.restrict(nodes, node_supports.support), node_supports, copies, traffic

    def changes(self, step: MixingStep, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how own nodes change by the decoded messages of all nodes, by field."""
        return {name: mixing_change(step, each, self.delivery.own) for name, each in values.items()}

    def sends_positions(self, clock: Clock) -> bool:
        """Return whether messages after the search name their support: until all know it, and always if nodes may be absent."""
        num_steps = (clock.round - ceil(self.first_round_after_search(clock))) * self.mixing_steps + clock.exchange
        return self.failures.dropout > 0 or num_steps < self.flooding_steps

    @cached_property
    def flooding_steps(self) -> int:
        """Upper bound of the steps in which news reaches all nodes, whichever step of a cycle is first."""
        return self.topology.flooding_steps + len(self.topology.steps) - 1

    def send(
        self,
        packet: Packet,
        step: MixingStep,
        clock: Clock,
        traffic: NodeTraffic,
        reference: Tensor | None = None,
        leader_bytes: int = 0,
    ) -> tuple[Packet, NodeTraffic]:
        """Return the messages of all nodes in one step, and the traffic with them; `reference` is a support that all nodes have."""
        message_id, own = self.engine.context.message_id(clock), self.delivery.own
        if self.sample_bytes:
            encoded = wire.encode_stack(packet.rows([0]), 1, message_id, reference) * len(own)
        else:
            encoded = wire.encode_stack(packet, len(own), message_id, reference)
        arrived = self.delivery.deliver(packet, encoded, step, message_id, reference)
        named = Traffic(total=leader_bytes, header=leader_bytes)
        parts = torch.tensor([list(vars(wire.measure_traffic([message]) + named).values()) for message in encoded])
        copies = torch.from_numpy(count_receivers(step)[own.start : own.stop])
        lengths = np.array([message.length for message in encoded]) + leader_bytes
        return arrived, NodeTraffic([*traffic.steps, step], [*traffic.lengths, lengths], traffic.messages + copies[:, None] * parts)

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


def mixing_change(step: MixingStep, values: Float[Tensor, "n d"], own: range) -> Float[Tensor, "k d"]:
    """Return sum_j w_ij (v_j - v_i) of some nodes, added sender by sender: the bits of a node do not depend on how many there are."""
    part = slice(own.start, own.stop)
    senders, weights = torch.from_numpy(step.senders[part]), torch.from_numpy(step.weights[part]).to(values)
    change = torch.zeros_like(values[part])
    for column in range(senders.shape[1]):
        change = change + weights[:, column, None] * (values[senders[:, column]] - values[part])
    return change


def adopt_leaders(node_supports: NodeSupports, supports: Bool[Tensor, "n p"], step: MixingStep, own: range) -> NodeSupports:
    """Return the supports after a step: each node takes that of the lowest leader among itself and its senders.

    `supports` are those of the messages. Leaders follow from topology and absences alone, so every process has those of all nodes.
    """
    number = torch.arange(len(node_supports.leader))
    senders = torch.where(torch.from_numpy(step.weights > 0), torch.from_numpy(step.senders), number[:, None])
    sources = torch.cat((number[:, None], senders), 1)
    best = sources.gather(1, node_supports.leader[sources].argmin(1, keepdim=True))[:, 0]
    return NodeSupports(supports[best[own.start : own.stop]], node_supports.leader[best])


def count_receivers(step: MixingStep) -> Int64[np.ndarray, " n"]:
    """Return to how many nodes each node sends its message in a step."""
    return np.bincount(step.senders[step.weights > 0], minlength=len(step.senders))


def bytes_of_nodes(
    steps: Sequence[MixingStep], lengths: Int64[np.ndarray, "n s"]
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Return the bytes that each node sent and received, from the lengths of its messages in each step."""
    sent = sum(count_receivers(step) * sizes for step, sizes in zip(steps, lengths.T, strict=True))
    received = sum(np.where(step.weights > 0, sizes[step.senders], 0).sum(1) for step, sizes in zip(steps, lengths.T, strict=True))
    return np.asarray(sent), np.asarray(received)
