"""Train a run in its directory: start and resume it. An interrupted run resumes to the same bits."""

import json
import sys
from pathlib import Path
from typing import Any

from fedsieve.algorithms.gated import GatedAlgorithm
from fedsieve.experiments.config_io import load_run
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.experiments.run_info import describe_run
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.summary import summarize
from fedsieve.experiments.trackers import Tracker, open_tracker
from fedsieve.experiments.training import MUST_MATCH, compare_with_ranks, initial_state, run_rounds
from fedsieve.formatting import ProgressBar, escape_controls, format_number
from fedsieve.models.card import model_card
from fedsieve.models.sparse_model import to_safetensors
from fedsieve.runtime.buffers import append_buffers
from fedsieve.runtime.client_memory import describe_memory, memory_bytes, physical_memory
from fedsieve.runtime.privacy import new_secret, read_secret
from fedsieve.runtime.ranks import Ranks
from fedsieve.storage import checkpoint, run_directory
from fedsieve.storage.run_log import CheckpointInterval, RunHistory, RunLog, load_history

LARGE_MEMORY_FRACTION = 0.1
"""Above this fraction of the machine's memory, the size of what clients keep is printed before the first round."""


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
    is_finished = (folder / run_directory.RESULT).exists() and run.rounds == before.rounds
    return run_directory.read_result(folder) if is_finished else None


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
