"""`python -m benchmarks.parity`: how much the results of the two engines differ in single precision.

Three clients, all in each of 20 rounds, on the regression of `fedsieve train` (1000 weights, 50 kept), seeds 0-4. Nothing is timed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Clock, ExchangeResult
from fedsieve.experiments.config import Engine, FederationConfig, Precision, RunConfig
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.runtime.rounds import initial_server, train

ALGORITHM_NAMES, SEEDS, NUM_ROUNDS = ("sieve", "flops-pa", "fed-iter-ht", "fed-avg"), range(5), 20


class RunOutcome(NamedTuple):
    """The results of a run: every reply as bytes, the model and its R2."""

    packets: list[bytes]
    parameters: Tensor
    r2: float


def run_and_record(run: ResolvedRun) -> RunOutcome:
    """Train a run and record the replies of its clients."""
    simulation, packets = Simulation(run), []
    engine = simulation.make_exchange(simulation.client_data, run.seed)
    context = engine.context

    def exchange(clock: Clock, packet: Packet, clients: Sequence[int]) -> ExchangeResult:
        result, support = engine(clock, packet, clients), context.resolve_seed(packet, clock).support
        packets.extend(wire.encode(reply.packet, context.message_id(clock), support).to_bytes() for reply in result.replies)
        return result

    server = initial_server(run.algorithm, run.objective, run.seed, run.dtype)
    for done in train(run.algorithm, server, simulation.population, 1.0, exchange, run.rounds, run.seed, dtype=run.dtype):
        server = done.server
    theta = run.algorithm.parameters(server)
    return RunOutcome(packets, theta, simulation.evaluate(theta)["r2"])


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print("| algorithm | precision | identical packets | largest difference of a weight | of R2 | same support |")
    print("|---|---|---|---|---|---|")
    for algorithm_name in ALGORITHM_NAMES:
        for precision in Precision:
            same = total = supports = 0
            weight_difference = r2_difference = 0.0
            for seed in SEEDS:
                federation = FederationConfig(clients=3, participation=1.0)
                config = RunConfig(algorithm_name=algorithm_name, seed=seed, rounds=NUM_ROUNDS, precision=precision, federation=federation)
                loop, batched = (run_and_record(resolve(replace(config, engine=engine))) for engine in (Engine.LOOP, Engine.BATCHED))
                same += sum(one == other for one, other in zip(loop.packets, batched.packets, strict=True))
                total += len(loop.packets)
                weight_difference = max(weight_difference, float((loop.parameters - batched.parameters).abs().max()))
                r2_difference = max(r2_difference, abs(loop.r2 - batched.r2))
                supports += torch.equal(loop.parameters != 0, batched.parameters != 0)
            differences = f"{weight_difference:.0e} | {r2_difference:.0e}"
            print(f"| {algorithm_name} | {precision} | {same} of {total} | {differences} | {supports} of {len(SEEDS)} |", flush=True)


if __name__ == "__main__":
    main()
