"""`python -m benchmarks.scaling [FOLDER]`: CPU time per client step for growing cohorts, models and populations, as tables and a figure.

The examples of a population are generated when a client is sampled, so that only the cohort takes time and memory.
"""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.contenders.fedsieve import MAX_ROUNDS, build_algorithm, build_client_data
from benchmarks.workloads import WORKLOADS, Workload
from fedsieve.core import protocols
from fedsieve.core.random import generator
from fedsieve.core.types import Batch, Clock
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.rounds import Population, initial_server, train

COHORT_SIZES = (10, 100, 1000)
MODEL_SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
POPULATION_SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
ROUND_COUNTS = (10, 100, 1000)
EXAMPLES_PER_CLIENT = 64


class GeneratedClientData(ClientData):
    """Examples that are generated from a client's random stream when the client trains."""

    def __init__(self, objective: Linear, batch_size: int, num_clients: int) -> None:
        examples = [EXAMPLES_PER_CLIENT] * num_clients
        super().__init__(torch.empty(0, objective.num_features), torch.empty(0), examples, objective, batch_size)

    def batches(self, seed: int, clock: Clock, clients: Sequence[int], workload: protocols.Workload) -> Iterator[Batch]:
        """Yield the batches of a stack of clients in a round of one exchange."""
        by_client = [self.epoch_batches(seed, clock.round, client, workload.local_steps) for client in clients]
        for step in zip(*by_client, strict=True):
            batches = [self._generate_batch(client, indices) for client, indices in zip(clients, step, strict=True)]
            yield Batch(torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches]))

    def _generate_batch(self, client: int, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rng = generator(1, "rows of", client)
        x = rng.standard_normal((EXAMPLES_PER_CLIENT, self.num_features), dtype=np.float32)
        return torch.from_numpy(x[indices]), torch.from_numpy(rng.integers(0, self._objective.num_outputs, EXAMPLES_PER_CLIENT)[indices])


def training_rounds(workload: Workload, num_clients: int | None) -> Iterator:
    """Return the rounds of a cohort of `workload.num_clients`, sampled from a population of `num_clients` if that is set."""
    algorithm = build_algorithm(workload)
    objective = Linear(loss=Loss.SOFTMAX, num_features=workload.num_features, num_outputs=workload.num_outputs)
    data = (
        build_client_data(workload, objective) if num_clients is None else GeneratedClientData(objective, workload.batch_size, num_clients)
    )
    exchange = BatchedEngine(context=RunContext(algorithm=algorithm, objective=objective, seed=1, fingerprint=1), data=data)
    num_clients = num_clients or workload.num_clients
    server = initial_server(algorithm, objective, 1, torch.float32)
    return train(
        algorithm, server, Population(num_clients, range(num_clients)), workload.num_clients / num_clients, exchange, MAX_ROUNDS, 1
    )


def round_cpu_seconds(workload: Workload, num_clients: int | None, num_rounds: int) -> float:
    """Return the minimum CPU time of a round in seconds, after a first round."""
    training = training_rounds(workload, num_clients)
    next(training)
    return min_round_cpu_seconds(training, num_rounds)


def min_round_cpu_seconds(training: Iterator, num_rounds: int) -> float:
    """Return the minimum CPU time of the next rounds."""
    seconds = []
    for _ in range(num_rounds):
        start = time.process_time()
        next(training)
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure_cohort_sizes(base: Workload) -> list[tuple[int, float]]:
    """Return CPU microseconds per client step for each cohort size."""
    works = [base._replace(num_clients=cohort) for cohort in COHORT_SIZES]
    return [(work.num_clients, 1e6 * round_cpu_seconds(work, None, 3) / work.client_steps) for work in works]


def measure_population_sizes(base: Workload) -> list[tuple[int, float]]:
    """Return the same for a cohort of 100 from each population size."""
    work = base._replace(num_clients=100)
    return [(population, 1e6 * round_cpu_seconds(work, population, 3) / work.client_steps) for population in POPULATION_SIZES]


def measure_model_sizes(base: Workload) -> list[tuple[int, float]]:
    """Return the same for each model size."""
    shapes = [(size, 10 if size <= 100_000 else 100) for size in MODEL_SIZES]
    works = [base._replace(num_features=size // outputs, num_outputs=outputs) for size, outputs in shapes]
    return [(work.size, 1e6 * round_cpu_seconds(work, None, 3) / work.client_steps) for work in works]


def measure_later_rounds(workload: Workload) -> list[tuple[int, float]]:
    """Return CPU microseconds per client step after each number of rounds, the minimum of ten."""
    training, found = training_rounds(workload, None), []
    for rounds in ROUND_COUNTS:
        for _ in range(rounds - 10 - (found[-1][0] if found else 0)):
            next(training)
        found.append((rounds, 1e6 * min_round_cpu_seconds(training, 10) / workload.client_steps))
    return found


def draw_curves(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw four curves next to each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3), layout="constrained")
    for axis, (name, points) in zip(axes, curves.items(), strict=True):
        axis.loglog(*zip(*points, strict=True), marker="o", color="#1f5fa8")
        axis.set_xlabel(name)
        axis.set_ylim(min(y for _, y in points) / 3, max(y for _, y in points) * 3)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU microseconds per client step")
    figure.savefig(path, dpi=150)


MEASUREMENTS = {
    "clients in a cohort": measure_cohort_sizes,
    "clients in the population": measure_population_sizes,
    "rounds so far": measure_later_rounds,
    "parameters": measure_model_sizes,
}
"""The measurements; models are last because they take the most memory."""


def main() -> None:
    """Print a table of each measurement and save the figure."""
    torch.set_num_threads(1)
    base, found = WORKLOADS["W2"]._replace(local_steps=4, examples_per_client=EXAMPLES_PER_CLIENT), {}
    for name, measure in MEASUREMENTS.items():
        found[name] = measure(base)
        print(f"\n{name:>28}  CPU us per client step")
        for size, microseconds in found[name]:
            print(f"{size:>28,}  {microseconds:>10.0f}")
        print(f"peak memory so far {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB", flush=True)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    draw_curves(found, folder / "scaling.png")
    print(f"figure in {folder / 'scaling.png'}")


if __name__ == "__main__":
    main()
