"""The server of a deployment: gather the clients, train, say what happened, keep it on disk, go on after any end."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedsieve.deployment.config import DeploymentConfig
from fedsieve.deployment.flower import FlowerExchange, QuorumError
from fedsieve.experiments.run_info import layout_info
from fedsieve.experiments.training import MeasuredRound, RunState, compute_gate_histogram, traffic_columns
from fedsieve.models.sparse_model import ModelMetadata, SparseModel, to_safetensors
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss
from fedsieve.runtime.rounds import Population, RoundResult, initial_server, train
from fedsieve.storage import run_directory
from fedsieve.storage.run_log import CheckpointInterval, RunLog, load_history

LOSS_BY_FUNCTION = {functional.cross_entropy: Loss.SOFTMAX, functional.binary_cross_entropy_with_logits: Loss.MULTILABEL}
"""What a module's outputs mean, by the loss it is trained with; of any other they are numbers."""
IGNORED_ON_RESUME = frozenset({"quorum", "retries", "round-seconds", "start-seconds", "run-dir"})
"""Settings that decide no result: a run may go on with others."""


def run_server(deployment: DeploymentConfig, exchange: FlowerExchange) -> None:
    """Train over a network to the end of the plan, from where the run in its folder stands."""
    torch.set_num_threads(deployment.threads)
    begun = RunState(initial_server(deployment.algorithm, deployment.objective, deployment.seed, deployment.dtype, deployment.device))
    if deployment.run_dir is None:
        log("run-dir is not set: nothing is kept, and a run that is cut off begins again")
        for _ in measured_rounds(deployment, exchange, Population(deployment.clients, exchange.wait_for_clients()), begun):
            pass
        return
    folder, config = deployment.run_dir, nest({name: value for name, value in deployment.settings.items() if name not in IGNORED_ON_RESUME})
    folder.mkdir(parents=True, exist_ok=True)
    with run_directory.lock(folder):
        done, damaged = load_history(folder, begun, config, deployment.rounds)
        for text in damaged:
            log(f"passed over checkpoint {text}; an older one is used")
        if done.state.num_rounds_done:
            log(f"{done.state.num_rounds_done} of {deployment.rounds} rounds are done; resuming")
        if done.state.num_rounds_done == deployment.rounds and (folder / run_directory.RESULT).exists():
            log("nothing is left to do")
            return
        population = Population(deployment.clients, exchange.wait_for_clients())
        with run_directory.report_write_errors(folder):
            run_directory.atomic_write(folder / run_directory.CONFIG, run_directory.to_toml(nest(deployment.settings)).encode())
            about = {"layout": layout_info(deployment.objective.layout), "clients": {"count": deployment.clients}}
            run_directory.atomic_write(folder / run_directory.RUN_INFO, json.dumps(about).encode())
            with RunLog(folder, config, CheckpointInterval(seconds=0.0), done) as journal:
                for step in measured_rounds(deployment, exchange, population, done.state):
                    journal.add_round(step)
            theta = deployment.algorithm.parameters(journal.server)
            run_directory.atomic_write(
                folder / run_directory.MODEL, to_safetensors(model_of(deployment, theta, exchange.directory.example_shape))
            )
            run_directory.atomic_write(
                folder / run_directory.RESULT, json.dumps(summarize_run(deployment, journal.metrics_rows, theta), indent=1).encode()
            )


