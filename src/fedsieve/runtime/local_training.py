"""Local training of a stack of clients with dense examples: from the broadcast to the replies."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.random import Draw, client_keys, client_sampler, derive_key
from fedsieve.core.types import Clock, Workload
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext


@dataclass(frozen=True)
class ClientEngine:
    """Clients that take their local steps together."""

    context: RunContext
    data: ClientData

    def initial_state(self, packet: Packet, clock: Clock) -> Any:
        """Return the state in which every client of the cohort starts."""
        return self.context.algorithm.client_init(packet, self.context.objective.layout, clock, self.context.dtype)

    def train_and_reply(self, state: Any, clock: Clock, clients: list[int]) -> Packet:
        """Take the local steps of one exchange from a common state and return the stacked replies."""
        client = map_tensors(state, lambda part: torch.stack([part] * len(clients)))
        return self.reply(self._train(client, clock, clients), clock, clients)

    def reply(self, client: Any, clock: Clock, clients: list[int]) -> Packet:
        """Return the stacked replies of clients that have taken their local steps."""
        return self.context.algorithm.client_reply(client, clock, self.draw(clock, self.workload.local_steps, clients))

    def _train(self, client: Any, clock: Clock, clients: list[int]) -> Any:
        algorithm, objective, seed = self.context.algorithm, self.context.objective, self.context.seed
        smoothness = self.smoothness(clients)
        batches = self.data.batches(seed, clock.round, clients, self.batches_per_round, self.batch_slice(clock))
        for step, batch in enumerate(batches):
            batch = batch._replace(smoothness=smoothness, module_seeds=self._module_seeds(clock, step, clients))
            client = algorithm.client_step(objective, client, batch, clock, self.draw(clock, step, clients))
        return client

    @cached_property
    def workload(self) -> Workload:
        """How much each client computes."""
        return self.context.algorithm.workload

    @property
    def batches_per_round(self) -> int:
        """The number of mini-batches of a client in a round."""
        return self.workload.exchanges * self.workload.local_steps

    def batch_slice(self, clock: Clock) -> slice:
        """Return which mini-batches of the round belong to this exchange."""
        steps = self.workload.local_steps
        return slice(clock.exchange * steps, (clock.exchange + 1) * steps)

    def smoothness(self, clients: list[int]) -> Tensor | None:
        """Return L of each client's loss if the algorithm needs it."""
        return self.data.smoothness(clients) if self.workload.needs_smoothness else None

    def draw(self, clock: Clock, step: int, clients: list[int], coordinates: Callable[[], np.ndarray] | None = None) -> Draw:
        """Return the random numbers of one local step; `coordinates` are the indices of a part of the model."""
        context = self.context
        return client_sampler(context.seed, clock.round, clock.exchange, step, clients, context.dtype, context.device, coordinates)

    def _module_seeds(self, clock: Clock, step: int, clients: list[int]) -> list[int] | None:
        """Return one seed per client if the model has random layers such as dropout."""
        if not self.context.objective.has_random_layers:
            return None
        keys = client_keys(derive_key(self.context.seed, "module", clock.round, clock.exchange, step), clients)
        return (keys >> np.uint64(1)).tolist()


def map_tensors(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a state with a function applied to its tensors."""
    return type(state)(*(function(part) if isinstance(part, Tensor) else part for part in state))
