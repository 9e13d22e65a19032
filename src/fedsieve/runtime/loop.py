"""The readable reference: one client after another, every message really turned into bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Bytes, Clock, Exchanged, Reply
from fedsieve.runtime.local_training import Local


def weigh(encoded: wire.Encoded, *others: wire.Encoded) -> Bytes:
    """The three sizes of messages of one form, and the sizes of their parts: they differ in positions only."""
    gates = weights = 0
    for name, values in encoded.fields.items():
        if name in wire.GATE_FIELDS:
            gates += len(values)
        else:
            weights += len(values)
    scalars, header = len(encoded.scalars), len(encoded.header) + wire.CHECKSUM
    values = scalars + gates + weights
    alike = Bytes(encoded.formula, values, header + values, header, 0, scalars, weights, gates).times(1 + len(others))
    positions = len(encoded.positions) + sum([len(other.positions) for other in others])
    return alike.plus(Bytes(payload=positions, wire=positions, positions=positions))


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
