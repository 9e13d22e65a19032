"""`python -m benchmarks.parity`: how far engines part in single precision: clients one by one over bytes, as nodes do, or all at once.

Three clients, all asked in each of 20 rounds, on the regression of `fedsieve train` (1000 weights, 50 kept), seeds 0-4. No clock is read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Clock, Exchanged
from fedsieve.experiments.config import Engine, Federation, Precision, Run
from fedsieve.experiments.simulation import Problem
from fedsieve.runtime.rounds import start, train

METHODS, SEEDS, ROUNDS = ("sieve", "flops-pa", "fed-iter-ht", "fed-avg"), range(5), 20


class Ended(NamedTuple):
    """What a run leaves: every reply as bytes, and the model."""

    packets: list[bytes]
    theta: Tensor
    r2: float


def ended(run: Run) -> Ended:
    """A run, and the packets its clients replied with."""
    problem, packets = Problem(run), []
    engine = problem.exchange(problem.rows, run.seed)

    def exchange(clock: Clock, packet: Packet, clients: Sequence[int]) -> Exchanged:
        came, support = engine(clock, packet, clients), engine.opened(packet, clock).support
        packets.extend(wire.encode(reply.packet, engine.address(clock), support).join() for reply in came.replies)
        return came

    server = start(run.algorithm, run.objective, run.seed, run.dtype)
    for done in train(run.algorithm, server, problem.population, 1.0, exchange, run.rounds, run.seed, dtype=run.dtype):
        server = done.server
    theta = run.algorithm.theta(server)
    return Ended(packets, theta, problem.measure(theta)["r2"])


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print("| method | precision | identical packets | largest difference of a weight | of R2 | same support |")
    print("|---|---|---|---|---|---|")
    for method in METHODS:
        for precision in Precision:
            same = total = supports = 0
            apart = worse = 0.0
            for seed in SEEDS:
                federation = Federation(clients=3, participation=1.0)
                runs = (
                    Run(method=method, seed=seed, rounds=ROUNDS, precision=precision, engine=engine, federation=federation)
                    for engine in (Engine.LOOP, Engine.BATCHED)
                )
                alone, stacked = map(ended, runs)
                same += sum(one == other for one, other in zip(alone.packets, stacked.packets, strict=True))
                total += len(alone.packets)
                apart = max(apart, float((alone.theta - stacked.theta).abs().max()))
                worse = max(worse, abs(alone.r2 - stacked.r2))
                supports += torch.equal(alone.theta != 0, stacked.theta != 0)
            print(f"| {method} | {precision} | {same} of {total} | {apart:.0e} | {worse:.0e} | {supports} of {len(SEEDS)} |", flush=True)


if __name__ == "__main__":
    main()
