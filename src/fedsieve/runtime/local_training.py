"""What clients compute between receiving a packet and answering it, for a stack of clients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.random import client_keys, drawer, key
from fedsieve.core.types import Clock
from fedsieve.runtime.client_data import Picked, Rows
from fedsieve.runtime.context import Party
from fedsieve.runtime.feature_view import Sight


@dataclass(frozen=True, kw_only=True)
class Local(Party):
    """Clients that step together."""

    rows: Rows

    def begin(self, packet: Packet, clock: Clock) -> Any:
        """What every client of a cohort begins with: a state, or the packet itself where each client opens only what it sees of it."""
        layout = self.objective.layout
        plain = packet.support is not None and not layout.free and layout.groups is None
        if self.rows.sparse and plain and self.algorithm.rest_alike:
            return packet
        return self.algorithm.client_init(packet, layout, clock, self.dtype)

    def answer(self, begun: Any, clock: Clock, clients: list[int]) -> Packet:
        """Take the local steps from a common state, reply: a stack of packets."""
        if isinstance(begun, Packet):
            return self._sparse_answer(begun, clock, clients)
        advance = self._sparse_steps if self.rows.sparse else self._dense_steps
        state = advance(mapped(begun, lambda part: torch.stack([part] * len(clients))), clock, clients)
        return self._reply(state, clock, clients)

    def _reply(self, state: Any, clock: Clock, clients: list[int]) -> Packet:
        return self.algorithm.client_reply(state, clock, self._draw(clock, self.algorithm.local_steps, clients))

    def _draw(self, clock: Clock, step: int, clients: list[int], at: Callable[[], np.ndarray] | None = None) -> Any:
        return drawer(self.seed, clock.round, clock.exchange, step, clients, self.dtype, self.device, at)

    def _dense_steps(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        algorithm = self.algorithm
        hands = algorithm.exchanges * algorithm.local_steps
        smoothness = self.rows.smoothness(clients) if algorithm.needs_smoothness else None
        for step, batch in enumerate(self.rows.batches(self.seed, clock.round, clients, hands, self._hands(clock))):
            batch = batch._replace(smoothness=smoothness, keys=self._keys(clock, step, clients))
            state = algorithm.client_step(self.objective, state, batch, clock, self._draw(clock, step, clients))
        return state

    def _hands(self, clock: Clock) -> slice:
        """Which of a round's hands are played now: gradient methods play one an exchange."""
        steps = self.algorithm.local_steps
        return slice(clock.exchange * steps, (clock.exchange + 1) * steps)

    def _keys(self, clock: Clock, step: int, clients: list[int]) -> list[int] | None:
        """Noise for objectives that have some of their own (dropout)."""
        if not getattr(self.objective, "random", False):
            return None
        keys = client_keys(key(self.seed, "module", clock.round, clock.exchange, step), clients)
        return (keys >> np.uint64(1)).tolist()

    def _sparse_answer(self, packet: Packet, clock: Clock, clients: list[int]) -> Packet:
        """The reply of a client whose rows and broadcast are sparse: no vector as long as the model is made.

        Off the features of its rows and of the broadcast all coordinates are alike, and one stands for them, behind those in sight.
        Only where that one would be sent, as its gate is broken, the whole vector is needed.
        """
        layout, held = self.objective.layout, packet.support.numpy(force=True) % self.objective.features
        picked = self._picked(clock, clients, held)
        sight = Sight.over(self.objective, picked.features, self.device)
        begun = self.algorithm.client_init(sight.packet(packet), layout._replace(order=sight.places), clock, self.dtype)
        state = mapped(begun, lambda part: part[None])
        whole = _long_parts(state, sight.size + 1)
        _, steps = self._steps_in_sight(_each(lambda part: part[:, :-1], whole, state), whole, picked, sight, clock, clients)
        missed = torch.from_numpy(self.algorithm.local_steps - np.append(steps, 0)).to(self.device, self.dtype)
        missed = missed[:, None].expand(-1, self.objective.outputs).reshape(1, -1)[:, : sight.size + 1]
        reply = self._reply(self.algorithm.client_rest(state, missed, clock), clock, clients)
        support = sight.places(reply.support.numpy(force=True))
        if support[0, -1] == layout.size:
            return self.answer(self.algorithm.client_init(packet, layout, clock, self.dtype), clock, clients)
        return reply._replace(size=layout.size, support=torch.from_numpy(support).to(self.device))

    def _sparse_steps(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        """The same client step on a restriction: only coordinates of features in the batch have a gradient.

        Restrict the state to the features of the round's rows, step, put back; what steps do to the others is done once, at the end
        (`client_rest`).
        """
        picked = self._picked(clock, clients, self._held(state) if self.algorithm.projects else None)
        sight = Sight.over(self.objective, picked.features, self.device)
        whole = _long_parts(state, self.objective.layout.size)
        seen, taken = self._steps_in_sight(_each(sight.of, whole, state), whole, picked, sight, clock, clients)
        steps = np.zeros(self.objective.features)
        steps[sight.features] = taken
        return self.algorithm.client_rest(_each(sight.back, whole, state, seen), self._missed(steps), clock)

    def _picked(self, clock: Clock, clients: list[int], also: np.ndarray | None) -> Picked:
        (client,) = clients
        dealt = self.rows.dealt(self.seed, clock.round, client, self.algorithm.exchanges * self.algorithm.local_steps)
        return self.rows.pick(client, dealt[self._hands(clock)], also)

    def _steps_in_sight(
        self, seen: Any, whole: list[bool], picked: Picked, sight: Sight, clock: Clock, clients: list[int]
    ) -> tuple[Any, np.ndarray]:
        """Each step on the features of its batch; how many steps each feature in sight had."""
        algorithm, objective = self.algorithm, self.objective
        smoothness = self.rows.smoothness(clients) if algorithm.needs_smoothness else None
        steps = np.zeros(len(sight.features))
        for step in range(algorithm.local_steps):
            at, batch = picked.batch(step, self._kept(seen, sight) if algorithm.projects else None)
            steps[at] += 1
            batch, narrow = batch._replace(smoothness=smoothness), objective.restricted(len(at))
            where = torch.from_numpy(at).to(self.device)
            if algorithm.step_in_place(narrow, seen, where, batch, clock):
                continue
            draw = self._draw(clock, step, clients, partial(sight.coordinates, at))
            small = algorithm.client_step(narrow, _each(partial(sight.narrow, where), whole, seen), batch, clock, draw)
            seen = _each(partial(sight.widen, where), whole, seen, small)
        return seen, steps

    def _missed(self, seen: np.ndarray) -> Tensor:
        """How many steps had no gradient for each coordinate, (1, n), given how many had each feature; free ones always have one."""
        missed = torch.from_numpy(self.algorithm.local_steps - seen).to(self.device, self.dtype).repeat(self.objective.outputs)
        return torch.cat((missed, missed.new_zeros(self.objective.layout.free)))[None]

    def _held(self, state: Any) -> np.ndarray:
        """Features with a weight that is not zero."""
        return state[0][0, : self.objective.layout.gated].view(self.objective.outputs, -1).any(0).nonzero()[:, 0].numpy(force=True)

    def _kept(self, seen: Any, sight: Sight) -> np.ndarray:
        """The same among those in sight."""
        weights = seen[0][0, : len(sight.features) * self.objective.outputs]
        return weights.view(len(sight.features), -1).any(1).nonzero()[:, 0].numpy(force=True)


def mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A state with a function applied to its tensors."""
    return type(state)(*(function(part) if isinstance(part, Tensor) else part for part in state))


def _long_parts(state: Any, size: int) -> list[bool]:
    """Which parts of a state are vectors of that size."""
    return [isinstance(part, Tensor) and part.shape[-1:] == (size,) for part in state]


def _each(function: Callable[..., Tensor], whole: list[bool], *states: Any) -> Any:
    """A state with its long vectors replaced by a function of those of some states."""
    parts = zip(whole, *states, strict=True)
    return type(states[0])(*(function(*part) if is_whole else part[0] for is_whole, *part in parts))
