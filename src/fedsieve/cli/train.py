"""The command `fedsieve train`."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import require_recipes
from fedsieve.algorithms.recipes import Recipe
from fedsieve.cli.console import show_result
from fedsieve.cli.help import documented_command
from fedsieve.core.settings import build_settings, field_types, parse_settings
from fedsieve.experiments import runner, training
from fedsieve.experiments.cluster_rules import require_cluster
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.config_io import build_config, parse_names, section_classes, setting_types
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.tasks import TASKS, default_options, get_task
from fedsieve.experiments.trackers import Tracker, check_installed
from fedsieve.report.html.page import write_default_report
from fedsieve.runtime.privacy import read_secret
from fedsieve.runtime.ranks import ClusterError, Ranks
from fedsieve.storage import run_directory
from fedsieve.storage.run_log import CheckpointInterval
from fedsieve.studies.tuning import tune_run


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of the command, beside the settings of the run."""

    tune_trials: int | None = None
    """option sets to try on validation examples: defaults, two rates, schedule end, start density or k, bits, then others; the best wins"""
    config: Path | None = None
    """TOML file with any of these settings; options on the command line take precedence"""
    out: Path | None = None
    """directory of the run (default: runs/ID)"""
    resume: Path | None = None
    """directory of an interrupted run: it resumes to the same bits with its own settings; only --rounds may be raised"""
    secret_file: Path | None = None
    """file with the secret that the noise and the cohorts of a private run follow from (default: privacy.key in its directory, new)"""
    rank_timeout: float | None = None
    """on a cluster: seconds that a process waits for another before the run ends (default: 600)"""
    trust: bool = False
    """import and call a PACKAGE.MODULE:FACTORY that the file of --config or --resume names; --model on the command line needs no flag"""
    tracker: Tracker | None = None
    """also write every round to a tracker, on this machine unless its own settings name a server"""
    quiet: bool = False
    """print no progress and no table"""
    json: bool = False
    """print the result as one JSON object on the last line"""


def option_types(task: str, algorithm_type: type[BaseAlgorithm]) -> dict[str, Any]:
    """Return the type of every option by key."""
    return setting_types(task, algorithm_type) | field_types(TrainOptions) | field_types(CheckpointInterval, section="checkpoint")


def document(values: Mapping[str, Any], *, show_all: bool) -> Callable[..., None]:
    """Return the command with the options of the task and algorithm in `values`, and their defaults."""
    task, algorithm_name = parse_names(values, "--")
    require_recipes(algorithm_name, values.get("algorithm.recipe"))
    cls = algorithm_class(algorithm_name)
    types = option_types(task, cls)
    parsed = parse_settings(types, values, "--")
    config, recipe = build_config(parsed), parsed.get("algorithm.recipe", Recipe.RECOMMENDED)
    try:
        defaults = default_options(get_task(task, config.data, config.model), cls, config.model, recipe)
    except ValueError:  # a user's file that is missing or cannot be read
        defaults = default_options(TASKS[task], cls, config.model, recipe)
    classes = {RunConfig: "", TrainOptions: "", cls: "algorithm", CheckpointInterval: "checkpoint"}
    classes |= {kind: section for section, kind in section_classes(task).items()}
    return documented_command(types, classes, {f"algorithm.{name}": value for name, value in defaults.items()}, show_all=show_all)