def measured_rounds(
    deployment: DeploymentConfig, exchange: FlowerExchange, population: Population, state: RunState
) -> Iterator[MeasuredRound]:
    """The rounds that are left, measured and told."""
    began, up, down = time.monotonic() - state.seconds, exchange.flower_overhead_up, exchange.flower_overhead_down
    for done in train(
        deployment.algorithm,
        state.server,
        population,
        deployment.participation,
        exchange,
        deployment.rounds,
        deployment.seed,
        dtype=deployment.dtype,
        device=deployment.device,
        first_round=state.num_rounds_done,
        start_from_seed=deployment.start_from_seed,
        limits=deployment.reply_limits,
    ):
        if len(done.replied) < (needed := deployment.min_replies(len(done.cohort))):
            raise QuorumError(
                f"round {done.round + 1}: {len(done.replied)} replies passed the screen, {needed} are needed{rejections(done)}"
            )
        theta = deployment.algorithm.parameters(done.server)
        row: dict[str, Any] = {"round": done.round + 1, **evaluate_model(deployment, theta)}
        row |= {name: float(value) for name, value in deployment.algorithm.diagnostics(done.server).items()}
        row |= {
            **traffic_columns(done.uplink, done.downlink),
            "flower_overhead_up": exchange.flower_overhead_up - up,
            "flower_overhead_down": exchange.flower_overhead_down - down,
        }
        row |= {"cohort": done.cohort, "replied": done.replied, "rejected": done.rejected, "seconds": time.monotonic() - began}
        up, down = exchange.flower_overhead_up, exchange.flower_overhead_down
        log_round(deployment, done)
        yield MeasuredRound(done, theta, row, compute_gate_histogram(deployment.algorithm, done.server))


def evaluate_model(deployment: DeploymentConfig, parameters: Tensor) -> dict[str, float]:
    """What the app's own measure says, as plain numbers."""
    return {} if deployment.evaluate is None else {name: float(value) for name, value in deployment.evaluate(parameters).items()}


def log_round(deployment: DeploymentConfig, round_result: RoundResult) -> None:
    """Log one line for a round."""
    replied = f"{len(round_result.replied)} of {len(round_result.cohort)} clients replied"
    log(f"round {round_result.round + 1} of {deployment.rounds}: {replied}{rejections(round_result)}")


def rejections(round_result: RoundResult) -> str:
    """Whose reply is missing or was refused, and why."""
    return "".join(f"; client {client}: {reason}" for client, reason in round_result.rejected)


def log(text: str) -> None:
    """To the server's log, at once."""
    print(f"fedsieve: {text}", flush=True)


def summarize_run(deployment: DeploymentConfig, rows: list[dict[str, Any]], parameters: Tensor) -> dict[str, Any]:
    """The result by the names of `--json`."""
    gated = parameters[: deployment.objective.layout.num_gated]
    nonzero = int((gated != 0).sum())
    totals = {name: sum(row[name] for row in rows) for name in rows[-1] if name.startswith(("bytes_", "flower_overhead_"))}
    clients = sorted(client for row in rows for client, _ in row["rejected"])
    return {
        "algorithm": deployment.algorithm_name,
        "seed": deployment.seed,
        "rounds": len(rows),
        "size": gated.numel(),
        "nonzero": nonzero,
        "density": nonzero / gated.numel(),
        **evaluate_model(deployment, parameters),
        **totals,
        "rejected": {str(client): clients.count(client) for client in dict.fromkeys(clients)},
        "seconds": rows[-1]["seconds"],
    }


def model_of(plan: DeploymentConfig, theta: Tensor, row: tuple[int, ...]) -> SparseModel:
    """The model as every run leaves it: weights that are not zero, their places and their meaning."""
    objective, flat = plan.objective, theta.float().numpy(force=True)
    if isinstance(objective, Linear):
        loss, build = objective.loss, None
    else:
        maker = objective.factory or type(objective.module)
        loss, build = LOSS_BY_FUNCTION.get(objective.loss, Loss.SQUARED), f"{maker.__module__}:{maker.__qualname__}"
    outputs = objective.predict(theta, torch.zeros(1, *row, dtype=theta.dtype)).shape[-1]
    classes = None if loss is Loss.SQUARED else tuple(map(str, range(2 if loss is Loss.LOGISTIC else outputs)))
    return SparseModel(
        indices=np.flatnonzero(flat).astype(np.int32),
        values=flat[np.flatnonzero(flat)],
        tensor_shapes={name: tuple(shape) for name, (_, shape) in objective.slices.items()},
        num_ungated=objective.layout.num_ungated,
        metadata=ModelMetadata(task="file", algorithm=plan.algorithm_name, loss=loss, input_shape=row, classes=classes, factory=build),
    )


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flower's flat names as a settings file has them: what is before a dot is a section."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *section, last = name.rsplit(".", 1)
        (tree.setdefault(section[0], {}) if section else tree)[last] = value
    return tree
