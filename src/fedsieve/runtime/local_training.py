"""Local training of stacks of clients with dense examples: from the broadcast to the replies."""

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.random import client_keys, client_sampler, derive_key
from fedsieve.core.types import ClientMemory, Clock
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import restore_memory, store_memory
from fedsieve.runtime.context import RunContext


@dataclass(frozen=True)
class ClientEngine:
    """Clients that take their local steps together."""

    context: RunContext
    data: ClientData

    def train(
        self, packet: Packet, clock: Clock, stacks: Iterable[list[int]], memories: MutableMapping[int, ClientMemory] | None = None
    ) -> Iterator[Packet]:
        """Take the local steps of one exchange and yield stacks of replies: as the clients were stacked, or one by one.

        `memories` holds what clients kept; it is updated to what they keep after their replies.
        """
        memories = {} if memories is None else memories
        context, algorithm, objective, workload = self.context, self.context.algorithm, self.context.objective, self.context.workload
        state = algorithm.client_init(packet, objective.layout, clock, context.dtype)
        sampler = partial(client_sampler, context.seed, clock.round, clock.exchange, dtype=context.dtype, device=context.device)
        for clients in stacks:
            client = type(state)(*(torch.stack([part] * len(clients)) if isinstance(part, Tensor) else part for part in state))
            client = restore_memory(context, client, clients, memories)
            smoothness = self.data.smoothness(clients, workload.step_rule, context.dtype)
            for step, batch in enumerate(self.data.batches(context.seed, clock, clients, workload)):
                seeds = module_seeds(context.seed, clock, step, clients) if objective.has_random_layers else None
                batch = batch._replace(smoothness=smoothness, module_seeds=seeds)
                client = algorithm.client_step(objective, client, batch, clock, sampler(step, clients))
            if context.can_stack_replies:
                replies = algorithm.client_reply(client, clock, sampler(workload.local_steps, clients))
                store_memory(context, client, replies, clock, clients, memories)
                yield replies
                continue
            for i, name in enumerate(clients):
                one = type(state)(*(part[i : i + 1] if isinstance(part, Tensor) else part for part in client))
                replies = algorithm.client_reply(one, clock, sampler(workload.local_steps, [name]))
                store_memory(context, one, replies, clock, [name], memories)
                yield replies


def module_seeds(seed: int, clock: Clock, step: int, clients: list[int]) -> list[int]:
    """Return one seed per client for the random layers of a model, such as dropout."""
    keys = client_keys(derive_key(seed, "module", clock.round, clock.exchange, step), clients)
    return (keys >> np.uint64(1)).tolist()