def train(values: Mapping[str, Any], ranks: Ranks | None = None) -> int:
    """Train one model with one algorithm and write a run directory; `values` are the settings by key.

    On a cluster rank 0 does so, and the others train what it sends them.
    """
    task, algorithm_name = parse_names(values, "--")
    require_recipes(algorithm_name, values.get("algorithm.recipe"))
    parsed = parse_settings(option_types(task, algorithm_class(algorithm_name)), values, "--")
    options, interval = build_settings(TrainOptions, parsed), build_settings(CheckpointInterval, parsed, "checkpoint")
    config = build_config(parsed)
    run = resolve(config)
    out, quiet = options.out, options.quiet
    join_cluster(run, options, ranks)
    if ranks is not None and ranks.number:
        training.follow_run(run, ranks)
        return 0
    check_installed(options.tracker)
    if options.secret_file is not None:
        if run.algorithm.privacy is None:
            raise ValueError("--secret-file has no effect without privacy.noise-multiplier; set privacy.noise-multiplier too")
        read_secret(options.secret_file)
    if options.resume is not None:
        return resume_training(run, options, interval, ranks)
    if options.tune_trials is not None:
        trials = (Path("runs") if out is None else out.parent) / "tuning" / run.id
        run = tune_run(run, options.tune_trials, trials, fixed_options=changed_options(config), quiet=quiet)
    simulation = Simulation(run, ranks)
    simulation.validate()
    training.compare_with_ranks(run, simulation)
    folder = run_directory.create_run_dir(out or Path("runs") / run.id, explicit=out is not None)
    with hint_resume(f"fedsieve train --resume {folder}"):
        result = runner.start_run(run, simulation, folder, interval, quiet=quiet, tracker=options.tracker, secret_file=options.secret_file)
    write_default_report(folder)
    show_result(run, result, folder, quiet=quiet, json=options.json)
    return 0


def join_cluster(run: ResolvedRun, options: TrainOptions, ranks: Ranks | None) -> None:
    """Validate the options that concern a cluster, and set how long its ranks wait for each other."""
    if ranks is None:
        if options.rank_timeout is not None:
            raise ValueError("--rank-timeout applies to a cluster, and torchrun has not started this process; leave it out")
        return
    if options.rank_timeout is not None and not 0 < options.rank_timeout < inf:
        raise ValueError(f"--rank-timeout must be above 0 seconds and finite; got {options.rank_timeout:g}")
    if options.tune_trials is not None:
        raise ValueError("--tune-trials trains many runs on one machine, and torchrun has started a cluster for one; tune without torchrun")
    require_cluster(run, ranks.count)
    ranks.seconds = options.rank_timeout or ranks.seconds


def resume_training(run: ResolvedRun, options: TrainOptions, interval: CheckpointInterval, ranks: Ranks | None) -> int:
    """Resume an interrupted run in its directory."""
    folder, quiet = options.resume, options.quiet
    assert folder is not None
    if options.out is not None or options.tune_trials is not None:
        raise ValueError(f"--resume {folder} goes on in its own folder with its own settings; leave out --out and --tune-trials")
    result = runner.finished_result(run, folder)
    needs_report = result is None or not (folder / run_directory.REPORT).exists()  # the disk was full after the result was written
    if result is None:
        with hint_resume(f"fedsieve train --resume {folder}"):
            result = runner.resume_run(
                run, folder, interval, quiet=quiet, tracker=options.tracker, secret_file=options.secret_file, ranks=ranks
            )
    elif not quiet:
        print(f"{folder} is finished, all {run.rounds} rounds; nothing is changed", file=sys.stderr)
    if needs_report:
        write_default_report(folder)
    show_result(run, result, folder, quiet=quiet, json=options.json)
    return 0


def changed_options(config: RunConfig) -> frozenset[str]:
    """Return the options of the algorithm that differ from their defaults on the task."""
    algorithm = resolve(config).algorithm
    chosen = {"recipe": algorithm.recipe} if "recipe" in algorithm.option_names() else None
    default = resolve(replace(config, algorithm=chosen)).algorithm
    return frozenset(name for name in algorithm.option_names() if vars(algorithm)[name] != vars(default)[name])


@contextmanager
def hint_resume(command: str) -> Iterator[None]:
    """Add the command that resumes the run to a KeyboardInterrupt or to the error of a cluster."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: {command}") from None
    except ClusterError as error:
        raise ClusterError(f"{error}; what was finished is kept; go on, with or without torchrun: {command}") from None
