"""What `fedsieve train` and `fedsieve compare` do."""

import json as json_text
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Group, Parameter

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.cli.console import show_result
from fedsieve.cli.options import Integer, Switch, option_class, to_kwargs
from fedsieve.data.user_files import UserFiles
from fedsieve.experiments import compare as comparison
from fedsieve.experiments import runner as folders
from fedsieve.experiments.config import SECTIONS, FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.tasks import TASKS, Task, default_options, file_task
from fedsieve.experiments.trackers import Tracker, check_installed
from fedsieve.report.html.page import write_default_report
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.storage import run_directory
from fedsieve.storage.run_log import CheckpointInterval
from fedsieve.studies.tuning import tune_run

DEFAULT_ALGORITHM = "sieve"
SECTION_CLASSES = {"federation": FederationConfig, "failures": Failures, "privacy": Privacy}
OPTION_TYPES = {"task": Literal[tuple(TASKS)], "algorithm_name": Literal[tuple(ALGORITHMS)]}
PANEL_TITLES = {
    "data": "The rows of this task",
    "federation": "Who takes part, and how much each counts",
    "algorithm": "The method",
    "failures": "Clients that fail or lie",
    "privacy": "Clients that are hidden",
    "checkpoint": "How often a run is saved",
}
PANELS = {name: Group(f"{title}: --{name}.*", sort_key=place) for place, (name, title) in enumerate(PANEL_TITLES.items())}
"""How the help is divided; what stands in no section comes first."""
FLATTENED = Parameter(name="*")
"""--density, not --options.density"""
FLAGS = {"algorithm_name": ("--algorithm", "--algorithm.name")}
"""Options whose flags are not their field's name: `--algorithm NAME`, and `name` in the section [algorithm] of a settings file."""
CHECKPOINT_OPTIONS = option_class(CheckpointInterval, "CheckpointOptions", group=PANELS["checkpoint"])


class EarlyArguments(NamedTuple):
    """What is typed or stands in a settings file, as far as it decides which options there are and what their defaults are."""

    task: str | None = None
    algorithm: str | None = None
    model: str | None = None
    path: str | None = None
    target: str | None = None
    client: str | None = None


def select_task(arguments: EarlyArguments) -> Task:
    """The task whose options are offered; of a user's own rows, with what suits them. What is wrong with these is said by the run."""
    if arguments.task != "file" or arguments.path is None:
        return TASKS[arguments.task if arguments.task in TASKS else "lr"]
    given = {name: getattr(arguments, name) for name in ("target", "client") if getattr(arguments, name) is not None}
    try:
        return file_task(UserFiles(path=Path(arguments.path), **given), arguments.model)
    except ValueError:
        return TASKS["file"]


def run_options(task: Task, algorithm_options: type, *, exclude: tuple[str, ...] = ()) -> type:
    """Every setting of a run as an option, its sections within."""
    top = option_class(RunConfig, "RunOptions", type_overrides=OPTION_TYPES, flags=FLAGS, exclude=(*SECTIONS, *exclude))
    kinds = {"data": task.data_options} | SECTION_CLASSES
    parts = {name: option_class(kind, f"{kind.__name__}Options", group=PANELS[name]) for name, kind in kinds.items()}
    within = [(name, kind, field(default=kind())) for name, kind in parts.items()]
    within.append(("algorithm", Annotated[algorithm_options, FLATTENED], field(default=algorithm_options())))
    return make_dataclass("RunOptions", within, bases=(top,), kw_only=True, frozen=True, namespace={"__module__": __name__})


def run_settings(task: Task, options: Any) -> dict[str, Any]:
    """What was typed, as a `Run` takes it; the method's own options apart."""
    plain = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "algorithm"}
    kinds = {"data": task.data_options} | SECTION_CLASSES
    return plain | {name: kind(**to_kwargs(plain[name])) for name, kind in kinds.items()}


