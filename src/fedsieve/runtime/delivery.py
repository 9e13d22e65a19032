"""How messages of nodes reach other nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.topology import MixingStep


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
