"""A run in its folder: begun, gone on with, finished. Whenever it breaks off, what is there suffices to go on to the same bits."""

import json
import sys
from pathlib import Path
from typing import Any

from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.config_io import load_config
from fedsieve.experiments.run_info import describe_run
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.trackers import Tracker, open_tracker
from fedsieve.experiments.training import initial_state, run_rounds, summarize
from fedsieve.formatting import ProgressBar, format_number
from fedsieve.models.build import model_of
from fedsieve.models.sparse_model import to_safetensors
from fedsieve.storage import checkpoint, run_directory
from fedsieve.storage.run_log import CheckpointInterval, RunHistory, RunLog, load_history

MUST_MATCH = ("metric", "layout", "truth", "clients")
"""What of run_info.json must be the same when a run goes on: the data and the model are those it began with."""


def start_run(
    run: RunConfig,
    problem: Simulation,
    folder: Path,
    checkpoint_interval: CheckpointInterval | None = None,
    *,
    quiet: bool,
    tracker: Tracker | None = None,
) -> dict[str, Any]:
    """Execute a run from its first round and leave everything in its folder."""
    with run_directory.lock(folder):
        write_settings(folder, run, describe_run(run, problem))
        if getattr(run.algorithm, "all_gates_start_closed", bool)() and not quiet:
            print(
                f"note: algorithm.initial-gate-probability {run.algorithm.initial_gate_probability:g} starts every test-time gate at 0; "
                f"from about 0.17 they start open",
                file=sys.stderr,
            )
        return continue_run(
            run,
            problem,
            folder,
            RunHistory(initial_state(run, problem), [], [], []),
            checkpoint_interval or CheckpointInterval(),
            quiet=quiet,
            tracker=tracker,
        )


def finished_result(run: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The result of a run that came to its end; None where rounds are missing. Refused where its settings are not those of the folder."""
    before = load_config(folder)
    checkpoint.check_settings(before.settings_dict, run.settings_dict)
    if run.rounds < before.rounds:
        raise ValueError(f"rounds can only be raised: the run in {folder} has {before.rounds}; got --rounds {run.rounds}")
    result = folder / run_directory.RESULT
    return json.loads(result.read_text()) if result.exists() and run.rounds == before.rounds else None


def resume_run(
    run: RunConfig, folder: Path, checkpoint_interval: CheckpointInterval | None = None, *, quiet: bool, tracker: Tracker | None = None
) -> dict[str, Any]:
    """Go on with a run from its newest whole checkpoint; with more rounds than it had, its schedules follow the new number from here."""
    with run_directory.lock(folder):
        problem = Simulation(run)
        problem.validate()
        done, damaged = load_history(folder, initial_state(run, problem), run.settings_dict, run.rounds)
        for text in damaged:
            print(f"note: passed over checkpoint {text}; an older one is used", file=sys.stderr)
        about = describe_run(run, problem)
        if not check_same_data(folder, about) or run.rounds > load_config(folder).rounds:
            write_settings(folder, run, about)
        if not quiet:
            print(f"{folder}: {done.state.num_rounds_done} of {run.rounds} rounds are done, going on", file=sys.stderr)
        return continue_run(run, problem, folder, done, checkpoint_interval or CheckpointInterval(), quiet=quiet, tracker=tracker)


def start_or_resume(run: RunConfig, problem: Simulation, folder: Path, *, quiet: bool, tracker: Tracker | None = None) -> None:
    """Begin a run, go on with what its folder holds, or leave it as it is where it is finished."""
    if not (folder / run_directory.CONFIG).exists():
        folder.mkdir(exist_ok=True)
        start_run(run, problem, folder, quiet=quiet, tracker=tracker)
    elif finished_result(run, folder) is None:
        resume_run(run, folder, quiet=quiet, tracker=tracker)


def continue_run(
    run: RunConfig,
    problem: Simulation,
    folder: Path,
    history: RunHistory,
    checkpoint_interval: CheckpointInterval,
    *,
    quiet: bool,
    tracker: Tracker | None,
) -> dict[str, Any]:
    """Train from where the run stands to its end."""
    bar = ProgressBar(run.rounds, run.algorithm_name, "round", quiet=quiet, num_done=history.state.num_rounds_done)
    with run_directory.report_write_errors(folder):
        with (
            open_tracker(tracker, folder, run.settings_dict) as log,
            RunLog(folder, run.settings_dict, checkpoint_interval, history) as journal,
            bar,
        ):
            for step in run_rounds(run, problem, history.state):
                journal.add_round(step)
                log(step.metrics)
                bar.advance(f"{run.metric} {format_number(step.metrics[run.metric])}")
        theta = run.algorithm.parameters(journal.server)
        run_directory.atomic_write(folder / run_directory.MODEL, to_safetensors(model_of(run, problem, theta)))
        result = {**summarize(run, problem, journal.metrics_rows, theta), "run": str(folder)}
        run_directory.atomic_write(folder / run_directory.RESULT, json.dumps(result, indent=1).encode())
    return result


def write_settings(folder: Path, run: RunConfig, run_info: dict[str, Any]) -> None:
    """What reproduces and what explains the run; a result of fewer rounds is no longer its result."""
    with run_directory.report_write_errors(folder):
        (folder / run_directory.RESULT).unlink(missing_ok=True)
        run_directory.atomic_write(folder / run_directory.CONFIG, run_directory.to_toml(run.settings_dict).encode())
        run_directory.atomic_write(folder / run_directory.RUN_INFO, json.dumps(run_info).encode())


def check_same_data(folder: Path, run_info: dict[str, Any]) -> bool:
    """Whether run_info.json is there; it must speak of the same data and model. Other versions of what computes are worth a note."""
    try:
        before = json.loads((folder / run_directory.RUN_INFO).read_text())
    except FileNotFoundError:  # the run broke off before it
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
        print(f"note: the run began with {'; '.join(moved)}: the last bits may differ", file=sys.stderr)
    return True
