"""The round: sample a cohort, broadcast, exchange, aggregate. One generator runs the rounds; the caller measures and stores them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.packets import Packet, seed_packet
from fedsieve.core.protocols import AggregationOptions, Algorithm, MemorySupport, Objective
from fedsieve.core.random import Draw, derive_key, generator, secret_sampler, secret_words, server_sampler
from fedsieve.core.reply_validation import ReplyLimits, validate_replies
from fedsieve.core.types import ClientMemories, ClientMemory, Clock, Exchange, Traffic
from fedsieve.runtime.buffers import BufferState


class Population(NamedTuple):
    """The number of clients of a run, and those that have examples."""

    num_clients: int
    clients_with_data: Sequence[int]


class RoundResult(NamedTuple):
    """The server state after a round, and what happened in it."""

    round: int
    server: Any
    cohort: list[int]
    replied: list[int]
    rejected: list[tuple[int, str]]
    """(client, reason)"""
    downlink: Traffic
    uplink: Traffic
    memories: Mapping[int, ClientMemory] = {}
    """what each client keeps until its next round; empty for an algorithm whose clients keep nothing"""
    buffers: Tensor | None = None
    """(b,) float32: the buffers of the model; None if it has none"""
    columns: Mapping[str, float] = {}
    """further numbers about a round without a server, such as the bytes of the busiest node"""
    links: Mapping[str, int] = {}
    """bytes of each link between aggregators, both directions; empty without aggregators"""


def cohort_size(num_clients: int, participation: float) -> int:
    """Return K = max(1, floor(gamma_c C)), exact for decimal fractions (decisions C4, D2)."""
    return max(1, floor_of_decimal(participation, num_clients))


def sample_cohort(clients_with_data: Sequence[int], size: int, seed: int, round: int, secret: bytes | None = None) -> list[int]:
    """Return the clients of a round in increasing order, sampled without replacement among those with examples.

    With differential privacy the sample follows from the server's secret: epsilon assumes that nobody knows who takes part.
    """
    num_clients, num_sampled = len(clients_with_data), min(size, len(clients_with_data))
    if num_sampled == num_clients:
        return sorted(int(client) for client in clients_with_data)
    if secret is None:
        picked = generator(seed, "cohort", round).choice(num_clients, num_sampled, replace=False)
    else:
        picked = secret_words(secret, num_clients, "cohort", round).argsort(kind="stable")[:num_sampled]
    return sorted(int(clients_with_data[i]) for i in picked)


def initial_server(
    algorithm: Algorithm, objective: Objective, seed: int, dtype: torch.dtype, device: str = "cpu", weights: Tensor | None = None
) -> Any:
    """Return the server state before the first round: from given weights, or from the seed alone (decision E7)."""
    draw = server_sampler(seed, 0, 0, dtype, device)
    return algorithm.init(objective.layout, objective.initial_weights(draw) if weights is None else weights, draw)


def initial_broadcast(
    algorithm: Algorithm, objective: Objective, seed: int, clock: Clock, dtype: torch.dtype, device: str = "cpu"
) -> Packet:
    """Return the first broadcast, which a client computes from the seed instead of receiving it."""
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
    memories: Mapping[int, ClientMemory] | None = None,
    server_exchange: Exchange | None = None,
    start_from_seed: bool = True,
    limits: ReplyLimits = ReplyLimits(),  # noqa: B008
    secret: bytes | None = None,
    buffers: BufferState | None = None,
) -> Iterator[RoundResult]:
    """Yield the rounds from `first_round` to `rounds` - 1.

    If every client can compute the start (`start_from_seed`), the first downlink is only the seed. Replies that violate `limits` are
    rejected. A round without replies changes nothing. `memories` is what clients kept before the first of these rounds; a client keeps
    something new if its reply is accepted. `buffers` are those of the model, if it has any. `server_exchange` trains on examples of the
    server after every exchange.

    An algorithm with differential privacy needs the server's `secret`, from which noise and cohorts are drawn. Then no seed is sent, and a
    round without replies adds its noise: what the server does depends only on what it released.
    """
    is_private = isinstance(algorithm, AggregationOptions) and algorithm.privacy is not None
    if is_private != (secret is not None):
        raise ValueError(
            "differential privacy draws its noise from a secret of the server: train needs both `secret` and privacy, or neither"
        )
    if is_private and buffers is not None:
        raise ValueError(
            "differential privacy does not protect buffers such as running statistics, which clients would send without noise; "
            "use GroupNorm, or BatchNorm with track_running_stats=False or in .eval()"
        )
    start_from_seed &= not is_private
    memory_support, memories = algorithm.engine_support.memory, {} if memories is None else memories
    num_exchanges, max_cohort = algorithm.workload.exchanges, cohort_size(population.num_clients, participation)
    for round in range(first_round, rounds):
        takes_all = round < algorithm.workload.full_rounds
        cohort = sample_cohort(population.clients_with_data, population.num_clients if takes_all else max_cohort, seed, round, secret)
        downlink, uplink = Traffic(), Traffic()
        replied: set[int] = set()
        links: dict[str, int] = {}
        rejected: list[tuple[int, str]] = []
        for number in range(num_exchanges):
            clock = Clock(round, rounds, number)
            draw = server_sampler(seed, round, number, dtype, device)
            packet = algorithm.broadcast(server, clock, draw)
            packet = packet if buffers is None else buffers.attach(packet)
            is_first = start_from_seed and round == 0 and number == 0
            known = ()
            if memory_support is not None:
                known = (ClientMemories(memories, partial(_catch_up_messages, memory_support, server, draw, start_from_seed)),)
            result = exchange(clock, seed_packet(seed, packet.size) if is_first else packet, cohort, *known)
            result = validate_replies(algorithm, packet, result, cohort, clock, limits, dtype)
            result = result if buffers is None else buffers.validate(result)
            memories = {**memories, **{client: result.memories[client] for client in result.clients if client in result.memories}}
            if result.replies or is_private:
                noise = draw if secret is None else secret_sampler(secret, round, number, dtype, device)
                server = algorithm.aggregate(server, packet, result.replies, clock, noise)
                buffers = None if buffers is None else buffers.aggregate(algorithm, result.replies)
            if server_exchange is not None:
                draw = server_sampler(derive_key(seed, "tune"), round, number, dtype, device)
                packet = algorithm.broadcast(server, clock, draw)
                packet = packet if buffers is None else buffers.attach(packet)
                if replies := server_exchange(clock, packet, [0]).replies:
                    server = algorithm.aggregate(server, packet, replies, clock, draw)
                    buffers = None if buffers is None else buffers.aggregate(algorithm, replies)
            downlink, uplink = downlink + result.downlink, uplink + result.uplink
            links |= {name: links.get(name, 0) + size for name, size in result.links.items()}
            replied.update(result.clients)
            rejected += result.rejected
        if replied or is_private or server_exchange is not None:
            server = algorithm.end_round(server, Clock(round, rounds, num_exchanges - 1))
        values = None if buffers is None else buffers.values
        yield RoundResult(round, server, cohort, sorted(replied), rejected, downlink, uplink, memories, values, {}, links)


def _catch_up_messages(support: MemorySupport, server: Any, draw: Draw, start_from_seed: bool, known_round: int | None) -> Sequence[Packet]:
    """Return the messages that build on the memory of a round. A client without memory may know the start from the seed."""
    if support.catch_up is None or (known_round is None and not start_from_seed):
        return ()
    return support.catch_up.messages(server, -1 if known_round is None else known_round, draw)
