"""A run in its folder: begun, gone on with, finished. Whenever it breaks off, what is there suffices to go on to the same bits."""

import json
import sys
from pathlib import Path
from typing import Any

from fedsieve.experiments.config import Run
from fedsieve.experiments.config_io import restore
from fedsieve.experiments.run_info import describe
from fedsieve.experiments.simulation import Problem
from fedsieve.experiments.trackers import Tracker, tracking
from fedsieve.experiments.training import execute, opening, summary
from fedsieve.formatting import Counted, number
from fedsieve.models.build import model_of
from fedsieve.models.sparse_model import pack
from fedsieve.storage import checkpoint, run_directory
from fedsieve.storage.run_log import Journal, Pace, Past, past

FIXED = ("metric", "layout", "truth", "clients")
"""What of run.json must be the same when a run goes on: the data and the model are those it began with."""


def begin(
    run: Run, problem: Problem, folder: Path, pace: Pace | None = None, *, quiet: bool, track: Tracker | None = None
) -> dict[str, Any]:
    """Execute a run from its first round and leave everything in its folder."""
    with run_directory.held(folder):
        write_settings(folder, run, describe(run, problem))
        if getattr(run.algorithm, "starts_closed", bool)() and not quiet:
            print(
                f"note: algorithm.initial-logit-density {run.algorithm.initial_logit_density:g} starts every test-time gate at 0; "
                f"from about 0.17 they start open",
                file=sys.stderr,
            )
        return go_on(run, problem, folder, Past(opening(run, problem), [], [], []), pace or Pace(), quiet=quiet, track=track)


def finished(run: Run, folder: Path) -> dict[str, Any] | None:
    """The result of a run that came to its end; None where rounds are missing. Refused where its settings are not those of the folder."""
    before = restore(folder)
    checkpoint.refuse_changes(before.config, run.config)
    if run.rounds < before.rounds:
        raise ValueError(f"rounds can only be raised: the run in {folder} has {before.rounds}; got --rounds {run.rounds}")
    result = folder / run_directory.RESULT
    return json.loads(result.read_text()) if result.exists() and run.rounds == before.rounds else None


def resume(run: Run, folder: Path, pace: Pace | None = None, *, quiet: bool, track: Tracker | None = None) -> dict[str, Any]:
    """Go on with a run from its newest whole checkpoint; with more rounds than it had, its schedules follow the new number from here."""
    with run_directory.held(folder):
        problem = Problem(run)
        problem.check()
        done, damaged = past(folder, opening(run, problem), run.config, run.rounds)
        for text in damaged:
            print(f"note: passed over checkpoint {text}; an older one is used", file=sys.stderr)
        about = describe(run, problem)
        if not same_problem(folder, about) or run.rounds > restore(folder).rounds:
            write_settings(folder, run, about)
        if not quiet:
            print(f"{folder}: {done.standing.rounds} of {run.rounds} rounds are done, going on", file=sys.stderr)
        return go_on(run, problem, folder, done, pace or Pace(), quiet=quiet, track=track)


def take_up(run: Run, problem: Problem, folder: Path, *, quiet: bool, track: Tracker | None = None) -> None:
    """Begin a run, go on with what its folder holds, or leave it as it is where it is finished."""
    if not (folder / run_directory.CONFIG).exists():
        folder.mkdir(exist_ok=True)
        begin(run, problem, folder, quiet=quiet, track=track)
    elif finished(run, folder) is None:
        resume(run, folder, quiet=quiet, track=track)


def go_on(run: Run, problem: Problem, folder: Path, done: Past, pace: Pace, *, quiet: bool, track: Tracker | None) -> dict[str, Any]:
    """Train from where the run stands to its end."""
    bar = Counted(run.rounds, run.method, "round", quiet=quiet, finished=done.standing.rounds)
    with run_directory.writing(folder):
        with tracking(track, folder, run.config) as log, Journal(folder, run.config, pace, done) as journal, bar:
            for step in execute(run, problem, done.standing):
                journal.add(step)
                log(step.row)
                bar.advance(f"{run.metric} {number(step.row[run.metric])}")
        theta = run.algorithm.theta(journal.server)
        run_directory.replace(folder / run_directory.MODEL, pack(model_of(run, problem, theta)))
        result = {**summary(run, problem, journal.rows, theta), "run": str(folder)}
        run_directory.replace(folder / run_directory.RESULT, json.dumps(result, indent=1).encode())
    return result


def write_settings(folder: Path, run: Run, about: dict[str, Any]) -> None:
    """What reproduces and what explains the run; a result of fewer rounds is no longer its result."""
    with run_directory.writing(folder):
        (folder / run_directory.RESULT).unlink(missing_ok=True)
        run_directory.replace(folder / run_directory.CONFIG, run_directory.toml(run.config).encode())
        run_directory.replace(folder / run_directory.ABOUT, json.dumps(about).encode())


def same_problem(folder: Path, about: dict[str, Any]) -> bool:
    """Whether run.json is there; it must speak of the same data and model. Other versions of what computes are worth a note."""
    try:
        before = json.loads((folder / run_directory.ABOUT).read_text())
    except FileNotFoundError:  # the run broke off before it
        return False
    except ValueError:
        raise run_directory.FolderError(
            f"{folder / run_directory.ABOUT} is damaged; remove it to go on without its account of the data"
        ) from None
    now = json.loads(json.dumps(about))
    if other := [name for name in FIXED if before.get(name) != now[name]]:
        raise checkpoint.ChangedError(
            f"the data or the model are not those the run in {folder} began with: its {', '.join(other)} differ; "
            f"restore them, or start another run"
        )
    then, here = before.get("environment", {}), now["environment"]
    if moved := [f"{name} {then.get(name)}, now {here[name]}" for name in here if then.get(name) != here[name]]:
        print(f"note: the run began with {'; '.join(moved)}: the last bits may differ", file=sys.stderr)
    return True
