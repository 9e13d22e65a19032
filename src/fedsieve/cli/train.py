"""What `fedsieve train` and `fedsieve compare` do."""

import json as json_text
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Group, Parameter

from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.algorithms.base import Method
from fedsieve.cli.console import show_result
from fedsieve.cli.options import Flag, Whole, section, typed
from fedsieve.data.user_files import Own
from fedsieve.experiments import compare as comparison
from fedsieve.experiments import runner as folders
from fedsieve.experiments.config import SECTIONS, Federation, Gating, Run
from fedsieve.experiments.simulation import Problem
from fedsieve.experiments.tasks import TASKS, Task, file_task, settings_of
from fedsieve.experiments.trackers import Tracker, require
from fedsieve.experiments.tuning import tuned
from fedsieve.report.html.page import leave
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.storage import run_directory
from fedsieve.storage.run_log import Pace

DEFAULT_METHOD = "sieve"
SETTINGS = {"federation": Federation, "gates": Gating, "failures": Failures, "privacy": Privacy}
KINDS = {"task": Literal[tuple(TASKS)], "method": Literal[tuple(METHODS)]}
TITLES = {
    "data": "The rows of this task",
    "federation": "Who takes part, and how much each counts",
    "gates": "What a gate stands before",
    "algorithm": "The method",
    "failures": "Clients that fail or lie",
    "privacy": "Clients that are hidden",
    "checkpoint": "How often a run is saved",
}
PANELS = {name: Group(f"{title}: --{name}.*", sort_key=place) for place, (name, title) in enumerate(TITLES.items())}
"""How the help is divided; what stands in no section comes first."""
UNNAMED = Parameter(name="*")
"""--density, not --options.density"""
PACE = section(Pace, "CheckpointOptions", group=PANELS["checkpoint"])


class Named(NamedTuple):
    """What is typed or stands in a settings file, as far as it decides which options there are and what their defaults are."""

    task: str | None = None
    method: str | None = None
    model: str | None = None
    path: str | None = None
    target: str | None = None
    client: str | None = None


def task_named(named: Named) -> Task:
    """The task whose options are offered; of a user's own rows, with what suits them. What is wrong with these is said by the run."""
    if named.task != "file" or named.path is None:
        return TASKS[named.task if named.task in TASKS else "lr"]
    given = {name: getattr(named, name) for name in ("target", "client") if getattr(named, name) is not None}
    try:
        return file_task(Own(path=Path(named.path), **given), named.model)
    except ValueError:
        return TASKS["file"]


def run_options(about: Task, algorithm: type, *, without: tuple[str, ...] = ()) -> type:
    """Every setting of a run as an option, its sections within."""
    top = section(Run, "RunOptions", kinds=KINDS, without=(*SECTIONS, *without))
    kinds = {"data": about.options} | SETTINGS
    parts = {name: section(kind, f"{kind.__name__}Options", group=PANELS[name]) for name, kind in kinds.items()} | {"algorithm": algorithm}
    within = [(name, kind, field(default=kind())) for name, kind in parts.items()]
    return make_dataclass("RunOptions", within, bases=(top,), kw_only=True, frozen=True, namespace={"__module__": __name__})


def settings(about: Task, options: Any) -> dict[str, Any]:
    """What was typed, as a `Run` takes it; the method's own options apart."""
    plain = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "algorithm"}
    kinds = {"data": about.options} | SETTINGS
    return plain | {name: kind(**typed(plain[name])) for name, kind in kinds.items()}


