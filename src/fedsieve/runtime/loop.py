"""The reference exchange: one client after another, and every message is encoded as bytes and decoded again."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Clock, ExchangeResult, Reply, Traffic
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.local_training import ClientEngine
from fedsieve.runtime.sparse_training import SparseClientEngine, make_client_engine


@dataclass(frozen=True, kw_only=True)
class LoopEngine:
    """An exchange that trains the clients in turn and passes bytes."""

    context: RunContext
    data: ClientData

    @cached_property
    def client_engine(self) -> ClientEngine | SparseClientEngine:
        """The engine that trains the clients."""
        return make_client_engine(self.context, self.data)

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> ExchangeResult:
        """Send the packet to the clients and return their replies."""
        context = self.context
        message_id, encoded = context.message_id(clock), wire.encode(packet, context.message_id(clock))
        support = context.resolve_seed(packet, clock).support
        downlink, uplink, replies, rejected = Traffic(), Traffic(), [], []
        for client in clients:
            answer = self.run_client(clock, encoded.to_bytes(), client)
            downlink, uplink = downlink + wire.measure_traffic([encoded]), uplink + wire.measure_traffic([answer])
            try:
                reply = wire.decode(answer.to_bytes(), message_id, context.objective.layout.size, support)
                replies.append(Reply(client, reply, self.data.num_examples(client)))
            except wire.PacketError as error:
                rejected.append((client, str(error)))
        return ExchangeResult(replies, rejected, downlink, uplink)

    def run_client(self, clock: Clock, message: bytes, client: int) -> wire.EncodedPacket:
        """Return the encoded reply of one client to a message."""
        context, message_id = self.context, self.context.message_id(clock)
        packet = context.resolve_seed(wire.decode(message, message_id, context.objective.layout.size), clock)
        (replies,) = self.client_engine.train(packet, clock, [[client]])
        return wire.encode(replies.unstack()[0], message_id, packet.support)
