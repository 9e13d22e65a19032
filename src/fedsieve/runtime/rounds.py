"""The round: who takes part, what is sent, what comes back. One short generator owns it and yields it; the caller does the rest."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fedsieve.core.packets import Packet, opening
from fedsieve.core.random import key, server_drawer, stream
from fedsieve.core.reply_validation import Screen, screened
from fedsieve.core.selection import exact_floor
from fedsieve.core.types import Algorithm, Bytes, Clock, Exchange, Objective


class Population(NamedTuple):
    """Who there is: how many clients were asked for, and which of them hold rows."""

    clients: int
    present: Sequence[int]


class Round(NamedTuple):
    """One round as it happened."""

    number: int
    server: Any
    cohort: list[int]
    replied: list[int]
    rejected: list[tuple[int, str]]
    down: Bytes
    up: Bytes


def cohort_size(clients: int, participation: float) -> int:
    """K = max(1, floor(gamma_c C)), exactly (decisions C4, D2)."""
    return max(1, exact_floor(participation, clients))


def sample_cohort(population: Population, participation: float, seed: int, round: int) -> list[int]:
    """The clients of a round, without replacement, among those who hold rows, in increasing order."""
    size = min(cohort_size(population.clients, participation), len(population.present))
    picked = stream(seed, "cohort", round).choice(len(population.present), size, replace=False)
    return sorted(int(population.present[i]) for i in picked)


def start(
    algorithm: Algorithm, objective: Objective, seed: int, dtype: torch.dtype, device: str = "cpu", given: torch.Tensor | None = None
) -> Any:
    """The server before the first round: a function of the seed alone, so every party can draw it (E7), or from given weights."""
    draw = server_drawer(seed, 0, 0, dtype, device)
    return algorithm.init(objective.layout, objective.initial(draw) if given is None else given, draw)


def first_broadcast(algorithm: Algorithm, objective: Objective, seed: int, clock: Clock, dtype: torch.dtype, device: str = "cpu") -> Packet:
    """What the server would have sent instead of the seed."""
    draw = server_drawer(seed, clock.round, clock.exchange, dtype, device)
    return algorithm.broadcast(start(algorithm, objective, seed, dtype, device), clock, draw)


def train(
    algorithm: Algorithm,
    server: Any,
    population: Population,
    participation: float,
    exchange: Exchange,
    rounds: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    first: int = 0,
    tune: Exchange | None = None,
    known_start: bool = True,
    screen: Screen = Screen(),  # noqa: B008
) -> Iterator[Round]:
    """Run the rounds [first, rounds). `tune` is an exchange with rows the server owns itself: no bytes, for every method alike.

    Where every party can draw the start (`known_start`), the first downlink is the seed. Replies count only if they pass `screen`.
    A round in which nobody answers changes nothing.
    """
    for number in range(first, rounds):
        cohort = sample_cohort(population, participation, seed, number)
        down, up = Bytes(), Bytes()
        replied: set[int] = set()
        rejected: list[tuple[int, str]] = []
        for turn in range(algorithm.exchanges):
            clock = Clock(number, rounds, turn)
            draw = server_drawer(seed, number, turn, dtype, device)
            packet = algorithm.broadcast(server, clock, draw)
            drawn = known_start and number == 0 and turn == 0
            came = exchange(clock, opening(seed, packet.size) if drawn else packet, cohort)
            came = screened(algorithm, packet, came, cohort, clock, screen, dtype)
            if came.replies:
                server = algorithm.aggregate(server, packet, came.replies, clock, draw)
            if tune is not None:
                draw = server_drawer(key(seed, "tune"), number, turn, dtype, device)
                packet = algorithm.broadcast(server, clock, draw)
                if own := tune(clock, packet, [0]).replies:
                    server = algorithm.aggregate(server, packet, own, clock, draw)
            down, up = down.plus(came.down), up.plus(came.up)
            replied.update(came.clients)
            rejected += came.rejected
        if replied or tune is not None:
            server = algorithm.close(server, Clock(number, rounds, algorithm.exchanges - 1))
        yield Round(number, server, cohort, sorted(replied), rejected, down, up)
