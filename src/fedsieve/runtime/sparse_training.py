"""Local training of one client with sparse examples, on the features that its examples have.

A local step changes only the weights of features in its mini-batch. The client state is restricted to the features of the round's
examples, each step to those of its batch; what skipped steps do to the other weights is applied once (`apply_skipped_steps`).
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.protocols import Algorithm, LinearObjective
from fedsieve.core.random import Draw, client_sampler
from fedsieve.core.types import ClientMemory, Clock
from fedsieve.runtime.client_data import ClientData, SparseRoundData
from fedsieve.runtime.client_memory import restore_memory, store_memory
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.feature_view import FeatureView
from fedsieve.runtime.local_training import ClientEngine


@dataclass(frozen=True)
class SparseClientEngine:
    """The counterpart of `ClientEngine` for sparse examples; stacks have one client."""

    context: RunContext
    data: ClientData

    @cached_property
    def objective(self) -> LinearObjective:
        """The linear model."""
        return cast(LinearObjective, self.context.objective)

    def train(
        self, packet: Packet, clock: Clock, stacks: Iterable[list[int]], memories: MutableMapping[int, ClientMemory] | None = None
    ) -> Iterator[Packet]:
        """Take the local steps of one exchange and yield the reply of each client, as a stack of one; `memories` are updated."""
        memories = {} if memories is None else memories
        layout = self.objective.layout
        if (
            packet.support is not None
            and not layout.num_ungated
            and layout.groups is None
            and self.context.support.unseen_weights_are_equal
        ):
            yield from (self._reply_on_active_features(packet, clock, clients, memories) for clients in stacks)
        else:
            state = self.context.algorithm.client_init(packet, layout, clock, self.context.dtype)
            yield from (self._reply_on_all_features(state, clock, clients, memories) for clients in stacks)

    def _reply_on_all_features(self, state: Any, clock: Clock, clients: list[int], memories: MutableMapping[int, ClientMemory]) -> Packet:
        """Return the reply of a client that starts from a state as long as the model."""
        client = add_client_axis(state)
        if memories:
            client = restore_memory(self.context, client, clients, memories)
        projected = self.context.support.projected_field
        nonzero = None if projected is None else self._nonzero_features(getattr(client, projected))
        examples = self._round_examples(clock, clients, nonzero)
        view = FeatureView.create(self.objective, examples.features, self.context.device)
        active, steps = self._run_steps(self._map_vectors(view.gather, client), examples, view, clock, clients)
        client = self._map_vectors(view.scatter, client, active)
        steps_per_feature = np.zeros(self.objective.num_features)
        steps_per_feature[view.features] = steps
        num_skipped = self._num_skipped(steps_per_feature).repeat(self.objective.num_outputs)
        num_skipped = torch.cat((num_skipped, num_skipped.new_zeros(self.objective.layout.num_ungated)))[None]
        return self._reply(client, num_skipped, clock, clients, memories)

    def _reply_on_active_features(
        self, packet: Packet, clock: Clock, clients: list[int], memories: MutableMapping[int, ClientMemory]
    ) -> Packet:
        """Return the reply of a client without creating a vector as long as the model.

        All weights that are neither in the broadcast nor in the client's examples have the same state. One extra coordinate behind the
        active ones represents them. Only if that coordinate is selected for the reply, the whole vector is needed.
        """
        algorithm, layout = self.context.algorithm, self.objective.layout
        assert packet.support is not None
        examples = self._round_examples(clock, clients, packet.support.numpy(force=True) % self.objective.num_features)
        view = FeatureView.create(self.objective, examples.features, self.context.device)
        restricted = layout._replace(global_index=view.global_indices)
        state = algorithm.client_init(view.restrict_packet(packet), restricted, clock, self.context.dtype)
        client = add_client_axis(state)
        _, steps = self._run_steps(self._map_vectors(lambda part: part[:, :-1], client), examples, view, clock, clients)
        num_skipped = self._num_skipped(np.append(steps, 0))[:, None].expand(-1, self.objective.num_outputs)
        num_skipped = num_skipped.reshape(1, -1)[:, : view.size + 1]
        reply = self._reply(client, num_skipped, clock, clients, memories)
        assert reply.support is not None
        support = view.global_indices(reply.support.numpy(force=True))
        if support[0, -1] == layout.size:
            return self._reply_on_all_features(algorithm.client_init(packet, layout, clock, self.context.dtype), clock, clients, memories)
        return reply._replace(size=layout.size, support=torch.from_numpy(support).to(self.context.device))

    def _reply(
        self, client: Any, num_skipped: Tensor, clock: Clock, clients: list[int], memories: MutableMapping[int, ClientMemory]
    ) -> Packet:
        draw = self._draw(clock, self.context.workload.local_steps, clients)
        client = self.context.support.apply_skipped_steps(client, num_skipped, clock)
        reply = self.context.algorithm.client_reply(client, clock, draw)
        if self.context.support.memory is not None:
            store_memory(self.context.support.memory, client, reply, clock, clients, memories)
        return reply

    def _round_examples(self, clock: Clock, clients: list[int], extra_features: np.ndarray | None) -> SparseRoundData:
        (client,), num_steps = clients, self.context.workload.local_steps
        batches = self.data.epoch_batches(self.context.seed, clock.round, client, self.context.workload.exchanges * num_steps)
        return self.data.sparse_batches(client, batches[clock.exchange * num_steps :][:num_steps], extra_features)

    def _run_steps(
        self, active: Any, examples: SparseRoundData, view: FeatureView, clock: Clock, clients: list[int]
    ) -> tuple[Any, np.ndarray]:
        """Take each step on the features of its batch; return the state and the number of steps of each active feature."""
        algorithm, objective, support = self.context.algorithm, self.objective, self.context.support
        smoothness = self.data.smoothness(clients, self.context.workload.step_rule, self.context.dtype)
        steps = np.zeros(len(view.features))
        for step in range(self.context.workload.local_steps):
            projected = support.projected_field
            nonzero = None if projected is None else view.nonzero_features(getattr(active, projected))
            indices, batch = examples.batch(step, nonzero)
            steps[indices] += 1
            batch, restricted = batch._replace(smoothness=smoothness), objective.with_features(len(indices))
            at = torch.from_numpy(indices).to(self.context.device)
            draw = self._draw(clock, step, clients, partial(view.coordinate_indices, indices))
            if support.fused_step is not None and support.fused_step(restricted, active, at, batch, clock, draw):
                continue
            selected = self._map_vectors(partial(view.select, at), active)
            selected = algorithm.client_step(restricted, selected, batch, clock, draw)
            active = self._map_vectors(partial(view.assign, at), active, selected)
        return active, steps

    def _draw(self, clock: Clock, step: int, clients: list[int], coordinates: Callable[[], np.ndarray] | None = None) -> Draw:
        """Return the random numbers of one local step; `coordinates` are the indices of a part of the model."""
        seed, dtype, device = self.context.seed, self.context.dtype, self.context.device
        return client_sampler(seed, clock.round, clock.exchange, step, clients, dtype, device, coordinates)

    def _num_skipped(self, steps: np.ndarray) -> Tensor:
        return torch.from_numpy(self.context.workload.local_steps - steps).to(self.context.device, self.context.dtype)

    def _nonzero_features(self, weights: Tensor) -> np.ndarray:
        """Return the features with a nonzero weight."""
        matrix = weights[0, : self.objective.layout.num_gated].view(self.objective.num_outputs, -1)
        return matrix.any(0).nonzero()[:, 0].numpy(force=True)

    def _map_vectors(self, function: Callable[..., Tensor], *clients: Any) -> Any:
        """Return the first state with its vectors replaced by a function of the vectors of all states."""
        fields = self.context.support.vector_fields
        return clients[0]._replace(**{name: function(*(getattr(client, name) for client in clients)) for name in fields})


def require_restricted_steps(algorithm: Algorithm, data: ClientData) -> None:
    """Raise ValueError if examples are sparse and local steps cannot be restricted to the features of a batch."""
    reason = algorithm.engine_support.needs_all_weights
    if data.is_sparse and reason is not None:
        raise ValueError(f"{reason}, and with sparse examples a step has only those of its features; use dense examples, or leave it out")


def add_client_axis(state: Any) -> Any:
    """Return a state as a stack of one client, without a copy."""
    return type(state)(*(part[None] if isinstance(part, Tensor) else part for part in state))


def make_client_engine(context: RunContext, data: ClientData) -> ClientEngine | SparseClientEngine:
    """Return the engine that trains clients on this kind of examples."""
    require_restricted_steps(context.algorithm, data)
    return SparseClientEngine(context, data) if data.is_sparse else ClientEngine(context, data)
