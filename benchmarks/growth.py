"""`python -m benchmarks.growth [FOLDER]`: what a client-step costs as cohorts, models and populations grow; a table and a picture.

Cohorts and models grow over rows that are there. Populations draw each client's rows from its own stream when it is asked, so only the
cohort costs anything.
"""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.contenders.ours import ROUNDS, algorithm_of, rows_of
from benchmarks.workloads import WORKLOADS, Workload
from fedsieve.core.random import stream
from fedsieve.core.types import Batch
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.batched import Batched
from fedsieve.runtime.client_data import Rows
from fedsieve.runtime.rounds import Population, start, train

COHORTS = (10, 100, 1000)
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
ROUNDS_SO_FAR = (10, 100, 1000)
ROWS = 64


class DrawnRows(Rows):
    """Rows that exist only while a client steps: client c's are drawn from its own stream."""

    def __init__(self, objective: Linear, batch: int) -> None:
        super().__init__(torch.empty(0, objective.features), torch.empty(0), [], objective, batch)

    def examples(self, client: int) -> int:
        """As many for each."""
        return ROWS

    def batches(self, seed: int, round: int, clients: Sequence[int], hands: int, played: slice) -> Iterator[Batch]:
        """The rows dealt to a stack of clients, step by step."""
        dealt = [self.dealt(seed, round, client, hands)[played] for client in clients]
        for step in zip(*dealt, strict=True):
            drawn = [self._client(client, hand) for client, hand in zip(clients, step, strict=True)]
            yield Batch(torch.stack([x for x, _ in drawn]), torch.stack([y for _, y in drawn]))

    def _client(self, client: int, hand: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rng = stream(1, "rows of", client)
        x = rng.standard_normal((ROWS, self.width), dtype=np.float32)
        return torch.from_numpy(x[hand]), torch.from_numpy(rng.integers(0, self._objective.outputs, ROWS)[hand])


def rounds_of(work: Workload, population: int | None) -> Iterator:
    """Rounds of a cohort of `work.clients` out of a population, or of a cohort that holds its rows."""
    algorithm = algorithm_of(work)
    objective = Linear(loss=Loss.SOFTMAX, features=work.features, outputs=work.outputs)
    rows = rows_of(work, objective) if population is None else DrawnRows(objective, work.batch)
    exchange = Batched(algorithm=algorithm, objective=objective, rows=rows, seed=1, fingerprint=1)
    population = population or work.clients
    server = start(algorithm, objective, 1, torch.float32)
    return train(algorithm, server, Population(population, range(population)), work.clients / population, exchange, ROUNDS, 1)


def cost(work: Workload, population: int | None, rounds: int) -> float:
    """The least CPU time of a round in seconds."""
    training = rounds_of(work, population)
    next(training)
    return least_of(training, rounds)


def least_of(training: Iterator, rounds: int) -> float:
    """The least CPU time among the next rounds."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        next(training)
        taken.append(time.process_time() - began)
    return min(taken)


def over_cohorts(base: Workload) -> list[tuple[int, float]]:
    """CPU microseconds a client-step in ever larger cohorts."""
    works = [base._replace(clients=cohort) for cohort in COHORTS]
    return [(work.clients, 1e6 * cost(work, None, 3) / work.client_steps) for work in works]


def over_populations(base: Workload) -> list[tuple[int, float]]:
    """The same for a cohort of 100 out of ever larger populations."""
    work = base._replace(clients=100)
    return [(population, 1e6 * cost(work, population, 3) / work.client_steps) for population in POPULATIONS]


def over_sizes(base: Workload) -> list[tuple[int, float]]:
    """The same for ever larger models."""
    shapes = [(size, 10 if size <= 100_000 else 100) for size in SIZES]
    works = [base._replace(features=size // outputs, outputs=outputs) for size, outputs in shapes]
    return [(work.size, 1e6 * cost(work, None, 3) / work.client_steps) for work in works]


def over_time(work: Workload) -> list[tuple[int, float]]:
    """CPU microseconds a client-step after ever more rounds: the least of ten."""
    training, found = rounds_of(work, None), []
    for rounds in ROUNDS_SO_FAR:
        for _ in range(rounds - 10 - (found[-1][0] if found else 0)):
            next(training)
        found.append((rounds, 1e6 * least_of(training, 10) / work.client_steps))
    return found


def picture(found: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Four curves side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(13, 3), layout="constrained")
    for axis, (name, points) in zip(axes, found.items(), strict=True):
        axis.loglog(*zip(*points, strict=True), marker="o", color="#1f5fa8")
        axis.set_xlabel(name)
        axis.set_ylim(min(y for _, y in points) / 3, max(y for _, y in points) * 3)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU microseconds a client-step")
    figure.savefig(path, dpi=150)


GROWTH = {
    "clients in a cohort": over_cohorts,
    "clients in the population": over_populations,
    "rounds so far": over_time,
    "parameters": over_sizes,
}
"""What grows; models last, as they take the most memory."""


def main() -> None:
    """Print a table of each, and save the picture."""
    torch.set_num_threads(1)
    base, found = WORKLOADS["W2"]._replace(steps=4, rows=ROWS), {}
    for name, measure in GROWTH.items():
        found[name] = measure(base)
        print(f"\n{name:>28}  CPU us a client-step")
        for size, microseconds in found[name]:
            print(f"{size:>28,}  {microseconds:>10.0f}")
        print(f"peak memory so far {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB", flush=True)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    picture(found, folder / "growth.png")
    print(f"picture in {folder / 'growth.png'}")


if __name__ == "__main__":
    main()
