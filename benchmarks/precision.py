"""`python -m benchmarks.precision [TASKS [BITS]]`: the quality of 8-bit and 4-bit messages minus that of 32 bits, paired over seeds 10-14.

TASKS and BITS are lists with commas (default: `lr,lg,mc` and `8,4`).
"""

import sys

import numpy as np

from fedsieve.algorithms import algorithm_class
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.tasks import TASKS, default_options
from fedsieve.experiments.training import run_rounds

SEEDS = range(10, 15)
ALGORITHM_NAMES = ("sieve", "flops", "flops-pa", "fed-iter-ht", "fed-round-ht", "fed-avg")


def final_metrics(task: str, algorithm_name: str, bits: int, simulations: dict[int, Simulation]) -> np.ndarray:
    """Return the metric of each seed after the last round."""
    values = []
    for seed, simulation in simulations.items():
        cls = algorithm_class(algorithm_name)
        run = resolve(
            RunConfig(
                task=task,
                algorithm_name=algorithm_name,
                seed=seed,
                algorithm=cls(**default_options(TASKS[task], cls, None) | {"bits": bits}),
            )
        )
        for step in run_rounds(run, simulation.with_config(run)):
            last = step.metrics
        values.append(last[TASKS[task].metric])
    return np.array(values)


def main() -> None:
    """Print a table in Markdown."""
    tasks = sys.argv[1].split(",") if len(sys.argv) > 1 else ["lr", "lg", "mc"]
    bit_widths = [int(bits) for bits in sys.argv[2].split(",")] if len(sys.argv) > 2 else [8, 4]
    print("| task | algorithm | 32 bits |" + "".join(f" {bits} bits - 32 bits (se) |" for bits in bit_widths))
    print("|---|---|---|" + "---|" * len(bit_widths))
    for task in tasks:
        simulations = {seed: Simulation(resolve(RunConfig(task=task, seed=seed))) for seed in SEEDS}
        for name in ALGORITHM_NAMES:
            full = final_metrics(task, name, 32, simulations)
            cells = []
            for bits in bit_widths:
                difference = final_metrics(task, name, bits, simulations) - full
                cells.append(f"{difference.mean():+.4f} ({difference.std(ddof=1) / len(difference) ** 0.5:.4f})")
            print(f"| {task} | {name} | {full.mean():.4f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
