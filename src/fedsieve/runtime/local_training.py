"""What clients compute between receiving a packet and answering it, for a stack of clients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.random import client_keys, client_sampler, derive_key
from fedsieve.core.types import Clock
from fedsieve.runtime.client_data import ClientData, SparseRoundData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.feature_view import FeatureView


@dataclass(frozen=True, kw_only=True)
class ClientEngine(RunContext):
    """Clients that step together."""

    data: ClientData

    def initial_state(self, packet: Packet, clock: Clock) -> Any:
        """What every client of a cohort begins with: a state, or the packet itself where each client opens only what it sees of it."""
        layout = self.objective.layout
        plain = packet.support is not None and not layout.num_ungated and layout.groups is None
        if self.data.is_sparse and plain and self.algorithm.unseen_weights_are_equal:
            return packet
        return self.algorithm.client_init(packet, layout, clock, self.dtype)

    def train_and_reply(self, begun: Any, clock: Clock, clients: list[int]) -> Packet:
        """Take the local steps from a common state, reply: a stack of packets."""
        if isinstance(begun, Packet):
            return self._reply_on_active_features(begun, clock, clients)
        advance = self._step_on_active_features if self.data.is_sparse else self._dense_steps
        state = advance(map_tensors(begun, lambda part: torch.stack([part] * len(clients))), clock, clients)
        return self._reply(state, clock, clients)

    def _reply(self, state: Any, clock: Clock, clients: list[int]) -> Packet:
        return self.algorithm.client_reply(state, clock, self._draw(clock, self.algorithm.steps_per_exchange, clients))

    def _draw(self, clock: Clock, step: int, clients: list[int], at: Callable[[], np.ndarray] | None = None) -> Any:
        return client_sampler(self.seed, clock.round, clock.exchange, step, clients, self.dtype, self.device, at)

    def _dense_steps(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        algorithm = self.algorithm
        hands = algorithm.exchanges_per_round * algorithm.steps_per_exchange
        smoothness = self.data.smoothness(clients) if algorithm.needs_smoothness else None
        for step, batch in enumerate(self.data.batches(self.seed, clock.round, clients, hands, self._batch_slice(clock))):
            batch = batch._replace(smoothness=smoothness, module_seeds=self._module_seeds(clock, step, clients))
            state = algorithm.client_step(self.objective, state, batch, clock, self._draw(clock, step, clients))
        return state

    def _batch_slice(self, clock: Clock) -> slice:
        """Which of a round's hands are played now: gradient methods play one an exchange."""
        steps = self.algorithm.steps_per_exchange
        return slice(clock.exchange * steps, (clock.exchange + 1) * steps)

    def _module_seeds(self, clock: Clock, step: int, clients: list[int]) -> list[int] | None:
        """Noise for objectives that have some of their own (dropout)."""
        if not self.objective.has_random_layers:
            return None
        keys = client_keys(derive_key(self.seed, "module", clock.round, clock.exchange, step), clients)
        return (keys >> np.uint64(1)).tolist()

    def _reply_on_active_features(self, packet: Packet, clock: Clock, clients: list[int]) -> Packet:
        """The reply of a client whose rows and broadcast are sparse: no vector as long as the model is made.

        Off the features of its rows and of the broadcast all coordinates are alike, and one stands for them, behind those in sight.
        Only where that one would be sent, as its gate is broken, the whole vector is needed.
        """
        layout, held = self.objective.layout, packet.support.numpy(force=True) % self.objective.num_features
        picked = self._round_batches(clock, clients, held)
        sight = FeatureView.create(self.objective, picked.features, self.device)
        begun = self.algorithm.client_init(
            sight.restrict_packet(packet), layout._replace(global_index=sight.global_indices), clock, self.dtype
        )
        state = map_tensors(begun, lambda part: part[None])
        whole = vector_fields(state, sight.size + 1)
        _, steps = self._run_steps(map_vectors(lambda part: part[:, :-1], whole, state), whole, picked, sight, clock, clients)
        missed = torch.from_numpy(self.algorithm.steps_per_exchange - np.append(steps, 0)).to(self.device, self.dtype)
        missed = missed[:, None].expand(-1, self.objective.num_outputs).reshape(1, -1)[:, : sight.size + 1]
        reply = self._reply(self.algorithm.apply_skipped_steps(state, missed, clock), clock, clients)
        support = sight.global_indices(reply.support.numpy(force=True))
        if support[0, -1] == layout.size:
            return self.train_and_reply(self.algorithm.client_init(packet, layout, clock, self.dtype), clock, clients)
        return reply._replace(size=layout.size, support=torch.from_numpy(support).to(self.device))

    def _step_on_active_features(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        """The same client step on a restriction: only coordinates of features in the batch have a gradient.

        Restrict the state to the features of the round's rows, step, put back; what steps do to the others is done once, at the end
        (`client_rest`).
        """
        picked = self._round_batches(clock, clients, self._nonzero_features(state) if self.algorithm.needs_all_nonzero_weights else None)
        sight = FeatureView.create(self.objective, picked.features, self.device)
        whole = vector_fields(state, self.objective.layout.size)
        seen, taken = self._run_steps(map_vectors(sight.gather, whole, state), whole, picked, sight, clock, clients)
        steps = np.zeros(self.objective.num_features)
        steps[sight.features] = taken
        return self.algorithm.apply_skipped_steps(map_vectors(sight.scatter, whole, state, seen), self._skipped_steps(steps), clock)

    def _round_batches(self, clock: Clock, clients: list[int], also: np.ndarray | None) -> SparseRoundData:
        (client,) = clients
        dealt = self.data.epoch_batches(
            self.seed, clock.round, client, self.algorithm.exchanges_per_round * self.algorithm.steps_per_exchange
        )
        return self.data.sparse_batches(client, dealt[self._batch_slice(clock)], also)

    def _run_steps(
        self, seen: Any, whole: list[bool], picked: SparseRoundData, sight: FeatureView, clock: Clock, clients: list[int]
    ) -> tuple[Any, np.ndarray]:
        """Each step on the features of its batch; how many steps each feature in sight had."""
        algorithm, objective = self.algorithm, self.objective
        smoothness = self.data.smoothness(clients) if algorithm.needs_smoothness else None
        steps = np.zeros(len(sight.features))
        for step in range(algorithm.steps_per_exchange):
            at, batch = picked.batch(step, self._nonzero_active_features(seen, sight) if algorithm.needs_all_nonzero_weights else None)
            steps[at] += 1
            batch, narrow = batch._replace(smoothness=smoothness), objective.with_features(len(at))
            where = torch.from_numpy(at).to(self.device)
            if algorithm.fused_sparse_step(narrow, seen, where, batch, clock):
                continue
            draw = self._draw(clock, step, clients, partial(sight.coordinate_indices, at))
            small = algorithm.client_step(narrow, map_vectors(partial(sight.select, where), whole, seen), batch, clock, draw)
            seen = map_vectors(partial(sight.assign, where), whole, seen, small)
        return seen, steps

    def _skipped_steps(self, seen: np.ndarray) -> Tensor:
        """How many steps had no gradient for each coordinate, (1, n), given how many had each feature; free ones always have one."""
        missed = torch.from_numpy(self.algorithm.steps_per_exchange - seen).to(self.device, self.dtype).repeat(self.objective.num_outputs)
        return torch.cat((missed, missed.new_zeros(self.objective.layout.num_ungated)))[None]

    def _nonzero_features(self, state: Any) -> np.ndarray:
        """Features with a weight that is not zero."""
        return state[0][0, : self.objective.layout.num_gated].view(self.objective.num_outputs, -1).any(0).nonzero()[:, 0].numpy(force=True)

    def _nonzero_active_features(self, seen: Any, sight: FeatureView) -> np.ndarray:
        """The same among those in sight."""
        weights = seen[0][0, : len(sight.features) * self.objective.num_outputs]
        return weights.view(len(sight.features), -1).any(1).nonzero()[:, 0].numpy(force=True)


def map_tensors(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A state with a function applied to its tensors."""
    return type(state)(*(function(part) if isinstance(part, Tensor) else part for part in state))


def vector_fields(state: Any, size: int) -> list[bool]:
    """Which parts of a state are vectors of that size."""
    return [isinstance(part, Tensor) and part.shape[-1:] == (size,) for part in state]


def map_vectors(function: Callable[..., Tensor], whole: list[bool], *states: Any) -> Any:
    """A state with its long vectors replaced by a function of those of some states."""
    parts = zip(whole, *states, strict=True)
    return type(states[0])(*(function(*part) if is_whole else part[0] for is_whole, *part in parts))