def train_command(arguments: EarlyArguments) -> Callable[..., int]:
    """`fedsieve train` with the options of the named task, method and model."""
    about = select_task(arguments)
    cls = algorithm_class(arguments.algorithm if arguments.algorithm in ALGORITHMS else DEFAULT_ALGORITHM)
    usual_options = option_class(
        cls, "AlgorithmOptions", defaults=default_options(about, cls, arguments.model), group=PANELS["algorithm"], prefix="algorithm"
    )
    offered = run_options(about, usual_options)

    def train(
        *,
        options=offered(),  # noqa: ANN001, B008
        tune_trials: Integer | None = None,
        config: Path | None = None,
        out: Path | None = None,
        resume: Path | None = None,
        tracker: Tracker | None = None,
        quiet: Switch = False,
        json: Switch = False,
        checkpoint=CHECKPOINT_OPTIONS(),  # noqa: ANN001, B008
    ) -> int:
        """Train one model with one method; writes a run folder.

        Parameters
        ----------
        tune_trials
            settings (step size, batch, schedule; never what is typed) to try on rows held out; the best is used, trials are kept
        config
            a TOML file with any of these settings; flags win over it
        out
            folder of the run (default: runs/ID)
        resume
            folder of a run that broke off: it goes on to the same bits, with the settings it has; only --rounds may be raised
        tracker
            also write every round to a tracker: on this machine, unless its own settings send it elsewhere
        quiet
            no progress and no table
        json
            the result as one JSON object on the last line
        """
        run = resolve(RunConfig(**run_settings(about, options), algorithm=cls(**to_kwargs(options.algorithm))))
        pace = CheckpointInterval(**to_kwargs(checkpoint))
        check_installed(tracker)
        if resume is not None:
            if out is not None or tune_trials is not None:
                raise ValueError(f"--resume {resume} goes on in its own folder with its own settings; leave out --out and --tune-trials")
            result = folders.finished_result(run, resume)
            if result is None:
                with hint_resume(f"fedsieve train --resume {resume}"):
                    result = folders.resume_run(run, resume, pace, quiet=quiet, tracker=tracker)
                write_default_report(resume)
            elif not quiet:
                print(f"{resume} is finished, all {run.rounds} rounds; nothing is changed", file=sys.stderr)
            show_result(run, result, resume, quiet=quiet, json=json)
            return 0
        if tune_trials is not None:
            usually = to_kwargs(usual_options())
            fixed = frozenset(name for name, value in to_kwargs(options.algorithm).items() if value != usually[name])
            trials = (Path("runs") if out is None else out.parent) / "tuning" / run.id
            run = tune_run(run, tune_trials, trials, fixed_options=fixed, quiet=quiet)
        problem = Simulation(run)
        problem.validate()
        folder = run_directory.create_run_dir(out or Path("runs") / run.id, explicit=out is not None)
        with hint_resume(f"fedsieve train --resume {folder}"):
            result = folders.start_run(run, problem, folder, pace, quiet=quiet, tracker=tracker)
        write_default_report(folder)
        show_result(run, result, folder, quiet=quiet, json=json)
        return 0

    train.__annotations__ |= {"options": Annotated[offered, FLATTENED], "checkpoint": CHECKPOINT_OPTIONS}
    return train


@contextmanager
def hint_resume(command: str) -> Iterator[None]:
    """Whoever interrupts learns how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: {command}") from None


def default_algorithm(task: Task, name: str, model: str | None, shared: dict[str, Any]) -> BaseAlgorithm:
    """A method with the defaults it has on this task, and what was typed for all."""
    cls = algorithm_class(name)
    return cls(**(default_options(task, cls, model) | {option: value for option, value in shared.items() if option in cls.option_names()}))


def compare_command(arguments: EarlyArguments) -> Callable[..., int]:
    """`fedsieve compare` with the options of the named task and those all methods share."""
    about = select_task(arguments)
    offered = run_options(
        about,
        option_class(BaseAlgorithm, "SharedOptions", optional=True, group=PANELS["algorithm"], prefix="algorithm"),
        exclude=("algorithm_name", "seed"),
    )

    def compare(
        *,
        algorithms: str = "sieve,flops-pa,fed-iter-ht,fed-avg",
        seeds: str = "0,1,2",
        options=offered(),  # noqa: ANN001, B008
        config: Path | None = None,
        out: Path | None = None,
        tracker: Tracker | None = None,
        quiet: Switch = False,
        json: Switch = False,
    ) -> int:
        """Train several methods on the same data and seeds: mean +- sd, paired differences, at equal rounds and at equal bytes.

        Parameters
        ----------
        algorithms
            names, separated by commas; the first is what the others are compared with
        seeds
            whole numbers, separated by commas
        config
            a TOML file with any of these settings; flags win over it
        out
            folder of the comparison (default: runs/compare-ID); one that broke off there goes on, finished runs are kept
        tracker
            also write every round of every run to a tracker: on this machine, unless its own settings send it elsewhere
        quiet
            no progress and no table
        json
            the result as one JSON object on the last line
        """
        names, numbers = comparison.parse_algorithms_and_seeds(algorithms, seeds)
        check_installed(tracker)
        common, shared = run_settings(about, options), to_kwargs(options.algorithm, optional=True)
        for option in shared:
            if not any(option in algorithm_class(name).option_names() for name in names):
                raise ValueError(f"--algorithm.{option.replace('_', '-')} has no effect on {' or '.join(names)}; leave it out")
        chosen = {name: default_algorithm(about, name, arguments.model, shared) for name in names}
        runs = [
            [resolve(RunConfig(**common, algorithm_name=name, seed=s, algorithm=algorithm)) for name, algorithm in chosen.items()]
            for s in numbers
        ]
        folder = out or Path("runs") / comparison.comparison_id(runs)
        if not comparison.is_resumable(folder, runs):
            folder = run_directory.create_run_dir(folder, explicit=out is not None)
        histories: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
        with hint_resume("the same command"):
            for per_seed in runs:
                problem = Simulation(per_seed[0])
                for run in per_seed:
                    inner = folder / comparison.run_name(run)
                    folders.start_or_resume(run, problem.with_config(run), inner, quiet=quiet, tracker=tracker)
                    histories[run.algorithm_name].append(run_directory.read_metrics(inner))
        result = comparison.compare_histories(histories, runs[0][0].metric, numbers)
        result = {"run": str(folder), "task": common["task"], **result}
        run_directory.atomic_write(folder / run_directory.RESULT, json_text.dumps(result, indent=1).encode())
        result["report"] = write_default_report(folder)
        if json:
            print(json_text.dumps(result))
        elif not quiet:
            comparison.print_comparison(result)
        return 0

    compare.__annotations__ |= {"options": Annotated[offered, FLATTENED]}
    return compare
