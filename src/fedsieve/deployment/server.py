"""The server of a deployment: wait for the clients, train, log and store the rounds, resume an interrupted run."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedsieve.deployment.deployment_config import DeploymentConfig
from fedsieve.deployment.flower import FlowerExchange, QuorumError
from fedsieve.experiments.run_info import layout_info
from fedsieve.formatting import escape_controls
from fedsieve.models.build import build_model
from fedsieve.models.card import model_card
from fedsieve.models.sparse_model import SparseModel, to_safetensors
from fedsieve.runtime.buffers import append_buffers, buffer_state
from fedsieve.runtime.evaluation import MeasuredRound, RunState, measure_rounds, summarize
from fedsieve.runtime.rounds import Population, RoundResult, initial_server, train
from fedsieve.storage import run_directory
from fedsieve.storage.run_log import CheckpointInterval, RunLog, load_history

IGNORED_ON_RESUME = frozenset({"quorum", "retries", "round-seconds", "grace-seconds", "start-seconds", "run-dir"})
"""Settings that change no result, and may differ when a run is resumed."""


def run_server(deployment: DeploymentConfig, exchange: FlowerExchange) -> None:
    """Train until all rounds are done, and resume the run in `run_dir` if there is one."""
    torch.set_num_threads(1)
    initial = RunState(initial_server(deployment.algorithm, deployment.objective, deployment.seed, deployment.dtype, deployment.device))
    if deployment.run_dir is None:
        log("run-dir is not set: nothing is stored, and an interrupted run cannot be resumed")
        for _ in measured_rounds(deployment, exchange, Population(deployment.clients, exchange.wait_for_clients()), initial):
            pass
        return
    folder = deployment.run_dir
    config = nest({name: value for name, value in deployment.settings.items() if name not in IGNORED_ON_RESUME})
    folder.mkdir(parents=True, exist_ok=True)
    with run_directory.lock(folder):
        history, damaged = load_history(folder, initial, config, deployment.rounds)
        for text in damaged:
            log(f"skipped checkpoint {text}; an older one is used")
        if history.state.num_rounds_done:
            log(f"{history.state.num_rounds_done} of {deployment.rounds} rounds are done; resuming")
        if history.state.num_rounds_done == deployment.rounds and (folder / run_directory.RESULT).exists():
            log("the run is finished")
            return
        population = Population(deployment.clients, exchange.wait_for_clients())
        with run_directory.report_write_errors(folder):
            run_directory.atomic_write(folder / run_directory.CONFIG, run_directory.to_toml(nest(deployment.settings)).encode())
            run_info = {"layout": layout_info(deployment.objective.layout), "clients": {"count": deployment.clients}}
            run_directory.atomic_write(folder / run_directory.RUN_INFO, json.dumps(run_info).encode())
            with RunLog(folder, config, CheckpointInterval(seconds=0.0), history) as run_log:
                for measured in measured_rounds(deployment, exchange, population, history.state):
                    run_log.add_round(measured)
            parameters = append_buffers(deployment.algorithm.parameters(run_log.server), run_log.buffers)
            model = deployed_model(deployment, parameters, exchange.directory.example_shape)
            metrics = evaluate_model(deployment, parameters)
            result = summarize_run(deployment, run_log.metrics_rows, parameters, metrics)
            run_directory.atomic_write(folder / run_directory.MODEL, to_safetensors(model))
            run_directory.atomic_write(folder / run_directory.MODEL_CARD, model_card(model, result, metrics).encode())
            run_directory.atomic_write(folder / run_directory.RESULT, json.dumps(result, indent=1).encode())


def measured_rounds(
    deployment: DeploymentConfig, exchange: FlowerExchange, population: Population, state: RunState
) -> Iterator[MeasuredRound]:
    """Yield the remaining rounds with their measurements and log each."""
    overhead = {"flower_overhead_up": exchange.flower_overhead_up, "flower_overhead_down": exchange.flower_overhead_down}

    def overhead_columns(_: RoundResult) -> dict[str, int]:
        before = dict(overhead)
        overhead.update(flower_overhead_up=exchange.flower_overhead_up, flower_overhead_down=exchange.flower_overhead_down)
        return {name: overhead[name] - before[name] for name in overhead}

    rounds = train(
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
        memories=state.memories,
        start_from_seed=deployment.start_from_seed,
        limits=deployment.reply_limits,
        buffers=buffer_state(deployment.objective, deployment.seed, state.buffers),
    )
    for measured in measure_rounds(
        deployment.algorithm,
        check_quorum(deployment, rounds),
        lambda parameters: evaluate_model(deployment, parameters),
        extra_columns=overhead_columns,
        seconds_before=state.seconds,
    ):
        log_round(deployment, measured.result)
        yield measured


def check_quorum(deployment: DeploymentConfig, rounds: Iterator[RoundResult]) -> Iterator[RoundResult]:
    """Yield the rounds; raise QuorumError if too few replies of a round were accepted."""
    for result in rounds:
        if len(result.replied) < (needed := deployment.min_replies(len(result.cohort))):
            raise QuorumError(f"round {result.round + 1}: {len(result.replied)} replies are valid, {needed} are needed{rejections(result)}")
        yield result


def evaluate_model(deployment: DeploymentConfig, parameters: Tensor) -> dict[str, float]:
    """Return the metrics of the app's `evaluate`, empty if it has none."""
    return {} if deployment.evaluate is None else {name: float(value) for name, value in deployment.evaluate(parameters).items()}


def log_round(deployment: DeploymentConfig, round_result: RoundResult) -> None:
    """Log one line for a round."""
    replied = f"{len(round_result.replied)} of {len(round_result.cohort)} clients replied"
    log(f"round {round_result.round + 1} of {deployment.rounds}: {replied}{rejections(round_result)}")


def rejections(round_result: RoundResult) -> str:
    """Describe the clients whose reply is missing or rejected."""
    return "".join(f"; client {client}: {reason}" for client, reason in round_result.rejected)


def log(text: str) -> None:
    """Write a line to the server's log."""
    print(f"fedsieve: {escape_controls(text)}", flush=True)


def summarize_run(
    deployment: DeploymentConfig, rows: list[dict[str, Any]], parameters: Tensor, metrics: dict[str, float]
) -> dict[str, Any]:
    """Return the result of the deployment by the names of `--json`."""
    clients = sorted(client for row in rows for client, _ in row["rejected"])
    return {
        "algorithm": deployment.algorithm_name,
        "seed": deployment.seed,
        **summarize(rows, parameters, deployment.objective.layout.num_gated),
        **metrics,
        "rejected_by_client": {str(client): clients.count(client) for client in dict.fromkeys(clients)},
    }


def deployed_model(deployment: DeploymentConfig, parameters: Tensor, example_shape: tuple[int, ...]) -> SparseModel:
    """Return the trained model with its metadata."""
    return build_model(
        deployment.objective,
        parameters,
        torch.zeros(1, *example_shape, dtype=parameters.dtype),
        task="file",
        algorithm=deployment.algorithm_name,
    )


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return Flower's dotted names as nested tables, as in config.toml."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *section, last = name.rsplit(".", 1)
        (tree.setdefault(section[0], {}) if section else tree)[last] = value
    return tree
