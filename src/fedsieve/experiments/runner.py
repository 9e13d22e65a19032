"""Train a run in its directory: start and resume it. An interrupted run resumes to the same bits."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from fedsieve import __version__
from fedsieve.algorithms.gated import GatedAlgorithm
from fedsieve.core.random import derive_key
from fedsieve.experiments.config_io import load_run
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.experiments.run_info import describe_run
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.summary import summarize
from fedsieve.experiments.topology import TREE
from fedsieve.experiments.trackers import Tracker, open_tracker
from fedsieve.formatting import ProgressBar, escape_controls, format_number
from fedsieve.models.card import model_card
from fedsieve.models.initial_weights import load_initial_weights
from fedsieve.models.sparse_model import to_safetensors
from fedsieve.runtime.buffers import append_buffers, buffer_state
from fedsieve.runtime.client_memory import describe_memory, memory_bytes, physical_memory
from fedsieve.runtime.cluster import ClusterExchange
from fedsieve.runtime.evaluation import MeasuredRound, RunState, measure_rounds
from fedsieve.runtime.failures import FaultyExchange
from fedsieve.runtime.hierarchy import Hierarchy
from fedsieve.runtime.privacy import epsilon_by_round, new_secret, read_secret
from fedsieve.runtime.ranks import ClusterError, Ranks, RunEnded
from fedsieve.runtime.refit import Refit
from fedsieve.runtime.rounds import RoundResult, initial_server, train
from fedsieve.storage import checkpoint, run_directory
from fedsieve.storage.run_log import CheckpointInterval, RunHistory, RunLog, load_history

LARGE_MEMORY_FRACTION = 0.1
"""Above this fraction of the machine's memory, the size of what clients keep is printed before the first round."""
NODE_EVALUATIONS = 20
"""How often the metrics of single nodes are measured in a run without a server: each time costs an evaluation per node."""
MUST_MATCH = ("metric", "layout", "truth", "clients", "topology")
"""Entries of run_info.json that must not change when a run resumes: they describe the data and the model."""


def initial_state(run: ResolvedRun, simulation: Simulation) -> RunState:
    """Return the state before the first round, drawn from the seed or from `run.init_weights`."""
    weights = buffers = None
    if run.init_weights is not None:
        values = load_initial_weights(run.init_weights, run.objective)
        weights = simulation.to_standardized(values[: run.objective.layout.size]).to(device=run.device, dtype=run.dtype)
        buffers = values[run.objective.layout.size :]
    return RunState(initial_server(run.algorithm, run.objective, run.seed, run.dtype, run.device, weights), buffers=buffers)


def run_rounds(
    run: ResolvedRun, simulation: Simulation | None = None, state: RunState | None = None, secret: bytes | None = None
) -> Iterator[MeasuredRound]:
    """Train from `state` to the last round and yield every round with its measurements.

    Noise and cohorts of a private run follow from `secret` (default: a new one, which nobody can repeat).
    """
    torch.set_num_threads(1)
    simulation = simulation or Simulation(run)
    simulation.validate()
    state = state or initial_state(run, simulation)
    if run.topology.is_gossip:
        return run_gossip(run, simulation, state)
    engine = simulation.make_exchange(simulation.client_data, run.seed)
    exchange = simulation.divide_among_ranks(engine)
    if run.topology.name == TREE:
        exchange = Hierarchy(exchange=exchange, num_clients=run.federation.clients, levels=run.topology.levels)
    server_exchange = None
    if run.federation.server_examples:
        server_exchange = simulation.make_exchange(simulation.server_data, derive_key(run.seed, "tune"))
    faulty_exchange = None
    if run.failures.is_active:
        faulty_exchange = FaultyExchange(
            exchange=exchange,
            resolve_seed=engine.context.resolve_seed,
            failures=run.failures,
            clients_with_data=simulation.population.clients_with_data,
            seed=run.seed,
        )
    rounds = train(
        run.trained_algorithm,
        state.server,
        simulation.population,
        1.0 if run.centralized else run.federation.participation,
        faulty_exchange or exchange,
        run.rounds,
        run.seed,
        dtype=run.dtype,
        device=run.device,
        first_round=state.num_rounds_done,
        memories=state.memories,
        server_exchange=server_exchange,
        start_from_seed=run.init_weights is None,
        limits=simulation.reply_limits,
        secret=None if run.algorithm.privacy is None else secret or new_secret(),
        buffers=buffer_state(run.objective, run.seed, state.buffers),
    )
    if run.refit:
        refit = Refit(
            exchange=engine,
            clients=simulation.population.clients_with_data,
            num_rounds=run.rounds,
            limits=simulation.reply_limits,
            add_failures=lambda inner: inner if faulty_exchange is None else replace(faulty_exchange, exchange=inner),
        )
        rounds = refit.apply(rounds)
    epsilons = iterate_epsilon(run, simulation, state.num_rounds_done)
    return measure_rounds(
        run.algorithm,
        count_standardization(rounds, simulation),
        lambda parameters: simulation.evaluate(parameters) | simulation.support_recovery(parameters),
        dense_metric=run.metric,
        extra_columns=lambda result: link_columns(result) | ({} if epsilons is None else {"epsilon": next(epsilons)}),
        has_malicious_clients=run.failures.malicious_fraction > 0,
        seconds_before=state.seconds,
    )


