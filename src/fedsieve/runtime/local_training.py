"""Local training of stacks of clients with dense examples: from the broadcast to the replies."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.random import client_keys, client_sampler, derive_key
from fedsieve.core.types import Clock
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext


@dataclass(frozen=True)
class ClientEngine:
    """Clients that take their local steps together."""

    context: RunContext
    data: ClientData

    def train(self, packet: Packet, clock: Clock, stacks: Iterable[list[int]]) -> Iterator[Packet]:
        """Take the local steps of one exchange and yield the replies of each stack of clients, stacked."""
        context = self.context
        state = context.algorithm.client_init(packet, context.objective.layout, clock, context.dtype)
        for clients in stacks:
            yield self._train_stack(state, clock, clients)

    def _train_stack(self, state: Any, clock: Clock, clients: list[int]) -> Packet:
        """Return the stacked replies of clients that all start from `state`."""
        context, algorithm, objective = self.context, self.context.algorithm, self.context.objective
        client, workload = map_tensors(state, lambda part: torch.stack([part] * len(clients))), context.workload
        sampler = partial(
            client_sampler, context.seed, clock.round, clock.exchange, clients=clients, dtype=context.dtype, device=context.device
        )
        smoothness = self.data.smoothness(clients) if workload.needs_smoothness else None
        for step, batch in enumerate(self.data.batches(context.seed, clock, clients, workload)):
            seeds = module_seeds(context.seed, clock, step, clients) if objective.has_random_layers else None
            batch = batch._replace(smoothness=smoothness, module_seeds=seeds)
            client = algorithm.client_step(objective, client, batch, clock, sampler(step))
        return algorithm.client_reply(client, clock, sampler(workload.local_steps))


def module_seeds(seed: int, clock: Clock, step: int, clients: list[int]) -> list[int]:
    """Return one seed per client for the random layers of a model, such as dropout."""
    keys = client_keys(derive_key(seed, "module", clock.round, clock.exchange, step), clients)
    return (keys >> np.uint64(1)).tolist()


def map_tensors(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a state with a function applied to its tensors."""
    return type(state)(*(function(part) if isinstance(part, Tensor) else part for part in state))
