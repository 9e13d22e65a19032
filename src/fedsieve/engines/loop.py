"""The readable reference: one client after another, every message really turned into bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Bytes, Clock, Exchanged, Reply
from fedsieve.engines.local import Local


def weigh(encoded: wire.Encoded) -> Bytes:
    """A message's three sizes, and the sizes of its parts."""
    gates = weights = 0
    for name, values in encoded.fields.items():
        if name in wire.GATE_FIELDS:
            gates += len(values)
        else:
            weights += len(values)
    positions, scalars = len(encoded.positions), len(encoded.scalars)
    payload, header = positions + scalars + gates + weights, len(encoded.header) + wire.CHECKSUM
    return Bytes(encoded.formula, payload, header + payload, header, positions, scalars, weights, gates)


@dataclass(frozen=True, kw_only=True)
class Loop(Local):
    """An exchange that visits each client in turn and passes bytes."""

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> Exchanged:
        """Send, let each client compute, collect."""
        address = self.address(clock)
        encoded = wire.encode(packet, address)
        support = self.opened(packet, clock).support
        down, up, replies, rejected = Bytes(), Bytes(), [], []
        for client in clients:
            answer = self.visit(clock, encoded.join(), client)
            down, up = down.plus(weigh(encoded)), up.plus(weigh(answer))
            try:
                reply = wire.decode(answer.join(), address, self.objective.layout.size, support)
                replies.append(Reply(client, reply, self.rows.examples(client)))
            except wire.PacketError as problem:
                rejected.append((client, str(problem)))
        return Exchanged(replies, rejected, down, up)

    def visit(self, clock: Clock, message: bytes, client: int) -> wire.Encoded:
        """What one client does with a message."""
        address = self.address(clock)
        packet = self.opened(wire.decode(message, address, self.objective.layout.size), clock)
        return wire.encode(self.answer(self.begin(packet, clock), clock, [client]).at(0), address, packet.support)