def run_gossip(run: ResolvedRun, simulation: Simulation, state: RunState) -> Iterator[MeasuredRound]:
    """Train without a server. Some rounds, the last one included, also have the metrics of single nodes."""
    gossip, interval = simulation.make_gossip(), max(1, run.rounds // NODE_EVALUATIONS)

    def columns(result: RoundResult) -> dict[str, float]:
        is_measured = (result.round + 1) % interval == 0 or result.round + 1 == run.rounds
        return {**result.columns, **(simulation.evaluate_nodes(gossip, result) if is_measured else {})}

    return measure_rounds(
        run.algorithm,
        count_standardization(gossip.train(state.server, run.rounds, state.num_rounds_done, state.memories), simulation),
        lambda parameters: simulation.evaluate(parameters) | simulation.support_recovery(parameters),
        extra_columns=columns,
        seconds_before=state.seconds,
    )


def follow_run(run: ResolvedRun, ranks: Ranks) -> None:
    """Train the clients or nodes of a rank other than 0 until rank 0 ends the run."""
    torch.set_num_threads(1)
    simulation = Simulation(run, ranks)
    simulation.validate()
    try:
        compare_with_ranks(run, simulation)
        if run.topology.is_gossip:
            for _ in simulation.make_gossip().train(initial_state(run, simulation).server, run.rounds, 0, {}):
                raise AssertionError("only rank 0 has rounds")
            ranks.wait_for_end()
        else:
            engine = simulation.make_exchange(simulation.client_data, run.seed)
            ClusterExchange(context=engine.context, data=engine.data, ranks=ranks).serve()
    except RunEnded:
        return


def compare_with_ranks(run: ResolvedRun, simulation: Simulation) -> None:
    """Raise ClusterError at rank 0 if another rank has other settings, data or software."""
    if (ranks := simulation.ranks) is None:
        return
    about = describe_run(run, simulation)
    found = {"settings": run.settings_dict, **{name: about[name] for name in MUST_MATCH}, "version of fedsieve": __version__}
    own = {name: torch.tensor(list(blake2b(json.dumps(value).encode()).digest())) for name, value in found.items()}
    if ranks.number:
        ranks.answer(own)
        return
    for rank in ranks.others:
        theirs = ranks.receive(rank)
        if other := [name for name in own if not torch.equal(theirs.get(name, torch.zeros(0)), own[name])]:
            raise ClusterError(f"rank {rank} has other {', '.join(other)} than rank 0; give all ranks the same options and files")


def link_columns(result: RoundResult) -> dict[str, Any]:
    """Return the bytes of each link between aggregators ("level.number"), and the sum of each level; nothing without aggregators."""
    by_level: dict[str, int] = {}
    for name, size in result.links.items():
        column = f"level_{name.partition('.')[0]}_bytes"
        by_level[column] = by_level.get(column, 0) + size
    return {**by_level, "link_bytes": dict(result.links)} if result.links else {}


def count_standardization(rounds: Iterator[RoundResult], simulation: Simulation) -> Iterator[RoundResult]:
    """Yield the rounds; the first includes the traffic of the federated standardization."""
    for result in rounds:
        if result.round == 0:
            traffic = simulation.standardization_traffic
            result = result._replace(uplink=result.uplink + traffic, downlink=result.downlink + traffic)
        yield result


def iterate_epsilon(run: ResolvedRun, simulation: Simulation, first_round: int) -> Iterator[float] | None:
    """Return the privacy loss after each round, or None for a run without differential privacy."""
    if not run.privacy.noise_multiplier:
        return None
    assert run.algorithm.privacy is not None
    assert run.privacy.delta is not None, "`resolve` sets it"
    num_clients = len(simulation.population.clients_with_data)
    cohort = min(run.algorithm.privacy.cohort_size, num_clients)
    return epsilon_by_round(
        run.privacy.noise_multiplier, run.privacy.delta, num_clients, cohort, run.algorithm.workload.exchanges, first_round
    )


def start_run(
    run: ResolvedRun,
    simulation: Simulation,
    folder: Path,
    checkpoint_interval: CheckpointInterval | None = None,
    *,
    quiet: bool,
    tracker: Tracker | None = None,
    secret_file: Path | None = None,
) -> dict[str, Any]:
    """Execute a run from its first round and store it in its folder."""
    with run_directory.lock(folder):
        if run.algorithm.privacy is not None and secret_file is None:
            with run_directory.report_write_errors(folder):
                run_directory.atomic_write(folder / run_directory.SECRET, new_secret(), mode=0o600)
        write_settings(folder, run, describe_run(run, simulation))
        if not quiet:
            print_notes(run, simulation)
        return continue_run(
            run,
            simulation,
            folder,
            RunHistory(initial_state(run, simulation), [], [], []),
            checkpoint_interval or CheckpointInterval(),
            load_secret(run, folder, secret_file),
            quiet=quiet,
            tracker=tracker,
        )


def load_secret(run: ResolvedRun, folder: Path, secret_file: Path | None) -> bytes | None:
    """Return the server's secret of a private run, from the file that the user names or from the run directory."""
    return None if run.algorithm.privacy is None else read_secret(secret_file or folder / run_directory.SECRET)


def print_notes(run: ResolvedRun, simulation: Simulation) -> None:
    """Print what a reader of the result must know about the algorithm."""
    known = (run.algorithm, run.objective.layout, simulation.num_remembering_clients, run.dtype)
    if memory_bytes(*known) > LARGE_MEMORY_FRACTION * physical_memory():
        print(f"note: {describe_memory(*known)}; checkpoints are as large", file=sys.stderr)
    if not isinstance(run.algorithm, GatedAlgorithm):
        return
    if run.algorithm.formula_note is not None:
        print(f"note: {run.algorithm.formula_note}", file=sys.stderr)
    if run.algorithm.all_gates_start_closed():
        print(
            f"note: algorithm.initial-gate-probability {run.algorithm.initial_gate_probability:g} starts every test-time gate at 0; "
            f"from about 0.17 they start open",
            file=sys.stderr,
        )


def finished_result(run: ResolvedRun, folder: Path) -> dict[str, Any] | None:
    """Return the result of a finished run, or None if rounds are missing. Raise ValueError if its settings differ from the stored ones."""
    before = load_run(folder, trust=run.model)
    checkpoint.check_settings(before.settings_dict, run.settings_dict)
    if run.rounds < before.rounds:
        raise ValueError(f"rounds can only be raised: the run in {folder} has {before.rounds}; got --rounds {run.rounds}")
    result = folder / run_directory.RESULT
    return json.loads(result.read_text()) if result.exists() and run.rounds == before.rounds else None


def resume_run(
    run: ResolvedRun,
    folder: Path,
    checkpoint_interval: CheckpointInterval | None = None,
    *,
    quiet: bool,
    tracker: Tracker | None = None,
    secret_file: Path | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Resume a run from its last valid checkpoint. If it has more rounds than before, its schedules follow the new number from here."""
    with run_directory.lock(folder):
        secret = load_secret(run, folder, secret_file)
        simulation = Simulation(run, ranks)
        simulation.validate()
        compare_with_ranks(run, simulation)
        done, damaged = load_history(folder, initial_state(run, simulation), run.settings_dict, run.rounds)
        for text in damaged:
            print(escape_controls(f"note: skipped checkpoint {text}; an older one is used"), file=sys.stderr)
        about = describe_run(run, simulation)
        if not check_same_data(folder, about) or run.rounds > load_run(folder, trust=run.model).rounds:
            write_settings(folder, run, about)
        if not quiet:
            print(f"{folder}: {done.state.num_rounds_done} of {run.rounds} rounds are done, resuming", file=sys.stderr)
        interval = checkpoint_interval or CheckpointInterval()
        return continue_run(run, simulation, folder, done, interval, secret, quiet=quiet, tracker=tracker)


def start_or_resume(run: ResolvedRun, simulation: Simulation, folder: Path, *, quiet: bool, tracker: Tracker | None = None) -> None:
    """Start a run, or resume it if its folder holds a part of it; do nothing if it is finished."""
    if not (folder / run_directory.CONFIG).exists():
        folder.mkdir(exist_ok=True)
        start_run(run, simulation, folder, quiet=quiet, tracker=tracker)
    elif finished_result(run, folder) is None:
        resume_run(run, folder, quiet=quiet, tracker=tracker)


def continue_run(
    run: ResolvedRun,
    simulation: Simulation,
    folder: Path,
    history: RunHistory,
    checkpoint_interval: CheckpointInterval,
    secret: bytes | None,
    *,
    quiet: bool,
    tracker: Tracker | None,
) -> dict[str, Any]:
    """Train the remaining rounds, store them, and write model and result."""
    bar = ProgressBar(run.rounds, run.algorithm_name, "round", quiet=quiet, num_done=history.state.num_rounds_done)
    with run_directory.report_write_errors(folder):
        with (
            open_tracker(tracker, folder, run.settings_dict) as log,
            RunLog(folder, run.settings_dict, checkpoint_interval, history) as journal,
            bar,
        ):
            for step in run_rounds(run, simulation, history.state, secret):
                journal.add_round(step)
                log(step.metrics)
                bar.advance(f"{run.metric} {format_number(step.metrics[run.metric])}")
        theta = append_buffers(run.algorithm.parameters(journal.server), journal.buffers)
        model = simulation.build_model(theta)
        result = {**summarize(run, simulation, journal.metrics_rows, journal.server, journal.buffers), "run": str(folder)}
        card = model_card(model, result, {run.metric: result["value"]})
        run_directory.atomic_write(folder / run_directory.MODEL, to_safetensors(model))
        run_directory.atomic_write(folder / run_directory.MODEL_CARD, card.encode())
        run_directory.atomic_write(folder / run_directory.RESULT, json.dumps(result, indent=1).encode())
    return result


def write_settings(folder: Path, run: ResolvedRun, run_info: dict[str, Any]) -> None:
    """Write config.toml and run_info.json, and remove the result of fewer rounds."""
    with run_directory.report_write_errors(folder):
        (folder / run_directory.RESULT).unlink(missing_ok=True)
        run_directory.atomic_write(folder / run_directory.CONFIG, run_directory.to_toml(run.settings_dict).encode())
        run_directory.atomic_write(folder / run_directory.RUN_INFO, json.dumps(run_info).encode())


def check_same_data(folder: Path, run_info: dict[str, Any]) -> bool:
    """Return whether run_info.json exists. Raise if data or model differ; print a note about other software versions."""
    try:
        before = json.loads((folder / run_directory.RUN_INFO).read_text())
    except FileNotFoundError:  # the run was interrupted before it was written
        return False
    except ValueError:
        raise run_directory.RunDirectoryError(
            f"{folder / run_directory.RUN_INFO} is damaged; remove it to go on without its account of the data"
        ) from None
    now = json.loads(json.dumps(run_info))
    if other := [name for name in MUST_MATCH if before.get(name) != now[name]]:
        raise checkpoint.SettingsChangedError(
            f"the data or the model are not those the run in {folder} began with: its {', '.join(other)} differ; "
            f"restore them, or start another run"
        )
    then, here = before.get("environment", {}), now["environment"]
    if moved := [f"{name} {then.get(name)}, now {here[name]}" for name in here if then.get(name) != here[name]]:
        print(escape_controls(f"note: the run began with {'; '.join(moved)}: the last bits may differ"), file=sys.stderr)
    return True
