"""`python -m benchmarks.parity`: how far engines part in single precision: clients one by one over bytes, as nodes do, or all at once.

Three clients, all asked in each of 20 rounds, on the regression of `fedsieve train` (1000 weights, 50 kept), seeds 0-4. No clock is read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Clock, ExchangeResult
from fedsieve.experiments.config import Engine, FederationConfig, Precision, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.runtime.rounds import initial_server, train

ALGORITHM_NAMES, SEEDS, NUM_ROUNDS = ("sieve", "flops-pa", "fed-iter-ht", "fed-avg"), range(5), 20


class RunOutcome(NamedTuple):
    """What a run leaves: every reply as bytes, and the model."""

    packets: list[bytes]
    parameters: Tensor
    r2: float


def run_and_record(run: RunConfig) -> RunOutcome:
    """A run, and the packets its clients replied with."""
    problem, packets = Simulation(run), []
    engine = problem.make_exchange(problem.client_data, run.seed)

    def exchange(clock: Clock, packet: Packet, clients: Sequence[int]) -> ExchangeResult:
        came, support = engine(clock, packet, clients), engine.opened(packet, clock).support
        packets.extend(wire.encode(reply.packet, engine.address(clock), support).to_bytes() for reply in came.replies)
        return came

    server = initial_server(run.algorithm, run.objective, run.seed, run.dtype)
    for done in train(run.algorithm, server, problem.population, 1.0, exchange, run.rounds, run.seed, dtype=run.dtype):
        server = done.server
    theta = run.algorithm.parameters(server)
    return RunOutcome(packets, theta, problem.evaluate(theta)["r2"])


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print("| method | precision | identical packets | largest difference of a weight | of R2 | same support |")
    print("|---|---|---|---|---|---|")
    for method in ALGORITHM_NAMES:
        for precision in Precision:
            same = total = supports = 0
            apart = worse = 0.0
            for seed in SEEDS:
                federation = FederationConfig(clients=3, participation=1.0)
                runs = (
                    resolve(
                        RunConfig(
                            algorithm_name=method, seed=seed, rounds=NUM_ROUNDS, precision=precision, engine=engine, federation=federation
                        )
                    )
                    for engine in (Engine.LOOP, Engine.BATCHED)
                )
                alone, stacked = map(run_and_record, runs)
                same += sum(one == other for one, other in zip(alone.packets, stacked.packets, strict=True))
                total += len(alone.packets)
                apart = max(apart, float((alone.parameters - stacked.parameters).abs().max()))
                worse = max(worse, abs(alone.r2 - stacked.r2))
                supports += torch.equal(alone.parameters != 0, stacked.parameters != 0)
            print(f"| {method} | {precision} | {same} of {total} | {apart:.0e} | {worse:.0e} | {supports} of {len(SEEDS)} |", flush=True)


if __name__ == "__main__":
    main()
