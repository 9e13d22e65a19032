"""What a run is before its first round, for those who read it later: clients, layers, the truth, the machine. Written as run.json."""

import platform
import time
from typing import Any

import numpy as np
import torch

import fedsieve
from fedsieve.core.types import Clock, Layout
from fedsieve.data.federated_dataset import label_counts
from fedsieve.experiments.config import Run
from fedsieve.experiments.simulation import Problem
from fedsieve.objectives.linear import Loss
from fedsieve.runtime.rounds import cohort_size

MOST_CLIENTS = 1000
"""Clients described one by one."""


def describe(run: Run, problem: Problem) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    truth = problem.truth
    return {
        "metric": run.metric,
        "best_possible": None if truth is None else problem.measure(truth.reshape(-1))[run.metric],
        "turns": run.algorithm.turns,
        "message_density": [run.algorithm.message_density(Clock(number, run.rounds)) for number in range(run.rounds)],
        "bytes_dense": bytes_dense(run, problem),
        "layout": layout(run.objective.layout),
        "spread": None if problem.spread is None else problem.spread.tolist(),
        "truth": None if truth is None else truth.reshape(-1).nonzero()[:, 0].tolist(),
        "clients": clients(run, problem),
        "environment": environment(run),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def bytes_dense(run: Run, problem: Problem) -> int:
    """What a round would send without sparsity: every weight in four bytes, both ways, in every exchange."""
    participation = 1.0 if run.federation.central else run.federation.participation
    return 2 * 4 * run.objective.layout.size * cohort_size(len(problem.counts), participation) * run.algorithm.exchanges


def layout(parts: Layout) -> dict[str, Any]:
    """Where each layer stands in the flat vector, and its shape."""
    layers = {name: {"start": part.start, "stop": part.stop, "shape": list(shape)} for name, (part, shape) in parts.layers.items()}
    return {"size": parts.size, "free": parts.free, "layers": layers}


def clients(run: Run, problem: Problem) -> dict[str, Any]:
    """How many there are; for up to a thousand, the rows of each and how many of them carry each label."""
    counts = problem.counts
    found: dict[str, Any] = {"count": len(counts)}
    if len(counts) > MOST_CLIENTS:
        return found
    labels = None if run.about.loss is Loss.SQUARED else label_counts(problem.drawn.y, counts)
    return {**found, "rows": counts.tolist(), "labels": None if labels is None else labels.astype(np.int64).tolist()}


def environment(run: Run) -> dict[str, str | int]:
    """What a result may depend on besides its settings."""
    return {
        "fedsieve": fedsieve.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": run.threads,
    }