def train_command(named: Named) -> Callable[..., int]:
    """`fedsieve train` with the options of the named task, method and model."""
    about = task_named(named)
    cls = algorithm_class(named.method if named.method in METHODS else DEFAULT_METHOD)
    usual_options = section(cls, "AlgorithmOptions", defaults=settings_of(about, cls, named.model), group=PANELS["algorithm"])
    offered = run_options(about, usual_options)

    def train(
        *,
        options=offered(),  # noqa: ANN001, B008
        tune: Whole | None = None,
        config: Path | None = None,
        out: Path | None = None,
        resume: Path | None = None,
        track: Tracker | None = None,
        quiet: Flag = False,
        json: Flag = False,
        checkpoint=PACE(),  # noqa: ANN001, B008
    ) -> int:
        """Train one model with one method; writes a run folder.

        Parameters
        ----------
        tune
            settings (step size, batch, schedule; never what is typed) to try on rows held out; the best is used, trials are kept
        config
            a TOML file with any of these settings; flags win over it
        out
            folder of the run (default: runs/ID)
        resume
            folder of a run that broke off: it goes on to the same bits, with the settings it has; only --rounds may be raised
        track
            also write every round to a tracker: on this machine, unless its own settings send it elsewhere
        quiet
            no progress and no table
        json
            the result as one JSON object on the last line
        """
        run = Run(**settings(about, options), algorithm=cls(**typed(options.algorithm)))
        pace = Pace(**typed(checkpoint))
        require(track)
        if resume is not None:
            if out is not None or tune is not None:
                raise ValueError(f"--resume {resume} goes on in its own folder with its own settings; leave out --out and --tune")
            result = folders.finished(run, resume)
            if result is None:
                with resumable(f"fedsieve train --resume {resume}"):
                    result = folders.resume(run, resume, pace, quiet=quiet, track=track)
                leave(resume)
            elif not quiet:
                print(f"{resume} is finished, all {run.rounds} rounds; nothing is changed", file=sys.stderr)
            show_result(run, result, resume, quiet=quiet, json=json)
            return 0
        if tune is not None:
            usually = typed(usual_options())
            fixed = frozenset(name for name, value in typed(options.algorithm).items() if value != usually[name])
            trials = (Path("runs") if out is None else out.parent) / "tuning" / run.id
            run = tuned(run, tune, trials, fixed=fixed, quiet=quiet)
        problem = Problem(run)
        problem.check()
        folder = run_directory.claim(out or Path("runs") / run.id, chosen=out is not None)
        with resumable(f"fedsieve train --resume {folder}"):
            result = folders.begin(run, problem, folder, pace, quiet=quiet, track=track)
        leave(folder)
        show_result(run, result, folder, quiet=quiet, json=json)
        return 0

    train.__annotations__ |= {"options": Annotated[offered, UNNAMED], "checkpoint": PACE}
    return train


@contextmanager
def resumable(how: str) -> Iterator[None]:
    """Whoever interrupts learns how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: {how}") from None


def usual(task: Task, name: str, model: str | None, shared: dict[str, Any]) -> Method:
    """A method with the defaults it has on this task, and what was typed for all."""
    cls = algorithm_class(name)
    return cls(**(settings_of(task, cls, model) | {option: value for option, value in shared.items() if option in cls.offered()}))


def compare_command(named: Named) -> Callable[..., int]:
    """`fedsieve compare` with the options of the named task and those all methods share."""
    about = task_named(named)
    offered = run_options(about, section(Method, "SharedOptions", optional=True, group=PANELS["algorithm"]), without=("method", "seed"))

    def compare(
        *,
        methods: str = "sieve,flops-pa,fed-iter-ht,fed-avg",
        seeds: str = "0,1,2",
        options=offered(),  # noqa: ANN001, B008
        config: Path | None = None,
        out: Path | None = None,
        track: Tracker | None = None,
        quiet: Flag = False,
        json: Flag = False,
    ) -> int:
        """Train several methods on the same data and seeds: mean +- sd, paired differences, at equal rounds and at equal bytes.

        Parameters
        ----------
        methods
            names, separated by commas; the first is what the others are compared with
        seeds
            whole numbers, separated by commas
        config
            a TOML file with any of these settings; flags win over it
        out
            folder of the comparison (default: runs/compare-ID); one that broke off there goes on, finished runs are kept
        track
            also write every round of every run to a tracker: on this machine, unless its own settings send it elsewhere
        quiet
            no progress and no table
        json
            the result as one JSON object on the last line
        """
        names, numbers = comparison.parse(methods, seeds)
        require(track)
        common, shared = settings(about, options), typed(options.algorithm, optional=True)
        for option in shared:
            if not any(option in algorithm_class(name).offered() for name in names):
                raise ValueError(f"--algorithm.{option.replace('_', '-')} has no effect on {' or '.join(names)}; leave it out")
        chosen = {name: usual(about, name, named.model, shared) for name in names}
        runs = [[Run(**common, method=name, seed=s, algorithm=algorithm) for name, algorithm in chosen.items()] for s in numbers]
        folder = out or Path("runs") / comparison.identity(runs)
        if not comparison.broke_off(folder, runs):
            folder = run_directory.claim(folder, chosen=out is not None)
        histories: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
        with resumable("the same command"):
            for per_seed in runs:
                problem = Problem(per_seed[0])
                for run in per_seed:
                    inner = folder / comparison.place(run)
                    folders.take_up(run, problem.for_run(run), inner, quiet=quiet, track=track)
                    histories[run.method].append(run_directory.read_metrics(inner))
        result = comparison.compare(histories, runs[0][0].metric, numbers)
        result = {"run": str(folder), "task": common["task"], **result}
        run_directory.replace(folder / run_directory.RESULT, json_text.dumps(result, indent=1).encode())
        result["report"] = leave(folder)
        if json:
            print(json_text.dumps(result))
        elif not quiet:
            comparison.show(result)
        return 0

    compare.__annotations__ |= {"options": Annotated[offered, UNNAMED]}
    return compare
