"""The rounds of a run with their measurements: simulated, without a server, or on the ranks of a cluster."""

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch

from fedsieve import __version__
from fedsieve.core.random import derive_key
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.experiments.run_info import describe_run
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.topology_config import TREE
from fedsieve.models.initial_weights import load_initial_weights
from fedsieve.runtime.buffers import buffer_state
from fedsieve.runtime.cluster import ClusterExchange
from fedsieve.runtime.evaluation import MeasuredRound, RunState, measure_rounds
from fedsieve.runtime.failures import FaultyExchange
from fedsieve.runtime.hierarchy import Hierarchy
from fedsieve.runtime.privacy import epsilon_by_round, new_secret
from fedsieve.runtime.ranks import ClusterError, Ranks, RunEnded
from fedsieve.runtime.refit import Refit
from fedsieve.runtime.rounds import RoundResult, initial_server, train

NODE_EVALUATIONS = 20
"""How often the metrics of single nodes are measured in a run without a server: each time costs an evaluation per node."""
MUST_MATCH = ("metric", "layout", "truth", "clients", "topology")
"""Entries of run_info.json that must not change when a run resumes, nor differ between ranks: they describe the data and the model."""


def initial_state(run: ResolvedRun, simulation: Simulation) -> RunState:
    """Return the state before the first round, drawn from the seed or from `run.init_weights`."""
    weights = buffers = None
    if run.init_weights is not None:
        values = load_initial_weights(run.init_weights, run.objective)
        weights = simulation.to_standardized(values[: run.objective.layout.size]).to(device=run.device, dtype=run.dtype)
        buffers = values[run.objective.layout.size :]
    return RunState(initial_server(run.algorithm, run.objective, run.seed, run.dtype, run.device, weights), buffers=buffers)


def run_rounds(
    run: ResolvedRun, simulation: Simulation | None = None, state: RunState | None = None, secret: bytes | None = None
) -> Iterator[MeasuredRound]:
    """Train from `state` to the last round and yield every round with its measurements.

    Noise and cohorts of a private run follow from `secret` (default: a new one, which nobody can repeat).
    """
    torch.set_num_threads(1)
    simulation = simulation or Simulation(run)
    simulation.validate()
    state = state or initial_state(run, simulation)
    if run.topology.is_gossip:
        return run_gossip(run, simulation, state)
    engine = simulation.make_exchange(simulation.client_data, run.seed)
    exchange = simulation.divide_among_ranks(engine)
    if run.topology.name == TREE:
        exchange = Hierarchy(exchange=exchange, num_clients=run.federation.clients, levels=run.topology.levels)
    server_exchange = None
    if run.federation.server_examples:
        server_exchange = simulation.make_exchange(simulation.server_data, derive_key(run.seed, "tune"))
    faulty_exchange = None
    if run.failures.is_active:
        faulty_exchange = FaultyExchange(
            exchange=exchange,
            resolve_seed=engine.context.resolve_seed,
            failures=run.failures,
            clients_with_data=simulation.population.clients_with_data,
            seed=run.seed,
        )
    rounds = train(
        run.trained_algorithm,
        state.server,
        simulation.population,
        1.0 if run.centralized else run.federation.participation,
        faulty_exchange or exchange,
        run.rounds,
        run.seed,
        dtype=run.dtype,
        device=run.device,
        first_round=state.num_rounds_done,
        memories=state.memories,
        server_exchange=server_exchange,
        start_from_seed=run.init_weights is None,
        limits=simulation.reply_limits,
        secret=None if run.algorithm.privacy is None else secret or new_secret(),
        buffers=buffer_state(run.objective, run.seed, state.buffers),
    )
    if run.refit:
        refit = Refit(
            exchange=engine,
            clients=simulation.population.clients_with_data,
            num_rounds=run.rounds,
            limits=simulation.reply_limits,
            add_failures=lambda inner: inner if faulty_exchange is None else replace(faulty_exchange, exchange=inner),
        )
        rounds = refit.apply(rounds)
    epsilons = iterate_epsilon(run, simulation, state.num_rounds_done)
    return measure_rounds(
        run.algorithm,
        count_standardization(rounds, simulation),
        lambda parameters: simulation.evaluate(parameters) | simulation.support_recovery(parameters),
        dense_metric=run.metric,
        extra_columns=lambda result: link_columns(result) | ({} if epsilons is None else {"epsilon": next(epsilons)}),
        has_malicious_clients=run.failures.malicious_fraction > 0,
        seconds_before=state.seconds,
    )


