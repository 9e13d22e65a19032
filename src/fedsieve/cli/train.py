"""The command `fedsieve train`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Group, Parameter

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.cli.console import show_result
from fedsieve.cli.options import Integer, Switch, option_class, to_kwargs
from fedsieve.data.user_files import UserFiles
from fedsieve.experiments import runner
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
    "data": "Data of the task",
    "federation": "Clients and aggregation",
    "algorithm": "Options of the algorithm",
    "failures": "Failing and malicious clients",
    "privacy": "Differential privacy",
    "checkpoint": "Checkpoints",
}
PANELS = {name: Group(f"{title}: --{name}.*", sort_key=position) for position, (name, title) in enumerate(PANEL_TITLES.items())}
"""The panels of the help text. Options outside a section come first."""
COMMON_OPTIONS = {
    "run": ("task", "algorithm_name", "density", "rounds", "seed", "device", "gate_granularity", "model", "init_weights"),
    "data": ("num_examples", "num_features", "true_density", "path", "target", "client", "source"),
    "federation": ("clients", "participation", "partition", "alpha", "aggregator"),
    "algorithm": ("batch_size", "local_steps", "learning_rate", "step_rule", "bits"),
    "failures": (),
    "privacy": (),
    "checkpoint": (),
}
"""The options that --help shows; --help-all shows all."""
FLATTENED = Parameter(name="*")
"""--density, not --options.density"""
FLAGS = {"algorithm_name": ("--algorithm", "--algorithm.name")}
"""Options that are not named after their field: `--algorithm NAME`, which is `name` in section [algorithm] of a TOML file."""


class EarlyArguments(NamedTuple):
    """The arguments that determine which options exist and what their defaults are."""

    task: str | None = None
    algorithm: str | None = None
    model: str | None = None
    path: str | None = None
    target: str | None = None
    client: str | None = None
    show_all: bool = False
    """whether the help shows all options"""


def select_task(arguments: EarlyArguments) -> Task:
    """Return the task whose options are offered. Errors in a user's file are reported later, by `resolve`."""
    if arguments.task != "file" or arguments.path is None:
        return TASKS[arguments.task if arguments.task in TASKS else "lr"]
    columns: dict[str, Any] = {"target": arguments.target, "client": arguments.client}
    columns = {name: value for name, value in columns.items() if value is not None}
    try:
        return file_task(UserFiles(path=Path(arguments.path), **columns), arguments.model)
    except ValueError:
        return TASKS["file"]


def run_options(task: Task, algorithm_options: type, *, exclude: tuple[str, ...] = (), show_all: bool = False) -> type:
    """Return a dataclass with every setting of a run as an option, one field per section."""
    shown = dict.fromkeys(COMMON_OPTIONS) if show_all else COMMON_OPTIONS
    top = option_class(RunConfig, "RunOptions", type_overrides=OPTION_TYPES, flags=FLAGS, exclude=(*SECTIONS, *exclude), shown=shown["run"])
    kinds = {"data": task.data_options} | SECTION_CLASSES
    parts = {name: option_class(kind, f"{kind.__name__}Options", group=PANELS[name], shown=shown[name]) for name, kind in kinds.items()}
    within: list[tuple[str, Any, Any]] = [(name, kind, field(default=kind())) for name, kind in parts.items()]
    within.append(("algorithm", Annotated[algorithm_options, FLATTENED], field(default=algorithm_options())))
    return make_dataclass("RunOptions", within, bases=(top,), kw_only=True, frozen=True, namespace={"__module__": __name__})


def run_settings(task: Task, options: Any) -> dict[str, Any]:
    """Return the keyword arguments of RunConfig, without the options of the algorithm."""
    plain = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "algorithm"}
    kinds = {"data": task.data_options} | SECTION_CLASSES
    return plain | {name: kind(**to_kwargs(plain[name])) for name, kind in kinds.items()}


def train_command(arguments: EarlyArguments) -> Callable[..., int]:
    """Return `fedsieve train` with the options of the named task, algorithm and model."""
    task = select_task(arguments)
    cls = algorithm_class(arguments.algorithm if arguments.algorithm in ALGORITHMS else DEFAULT_ALGORITHM)
    algorithm_options = option_class(
        cls,
        "AlgorithmOptions",
        defaults=default_options(task, cls, arguments.model),
        group=PANELS["algorithm"],
        prefix="algorithm",
        shown=None if arguments.show_all else COMMON_OPTIONS["algorithm"],
    )
    checkpoint_options = option_class(
        CheckpointInterval,
        "CheckpointOptions",
        group=PANELS["checkpoint"],
        shown=None if arguments.show_all else COMMON_OPTIONS["checkpoint"],
    )
    offered = run_options(task, algorithm_options, show_all=arguments.show_all)

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
        checkpoint=checkpoint_options(),  # noqa: ANN001, B008
    ) -> int:
        """Train one model with one algorithm and write a run directory.

        --help-all shows every option.

        Parameters
        ----------
        tune_trials
            number of option sets (learning rate, batch size, density schedule) to try on validation examples; the best is used
        config
            TOML file with any of these settings; options on the command line take precedence
        out
            directory of the run (default: runs/ID)
        resume
            directory of an interrupted run: it resumes to the same bits with its own settings; only --rounds may be raised
        tracker
            also write every round to a tracker, on this machine unless its own settings name a server
        quiet
            print no progress and no table
        json
            print the result as one JSON object on the last line
        """
        run = resolve(RunConfig(**run_settings(task, options), algorithm=cls(**to_kwargs(options.algorithm))))
        interval = CheckpointInterval(**to_kwargs(checkpoint))
        check_installed(tracker)
        if resume is not None:
            if out is not None or tune_trials is not None:
                raise ValueError(f"--resume {resume} goes on in its own folder with its own settings; leave out --out and --tune-trials")
            result = runner.finished_result(run, resume)
            if result is None:
                with hint_resume(f"fedsieve train --resume {resume}"):
                    result = runner.resume_run(run, resume, interval, quiet=quiet, tracker=tracker)
                write_default_report(resume)
            elif not quiet:
                print(f"{resume} is finished, all {run.rounds} rounds; nothing is changed", file=sys.stderr)
            show_result(run, result, resume, quiet=quiet, json=json)
            return 0
        if tune_trials is not None:
            defaults = to_kwargs(algorithm_options())
            fixed = frozenset(name for name, value in to_kwargs(options.algorithm).items() if value != defaults[name])
            trials = (Path("runs") if out is None else out.parent) / "tuning" / run.id
            run = tune_run(run, tune_trials, trials, fixed_options=fixed, quiet=quiet)
        simulation = Simulation(run)
        simulation.validate()
        folder = run_directory.create_run_dir(out or Path("runs") / run.id, explicit=out is not None)
        with hint_resume(f"fedsieve train --resume {folder}"):
            result = runner.start_run(run, simulation, folder, interval, quiet=quiet, tracker=tracker)
        write_default_report(folder)
        show_result(run, result, folder, quiet=quiet, json=json)
        return 0

    train.__annotations__ |= {"options": Annotated[offered, FLATTENED], "checkpoint": checkpoint_options}
    return train


@contextmanager
def hint_resume(command: str) -> Iterator[None]:
    """Add the command that resumes the run to a KeyboardInterrupt."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: {command}") from None
