"""The content of run_info.json: clients, layers, true coefficients and environment of a run."""

import platform
import time
from typing import Any

import numpy as np
import torch

import fedsieve
from fedsieve.core.types import Clock, Layout
from fedsieve.data.federated_dataset import label_counts
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.experiments.simulation import Simulation
from fedsieve.objectives.linear import Loss
from fedsieve.runtime.rounds import cohort_size

MAX_LISTED_CLIENTS = 1000
"""The maximum number of clients that are described one by one."""


def describe_run(run: ResolvedRun, simulation: Simulation) -> dict[str, Any]:
    """Return plain values for JSON."""
    truth = simulation.truth
    return {
        "metric": run.metric,
        "data": simulation.dataset.description,
        "oracle_value": simulation.oracle_value,
        "milestones": run.algorithm.milestones,
        "message_density": [run.algorithm.message_density(Clock(number, run.rounds)) for number in range(run.rounds)],
        "bytes_dense": dense_bytes_per_round(run, simulation),
        "layout": layout_info(run.objective.layout),
        "feature_std": None if simulation.feature_std is None else simulation.feature_std.tolist(),
        "truth": None if truth is None else truth.reshape(-1).nonzero()[:, 0].tolist(),
        "clients": client_info(run, simulation),
        "topology": run.topology.describe(len(simulation.examples_per_client)),
        "environment": environment_info(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def dense_bytes_per_round(run: ResolvedRun, simulation: Simulation) -> int:
    """Return the bytes of a round without sparsity: four bytes per weight, in both directions, in every exchange."""
    participation = 1.0 if run.centralized else run.federation.participation
    return (
        2
        * 4
        * run.objective.layout.size
        * cohort_size(len(simulation.examples_per_client), participation)
        * run.trained_algorithm.workload.exchanges
    )


def layout_info(layout: Layout) -> dict[str, Any]:
    """Return slice and shape of each layer."""
    layers = {name: {"start": part.start, "stop": part.stop, "shape": list(shape)} for name, (part, shape) in layout.layers.items()}
    return {"size": layout.size, "num_ungated": layout.num_ungated, "layers": layers}


def client_info(run: ResolvedRun, simulation: Simulation) -> dict[str, Any]:
    """Return the number of clients; for up to a thousand, the examples of each client and their labels."""
    counts = simulation.examples_per_client
    found: dict[str, Any] = {"count": len(counts)}
    if len(counts) > MAX_LISTED_CLIENTS:
        return found
    labels = None if run.task_spec.loss is Loss.SQUARED else label_counts(simulation.dataset.y, counts)
    return {**found, "num_examples": counts.tolist(), "labels": None if labels is None else labels.astype(np.int64).tolist()}


def environment_info() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "fedsieve": fedsieve.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