def run_gossip(run: ResolvedRun, simulation: Simulation, state: RunState) -> Iterator[MeasuredRound]:
    """Train without a server. Some rounds, the last one included, also have the metrics of single nodes."""
    gossip, interval = simulation.make_gossip(), max(1, run.rounds // NODE_EVALUATIONS)

    def columns(result: RoundResult) -> dict[str, float]:
        is_measured = (result.round + 1) % interval == 0 or result.round + 1 == run.rounds
        return {**result.columns, **(simulation.evaluate_nodes(gossip, result) if is_measured else {})}

    return measure_rounds(
        run.algorithm,
        count_standardization(gossip.train(state.server, run.rounds, state.num_rounds_done, state.memories), simulation),
        lambda parameters: simulation.evaluate(parameters) | simulation.support_recovery(parameters),
        extra_columns=columns,
        seconds_before=state.seconds,
    )


def follow_run(run: ResolvedRun, ranks: Ranks) -> None:
    """Train the clients or nodes of a rank other than 0 until rank 0 ends the run."""
    torch.set_num_threads(1)
    simulation = Simulation(run, ranks)
    simulation.validate()
    try:
        compare_with_ranks(run, simulation)
        if run.topology.is_gossip:
            for _ in simulation.make_gossip().train(initial_state(run, simulation).server, run.rounds, 0, {}):
                raise AssertionError("only rank 0 has rounds")
            ranks.wait_for_end()
        else:
            engine = simulation.make_exchange(simulation.client_data, run.seed)
            ClusterExchange(context=engine.context, data=engine.data, ranks=ranks).serve()
    except RunEnded:
        return


def compare_with_ranks(run: ResolvedRun, simulation: Simulation) -> None:
    """Raise ClusterError at rank 0 if another rank has other settings, data or software."""
    if (ranks := simulation.ranks) is None:
        return
    about = describe_run(run, simulation)
    found = {"settings": run.settings_dict, **{name: about[name] for name in MUST_MATCH}, "version of fedsieve": __version__}
    own = {name: torch.tensor(list(blake2b(json.dumps(value).encode()).digest())) for name, value in found.items()}
    if ranks.number:
        ranks.answer(own)
        return
    for rank in ranks.others:
        theirs = ranks.receive(rank)
        if other := [name for name in own if not torch.equal(theirs.get(name, torch.zeros(0)), own[name])]:
            raise ClusterError(f"rank {rank} has other {', '.join(other)} than rank 0; give all ranks the same options and files")


def link_columns(result: RoundResult) -> dict[str, Any]:
    """Return the bytes of each link between aggregators ("level.number"), and the sum of each level; nothing without aggregators."""
    by_level: dict[str, int] = {}
    for name, size in result.links.items():
        column = f"level_{name.partition('.')[0]}_bytes"
        by_level[column] = by_level.get(column, 0) + size
    return {**by_level, "link_bytes": dict(result.links)} if result.links else {}


def count_standardization(rounds: Iterator[RoundResult], simulation: Simulation) -> Iterator[RoundResult]:
    """Yield the rounds; the first includes the traffic of the federated standardization."""
    for result in rounds:
        if result.round == 0:
            traffic = simulation.standardization_traffic
            result = result._replace(uplink=result.uplink + traffic, downlink=result.downlink + traffic)
        yield result


def iterate_epsilon(run: ResolvedRun, simulation: Simulation, first_round: int) -> Iterator[float] | None:
    """Return the privacy loss after each round, or None for a run without differential privacy."""
    if not run.privacy.noise_multiplier:
        return None
    assert run.algorithm.privacy is not None
    assert run.privacy.delta is not None, "`resolve` sets it"
    num_clients = len(simulation.population.clients_with_data)
    cohort = min(run.algorithm.privacy.cohort_size, num_clients)
    return epsilon_by_round(
        run.privacy.noise_multiplier, run.privacy.delta, num_clients, cohort, run.algorithm.workload.exchanges, first_round
    )
