"""The reference exchange: one client after another, and every message is encoded as bytes and decoded again."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import NO_MEMORIES, ClientMemories, ClientMemory, Clock, ExchangeResult, Reply, Traffic
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import choose_messages
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

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories = NO_MEMORIES) -> ExchangeResult:
        """Send the packet to the clients and return their replies."""
        context, message_id = self.context, self.context.message_id(clock)
        support = context.resolve_seed(packet, clock).support
        downlink, uplink, replies, rejected = Traffic(), Traffic(), [], []
        kept: dict[int, ClientMemory] = {}
        for client, (_, encoded) in choose_messages(context, clock, packet, clients, memories).items():
            answer, memory = self.run_client(clock, encoded.to_bytes(), client, memories.by_client.get(client))
            kept |= {} if memory is None else {client: memory}
            downlink, uplink = downlink + wire.measure_traffic([encoded]), uplink + wire.measure_traffic([answer])
            try:
                reply = wire.decode(answer.to_bytes(), message_id, context.objective.layout.size, support)
                replies.append(Reply(client, reply, self.data.claimed_examples[client]))
            except wire.PacketError as error:
                rejected.append((client, str(error)))
        return ExchangeResult(replies, rejected, downlink, uplink, kept)

    def run_client(
        self, clock: Clock, message: bytes, client: int, memory: ClientMemory | None = None
    ) -> tuple[wire.EncodedPacket, ClientMemory | None]:
        """Return the encoded reply of one client to a message, and what the client keeps if the reply is accepted."""
        context, message_id = self.context, self.context.message_id(clock)
        received = wire.decode(message, message_id, context.objective.layout.size, context.known_support, accept_lists=True)
        memories = {} if memory is None else {client: memory}
        with wire.refuse_incomplete(received):
            packet = context.receive(received, clock, memory)
            (replies,) = self.client_engine.train(packet, clock, [[client]], memories)
        return wire.encode(replies.unstack()[0], message_id, packet.support), memories.get(client)
