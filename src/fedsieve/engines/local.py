"""What clients compute between receiving a packet and answering it, for a stack of clients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.core.packets import Packet
from fedsieve.core.streams import client_keys, drawer, key
from fedsieve.core.types import Clock
from fedsieve.engines.party import Party
from fedsieve.engines.rows import Rows, deal


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
        state = advance(mapped(begun, lambda part: part.expand(len(clients), *part.shape)), clock, clients)
        return self.algorithm.client_reply(state, clock, self._draw(clock, self.algorithm.local_steps, clients))

    def _draw(self, clock: Clock, step: int, clients: list[int], at: np.ndarray | None = None) -> Any:
        return drawer(self.seed, clock.round, clock.exchange, step, clients, self.dtype, self.device, at)

    def _dense_steps(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        algorithm = self.algorithm
        decks = [deal(self.seed, clock, client, self.rows.examples(client)) for client in clients]
        smoothness = self.rows.smoothness(clients) if algorithm.needs_smoothness else None
        for step in range(algorithm.local_steps):
            hands = [deck(algorithm.batch_rows, step, algorithm.local_steps) for deck in decks]
            batch = self.rows.take(clients, hands)._replace(smoothness=smoothness, keys=self._keys(clock, step, clients))
            state = algorithm.client_step(self.objective, state, batch, clock, self._draw(clock, step, clients))
        return state

    def _keys(self, clock: Clock, step: int, clients: list[int]) -> list[int] | None:
        """Noise for objectives that have some of their own (dropout)."""
        if not getattr(self.objective, "random", False):
            return None
        keys = client_keys(key(self.seed, "module", clock.round, clock.exchange, step), clients)
        return (keys >> np.uint64(1)).tolist()

    def _sparse_steps(self, state: Any, clock: Clock, clients: list[int]) -> Any:
        """The same client step on a restriction: only coordinates of features in the batch have a gradient.

        Restrict the state to them, step, scatter back; what steps do to the others is done once, at the end (`client_rest`).
        """
        (client,) = clients
        algorithm, size = self.algorithm, self.objective.layout.size
        state = mapped(state, lambda part: part.clone() if part.shape[-1:] == (size,) else part)
        seen = np.zeros(self.objective.features)
        deck = deal(self.seed, clock, client, self.rows.examples(client))
        smoothness = self.rows.smoothness(clients) if algorithm.needs_smoothness else None
        for step in range(algorithm.local_steps):
            hand = deck(algorithm.batch_rows, step, algorithm.local_steps)
            touched, batch = self.rows.take_touched(client, hand, self._held(state) if algorithm.projects else None)
            at = self._coordinates(touched)
            where = torch.from_numpy(at).to(self.device)
            small = mapped(state, lambda part, where=where: part.index_select(-1, where) if part.shape[-1:] == (size,) else part)
            small = algorithm.client_step(
                self.objective.restricted(len(touched)),
                small,
                batch._replace(smoothness=smoothness),
                clock,
                self._draw(clock, step, clients, at),
            )
            for whole, part in zip(state, small, strict=True):
                if isinstance(whole, Tensor) and whole.shape[-1:] == (size,):
                    whole.index_copy_(-1, where, part)
            seen[touched] += 1
        return algorithm.client_rest(state, self._missed(seen), clock)

    def _missed(self, seen: np.ndarray) -> Tensor:
        """How many steps had no gradient for each coordinate, (1, p), given how many had each feature; free ones always have."""
        objective, steps = self.objective, self.algorithm.local_steps
        missed = torch.from_numpy(steps - seen).to(self.device, self.dtype).repeat(objective.outputs)
        return torch.nn.functional.pad(missed, (0, objective.layout.free))[None]

    def _coordinates(self, touched: np.ndarray) -> np.ndarray:
        """Where the weights of some features stand in the whole vector, and after them the free coordinates."""
        layout = self.objective.layout
        weights = np.arange(self.objective.outputs)[:, None] * self.objective.features + touched
        return np.concatenate((weights.reshape(-1), np.arange(layout.gated, layout.size)))

    def _held(self, state: Any) -> np.ndarray:
        """Features with a weight that is not zero."""
        weights = state[0][0, : self.objective.layout.gated]
        return np.unique(weights.nonzero()[:, 0].numpy(force=True) % self.objective.features)


def mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A state with a function applied to its tensors."""
    return type(state)(*(function(part) if isinstance(part, Tensor) else part for part in state))
