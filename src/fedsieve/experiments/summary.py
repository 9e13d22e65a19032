"""The result of a run by the names of `--json`."""

from typing import Any

import torch
from torch import Tensor

from fedsieve.algorithms.gated import GatedAlgorithm
from fedsieve.data import user_files
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.experiments.run_info import dense_bytes_per_round
from fedsieve.experiments.simulation import Simulation
from fedsieve.objectives.linear import Linear
from fedsieve.runtime import evaluation
from fedsieve.runtime.buffers import append_buffers

METRIC_NAMES = ("r2", "mse", "accuracy", "ce", "bce", "micro_f1", "tdr", "tdr_features", "recall")
TOPOLOGY_COLUMNS = ("worst_node", "mean_node", "consensus_distance", "support_agreement")
"""Columns of the last round that the result of a run without a server has too."""


def used_features(run: ResolvedRun, parameters: Tensor) -> list[str] | None:
    """Return the features a linear model uses, strongest first; None unless the data is a user's file or gates are shared by feature."""
    objective = run.objective
    if not isinstance(objective, Linear) or not (objective.group_by_feature or run.task == "file"):
        return None
    strength = objective.unflatten(parameters)[0].square().sum(0)
    order = strength.argsort(descending=True, stable=True)[: int((strength > 0).sum())].tolist()
    names = user_files.read_table(run.data.path, run.data.target, run.data.client).feature_names if run.task == "file" else None
    return [names[j] if names else str(j) for j in order]


def summarize(
    run: ResolvedRun, simulation: Simulation, rows: list[dict[str, Any]], server: Any, buffers: Tensor | None = None
) -> dict[str, Any]:
    """Return the result of a run by the names of `--json`."""
    unprojected = append_buffers(run.algorithm.unprojected_parameters(server), buffers)
    last, parameters = rows[-1], run.algorithm.parameters(server)
    return {
        "run": run.id,
        "task": run.task,
        "algorithm": run.algorithm_name,
        "seed": run.seed,
        "metric": run.metric,
        "value": last[run.metric],
        "value_before_projection": simulation.evaluate(unprojected)[run.metric],
        **{name: last.get(name) for name in METRIC_NAMES},
        **evaluation.summarize(rows, parameters, run.objective.layout.num_gated),
        "features": used_features(run, parameters),
        "expected_density": last.get("expected_density"),
        "test_density": last.get("test_density"),
        "epsilon": last.get("epsilon"),
        "delta": run.privacy.delta,
        "bytes_counted": run.byte_counting.value,
        "oracle_value": simulation.oracle_value,
        "data": simulation.dataset.description,
        "note": "; ".join(filter(None, (simulation.dataset.note, failure_note(run, simulation, last[run.metric])))) or None,
        **topology_summary(rows),
        "bytes_dense": len(rows) * dense_bytes_per_round(run, simulation),
        "bytes_examples": simulation.bytes_examples,
    }


def failure_note(run: ResolvedRun, simulation: Simulation, value: float) -> str | None:
    """Return the formula of the paper that made the model worse than one with all weights zero, or None if there is none."""
    formula = run.algorithm.unstable_formula if isinstance(run.algorithm, GatedAlgorithm) else None
    zeros = torch.zeros(run.objective.layout.size, dtype=run.dtype, device=run.device)
    if formula is None or value >= simulation.evaluate(zeros)[run.metric]:
        return None
    return f"worse than a model with all weights zero: {formula}"


def topology_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run over a topology other than a star adds to its result."""
    last = rows[-1]
    sums = {name: sum(row[name] for row in rows) for name in last if name.startswith("level_") or name.endswith("node_bytes")}
    return {name: last[name] for name in TOPOLOGY_COLUMNS if name in last} | sums
