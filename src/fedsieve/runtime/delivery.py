"""How messages of nodes reach other nodes: in memory, or as bytes between the ranks of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet, concatenate
from fedsieve.core.topology import MixingStep
from fedsieve.runtime.ranks import Ranks, join_bytes, split_bytes


@runtime_checkable
class Delivery(Protocol):
    """The nodes of this process, and their messages."""

    @property
    def own(self) -> range:
        """The nodes whose states this process has."""
        ...

    def share(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the start of the first process."""
        ...

    def deliver(
        self, packet: Packet, encoded: Sequence[wire.EncodedPacket], step: MixingStep, message_id: wire.MessageId, reference: Tensor | None
    ) -> Packet:
        """Send the messages of own nodes, and return a stack of the messages of all nodes; others than own nodes receive are arbitrary."""
        ...

    def gather(self, rows: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the rows of all nodes at the first process, None at the others."""
        ...


@dataclass(frozen=True)
class InMemory:
    """All nodes are in this process."""

    num_nodes: int

    @property
    def own(self) -> range:
        """All nodes."""
        return range(self.num_nodes)

    def share(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the start."""
        return start

    def deliver(
        self, packet: Packet, encoded: Sequence[wire.EncodedPacket], step: MixingStep, message_id: wire.MessageId, reference: Tensor | None
    ) -> Packet:
        """Return the messages."""
        return packet

    def gather(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows."""
        return rows


@dataclass(frozen=True)
class AmongRanks:
    """Every rank of a cluster has some consecutive nodes, and sends their messages to the ranks of their receivers."""

    num_nodes: int
    ranks: Ranks

    def nodes_of(self, rank: int) -> range:
        """Return the nodes of a rank."""
        first, end = (number * self.num_nodes // self.ranks.count for number in (rank, rank + 1))
        return range(first, end)

    @property
    def own(self) -> range:
        """The nodes of this rank."""
        return self.nodes_of(self.ranks.number)

    def share(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the start of rank 0."""
        if self.ranks.number:
            return self.ranks.receive(0)
        self.ranks.finish(self.ranks.start(dict.fromkeys(self.ranks.others, start)))
        return start

    def deliver(
        self, packet: Packet, encoded: Sequence[wire.EncodedPacket], step: MixingStep, message_id: wire.MessageId, reference: Tensor | None
    ) -> Packet:
        """Send every rank the messages that its nodes receive, and return all messages by the number of their sender."""
        own, outgoing = self.own, {}
        for rank in self.ranks.others:
            if nodes := self.senders(step, own, rank):
                outgoing[rank] = join_bytes([encoded[node - own.start].to_bytes() for node in nodes])
        sending = self.ranks.start(outgoing)
        known, stacks = list(own), [packet]
        for rank in self.ranks.others:
            if senders := self.senders(step, self.nodes_of(rank), self.ranks.number):
                messages = split_bytes(self.ranks.receive(rank))
                stacks += [wire.decode(data, message_id, packet.size, reference).unsqueeze() for data in messages]
                known += senders
        self.ranks.finish(sending)
        stack, places = concatenate(stacks), np.zeros(self.num_nodes, np.int64)
        assert stack is not None, "all nodes send messages of one form"
        places[known] = np.arange(len(known))
        return stack.rows(places.tolist())

    def senders(self, step: MixingStep, nodes: range, rank: int) -> list[int]:
        """Return those of some nodes that send a message to a node of a rank in this step."""
        receivers = slice(self.nodes_of(rank).start, self.nodes_of(rank).stop)
        known = np.unique(step.senders[receivers][step.weights[receivers] > 0])
        return known[(known >= nodes.start) & (known < nodes.stop)].tolist()

    def gather(self, rows: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Send the rows to rank 0, which returns those of all nodes."""
        if self.ranks.number:
            self.ranks.answer(rows)
            return None
        parts = [rows, *(self.ranks.receive(rank) for rank in self.ranks.others)]
        return {name: torch.cat([part[name] for part in parts]) for name in rows}
