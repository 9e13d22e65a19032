"""What clients compute between receiving a packet and answering it, for a stack of clients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.streams import client_keys, drawer, key
from fedsieve.core.types import Clock
from fedsieve.engines.party import Party
from fedsieve.engines.rows import Deck, Rows, deal
from fedsieve.engines.sight import Sight


@dataclass(frozen=True, kw_only=True)
class Local(Party):
    """Clients that step together."""

    rows: Rows

    def begin(self, packet: Packet, clock: Clock) -> Any:
        """The state every client of a cohort begins with."""
        return self.algorithm.client_init(packet, self.objective.layout, clock, self.dtype)

    def answer(self, begun: Any, clock: Clock, clients: list[int]) -> Packet:
        """Take the local steps from a common state, reply: a stack of packets."""
        advance = self._sparse_steps if self.rows.sparse else self._dense_steps
        state = advance(mapped(begun, lambda part: part.expand(len(clients), *part.shape).contiguous()), clock, clients)
        return self.algorithm.client_reply(state, clock, self._draw(clock, self.algorithm.local_steps, clients))

    def _draw(self, clock: Clock, step: int, clients: list[int], at: Callable[[], np.ndarray] | None = None) -> Any:
        return drawer(self.seed, clock.round, clock.exchange, step, clients, self.dtype, self.device, at)

    def _dense_steps(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        algorithm = self.algorithm
        decks = [deal(self.seed, clock, client, self.rows.examples(client)) for client in clients]
        places = self.rows.places(clients, [self._hands(deck) for deck in decks])
        smoothness = self.rows.smoothness(clients) if algorithm.needs_smoothness else None
        for step in range(algorithm.local_steps):
            batch = self.rows.take(places[step])._replace(smoothness=smoothness, keys=self._keys(clock, step, clients))
            state = algorithm.client_step(self.objective, state, batch, clock, self._draw(clock, step, clients))
        return state

    def _hands(self, deck: Deck) -> list[np.ndarray]:
        """The rows of one client's steps."""
        steps = self.algorithm.local_steps
        return [deck(self.algorithm.batch_rows, step, steps) for step in range(steps)]

    def _keys(self, clock: Clock, step: int, clients: list[int]) -> list[int] | None:
        """Noise for objectives that have some of their own (dropout)."""
        if not getattr(self.objective, "random", False):
            return None
        keys = client_keys(key(self.seed, "module", clock.round, clock.exchange, step), clients)
        return (keys >> np.uint64(1)).tolist()

    def _sparse_steps(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        """The same client step on a restriction: only coordinates of features in the batch have a gradient.

        Restrict the state to the features of the round's rows, and for each step to those of its batch, step, put back; what steps do
        to the others is done once, at the end (`client_rest`).
        """
        (client,) = clients
        algorithm, objective = self.algorithm, self.objective
        deck = deal(self.seed, clock, client, self.rows.examples(client))
        picked = self.rows.pick(client, self._hands(deck), self._held(state) if algorithm.projects else None)
        sight = Sight.over(objective, picked.features, self.device)
        whole = [isinstance(part, Tensor) and part.shape[-1:] == (objective.layout.size,) for part in state]

        def each(function: Callable[..., Tensor], *states: Any) -> Any:
            parts = zip(whole, *states, strict=True)
            return type(state)(*(function(*part) if is_whole else part[0] for is_whole, *part in parts))

        seen = each(sight.of, state)
        smoothness = self.rows.smoothness(clients) if algorithm.needs_smoothness else None
        steps = np.zeros(objective.features)
        for step in range(algorithm.local_steps):
            at, batch = picked.batch(step, self._kept(seen, sight) if algorithm.projects else None)
            where = torch.from_numpy(at).to(self.device)
            small = algorithm.client_step(
                objective.restricted(len(at)),
                each(partial(sight.narrow, where), seen),
                batch._replace(smoothness=smoothness),
                clock,
                self._draw(clock, step, clients, partial(sight.coordinates, at)),
            )
            seen = each(partial(sight.widen, where), seen, small)
            steps[sight.features[at]] += 1
        return algorithm.client_rest(each(sight.back, state, seen), self._missed(steps), clock)

    def _missed(self, seen: np.ndarray) -> Tensor:
        """How many steps had no gradient for each coordinate, (1, p), given how many had each feature; free ones always have."""
        objective, steps = self.objective, self.algorithm.local_steps
        missed = torch.from_numpy(steps - seen).to(self.device, self.dtype).repeat(objective.outputs)
        return torch.nn.functional.pad(missed, (0, objective.layout.free))[None] if objective.layout.free else missed[None]

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
