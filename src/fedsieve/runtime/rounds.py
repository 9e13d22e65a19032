"""The round: who takes part, what is sent, what comes back. One short generator owns it and yields it; the caller does the rest."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.packets import Packet, seed_packet
from fedsieve.core.random import derive_key, generator, server_sampler
from fedsieve.core.reply_validation import ReplyLimits, validate_replies
from fedsieve.core.types import Algorithm, Clock, Exchange, Objective, Traffic


class Population(NamedTuple):
    """Who there is: how many clients were asked for, and which of them hold rows."""

    num_clients: int
    clients_with_data: Sequence[int]


class RoundResult(NamedTuple):
    """One round as it happened."""

    round: int
    server: Any
    cohort: list[int]
    replied: list[int]
    rejected: list[tuple[int, str]]
    downlink: Traffic
    uplink: Traffic


def cohort_size(clients: int, participation: float) -> int:
    """K = max(1, floor(gamma_c C)), exactly (decisions C4, D2)."""
    return max(1, floor_of_decimal(participation, clients))


def sample_cohort(population: Population, participation: float, seed: int, round: int) -> list[int]:
    """The clients of a round, without replacement, among those who hold rows, in increasing order."""
    size = min(cohort_size(population.num_clients, participation), len(population.clients_with_data))
    picked = generator(seed, "cohort", round).choice(len(population.clients_with_data), size, replace=False)
    return sorted(int(population.clients_with_data[i]) for i in picked)


def initial_server(
    algorithm: Algorithm, objective: Objective, seed: int, dtype: torch.dtype, device: str = "cpu", weights: torch.Tensor | None = None
) -> Any:
    """The server before the first round: a function of the seed alone, so every party can draw it (E7), or from given weights."""
    draw = server_sampler(seed, 0, 0, dtype, device)
    return algorithm.init(objective.layout, objective.initial_weights(draw) if weights is None else weights, draw)


def initial_broadcast(
    algorithm: Algorithm, objective: Objective, seed: int, clock: Clock, dtype: torch.dtype, device: str = "cpu"
) -> Packet:
    """What the server would have sent instead of the seed."""
    draw = server_sampler(seed, clock.round, clock.exchange, dtype, device)
    return algorithm.broadcast(initial_server(algorithm, objective, seed, dtype, device), clock, draw)


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
    first_round: int = 0,
    server_exchange: Exchange | None = None,
    start_from_seed: bool = True,
    limits: ReplyLimits = ReplyLimits(),  # noqa: B008
) -> Iterator[RoundResult]:
    """Run the rounds [first, rounds). `tune` is an exchange with rows the server owns itself: no bytes, for every method alike.

    Where every party can draw the start (`known_start`), the first downlink is the seed. Replies count only if they pass `screen`.
    A round in which nobody answers changes nothing.
    """
    for number in range(first_round, rounds):
        cohort = sample_cohort(population, participation, seed, number)
        down, up = Traffic(), Traffic()
        replied: set[int] = set()
        rejected: list[tuple[int, str]] = []
        for turn in range(algorithm.exchanges_per_round):
            clock = Clock(number, rounds, turn)
            draw = server_sampler(seed, number, turn, dtype, device)
            packet = algorithm.broadcast(server, clock, draw)
            drawn = start_from_seed and number == 0 and turn == 0
            came = exchange(clock, seed_packet(seed, packet.size) if drawn else packet, cohort)
            came = validate_replies(algorithm, packet, came, cohort, clock, limits, dtype)
            if came.replies:
                server = algorithm.aggregate(server, packet, came.replies, clock, draw)
            if server_exchange is not None:
                draw = server_sampler(derive_key(seed, "tune"), number, turn, dtype, device)
                packet = algorithm.broadcast(server, clock, draw)
                if own := server_exchange(clock, packet, [0]).replies:
                    server = algorithm.aggregate(server, packet, own, clock, draw)
            down, up = down + came.downlink, up + came.uplink
            replied.update(came.clients)
            rejected += came.rejected
        if replied or server_exchange is not None:
            server = algorithm.end_round(server, Clock(number, rounds, algorithm.exchanges_per_round - 1))
        yield RoundResult(number, server, cohort, sorted(replied), rejected, down, up)
