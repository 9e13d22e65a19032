"""The readable reference: one client after another, every message really turned into bytes and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Clock, ExchangeResult, Reply, Traffic
from fedsieve.runtime.local_training import ClientEngine


def measure_traffic(encoded: wire.EncodedPacket, *others: wire.EncodedPacket) -> Traffic:
    """The three sizes of messages of one form, and the sizes of their parts: they differ in positions only."""
    gates = weights = 0
    for name, values in encoded.fields.items():
        if name in wire.GATE_TRAFFIC_FIELDS:
            gates += len(values)
        else:
            weights += len(values)
    scalars, header = len(encoded.scalars), len(encoded.header) + wire.CHECKSUM_BYTES
    values = scalars + gates + weights
    alike = Traffic(encoded.paper_bytes, values, header + values, header, 0, scalars, weights, gates) * (1 + len(others))
    positions = len(encoded.positions) + sum([len(other.positions) for other in others])
    return alike + Traffic(payload=positions, total=positions, positions=positions)


@dataclass(frozen=True, kw_only=True)
class LoopEngine(ClientEngine):
    """An exchange that visits each client in turn and passes bytes."""

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> ExchangeResult:
        """Send, let each client compute, collect."""
        address = self.message_id(clock)
        encoded = wire.encode(packet, address)
        support = self.resolve_seed(packet, clock).support
        down, up, replies, rejected = Traffic(), Traffic(), [], []
        for client in clients:
            answer = self.run_client(clock, encoded.to_bytes(), client)
            down, up = down + measure_traffic(encoded), up + measure_traffic(answer)
            try:
                reply = wire.decode(answer.to_bytes(), address, self.objective.layout.size, support)
                replies.append(Reply(client, reply, self.data.num_examples(client)))
            except wire.PacketError as problem:
                rejected.append((client, str(problem)))
        return ExchangeResult(replies, rejected, down, up)

    def run_client(self, clock: Clock, message: bytes, client: int) -> wire.EncodedPacket:
        """What one client does with a message."""
        address = self.message_id(clock)
        packet = self.resolve_seed(wire.decode(message, address, self.objective.layout.size), clock)
        return wire.encode(self.train_and_reply(self.initial_state(packet, clock), clock, [client]).unstack()[0], address, packet.support)
