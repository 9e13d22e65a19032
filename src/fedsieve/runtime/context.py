"""What server and clients agree on before the first message."""

from dataclasses import dataclass

import torch

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Algorithm, Clock, Objective
from fedsieve.runtime.rounds import initial_broadcast


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One who can read and write the messages of a run."""

    algorithm: Algorithm
    objective: Objective
    seed: int
    fingerprint: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def message_id(self, clock: Clock) -> wire.MessageId:
        """What every message of one exchange must say it is for."""
        return wire.MessageId(self.fingerprint, clock.round, clock.exchange)

    def resolve_seed(self, packet: Packet, clock: Clock) -> Packet:
        """The packet, or the first broadcast where it is only a seed."""
        if packet.seed is None:
            return packet
        return initial_broadcast(self.algorithm, self.objective, packet.seed, clock, self.dtype, self.device)
