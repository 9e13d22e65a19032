"""What the server and all clients of a run know before the first message."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet, seed_packet
from fedsieve.core.protocols import Algorithm, EngineSupport, Objective, Workload
from fedsieve.core.types import ClientMemory, Clock
from fedsieve.runtime.buffers import BufferState, buffer_state
from fedsieve.runtime.rounds import initial_broadcast


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Algorithm, objective and seed of a run, and how its messages are identified."""

    algorithm: Algorithm
    objective: Objective
    seed: int
    fingerprint: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    known_support: Tensor | None = None
    """positions that broadcasts need not contain, because the clients know them"""

    def message_id(self, clock: Clock) -> wire.MessageId:
        """Return the identifier of all messages of one exchange."""
        return wire.MessageId(self.fingerprint, clock.round, clock.exchange)

    @cached_property
    def workload(self) -> Workload:
        """How much each client computes."""
        return self.algorithm.workload

    @cached_property
    def support(self) -> EngineSupport:
        """How engines may run the algorithm."""
        return self.algorithm.engine_support

    @cached_property
    def can_stack_replies(self) -> bool:
        """Whether the replies of all clients have the same number of entries."""
        return self.support.replies_have_equal_length(self.objective.layout)

    @cached_property
    def has_catch_up(self) -> bool:
        """Whether clients receive different messages, which build on what they received before."""
        return self.support.memory is not None and self.support.memory.catch_up is not None

    def message_groups(self, clients: Sequence[int]) -> list[list[int]]:
        """Return the clients in groups that receive the same message: one group, or each client alone with catch-up messages."""
        return [[client] for client in clients] if self.has_catch_up else [list(clients)]

    @cached_property
    def buffers(self) -> BufferState | None:
        """The buffers of the model before the first message; None if it has none."""
        return buffer_state(self.objective, self.seed)

    def receive(self, packet: Packet, clock: Clock, memory: ClientMemory | None) -> Packet:
        """Return the broadcast that a client reconstructs from a message; a catch-up message is added to the model that the client has."""
        catch_up = None if self.support.memory is None else self.support.memory.catch_up
        if catch_up is None or "update" not in packet.fields:
            return self.resolve_seed(packet, clock)
        if memory is not None:
            return catch_up.receive(packet, memory.vectors[catch_up.model_field])._replace(buffers=packet.buffers)
        first, layout = clock._replace(round=0, exchange=0), self.objective.layout
        start = self.algorithm.client_init(self.resolve_seed(seed_packet(self.seed, layout.size), first), layout, first, self.dtype)
        return catch_up.receive(packet, getattr(start, catch_up.model_field))._replace(buffers=packet.buffers)

    def resolve_seed(self, packet: Packet, clock: Clock) -> Packet:
        """Return the packet, or the initial broadcast if the packet is only a seed."""
        if packet.seed is None:
            return packet
        return initial_broadcast(self.algorithm, self.objective, packet.seed, clock, self.dtype, self.device)
