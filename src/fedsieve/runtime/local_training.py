"""Local training of stacks of clients with dense examples: from the broadcast to the replies."""

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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
        model_buffers = None if context.buffers is None else context.buffers.receive(packet)
        for clients in stacks:
            client = type(state)(*(torch.stack([part] * len(clients)) if isinstance(part, Tensor) else part for part in state))
            if memories:
                client = restore_memory(context, client, clients, memories)
            buffers = None if model_buffers is None else model_buffers.make_stack(len(clients))
            client = self.take_steps(client, clock, clients, buffers)
            parts = [slice(None)] if context.can_stack_replies else [slice(i, i + 1) for i in range(len(clients))]
            for part in parts:
                members = type(state)(*(each[part] if isinstance(each, Tensor) else each for each in client))
                replies = algorithm.client_reply(members, clock, sampler(workload.local_steps, clients[part]))
                if model_buffers is not None and buffers is not None:
                    replies = replies._replace(buffers=model_buffers.stack_changes(buffers[part]))
                if context.support.memory is not None:
                    store_memory(context.support.memory, members, replies, clock, clients[part], memories)
                yield replies

    def take_steps(self, client: Any, clock: Clock, clients: list[int], buffers: list[dict[str, Tensor]] | None = None) -> Any:
        """Return a stack of clients after the local steps of one exchange."""
        context, workload = self.context, self.context.workload
        smoothness = self.data.smoothness(clients, workload.step_rule, context.dtype)
        for step, batch in enumerate(self.data.batches(context.seed, clock, clients, workload)):
            seeds = module_seeds(context.seed, clock, step, clients) if context.objective.has_random_layers else None
            batch = batch._replace(smoothness=smoothness, module_seeds=seeds, buffers=buffers)
            draw = client_sampler(context.seed, clock.round, clock.exchange, step, clients, context.dtype, context.device)
            client = context.algorithm.client_step(context.objective, client, batch, clock, draw)
        return client


def module_seeds(seed: int, clock: Clock, step: int, clients: list[int]) -> list[int]:
    """Return one seed per client for the random layers of a model, such as dropout."""
    keys = client_keys(derive_key(seed, "module", clock.round, clock.exchange, step), clients)
    return (keys >> np.uint64(1)).tolist()
