"""What `fedsieve train` and `fedsieve compare` do."""

import json as json_text
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from fedsieve import comparison
from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.algorithms.method import Method
from fedsieve.core.selection import kept_count
from fedsieve.experiments import folder as folders
from fedsieve.experiments import store
from fedsieve.experiments.journal import Pace
from fedsieve.experiments.problem import Problem
from fedsieve.experiments.run import Counting, Engine, Federation, Gating, Judge, Precision, Run
from fedsieve.experiments.tasks import TASKS, Task, settings_of
from fedsieve.experiments.tune import tuned
from fedsieve.failures import Failures
from fedsieve.options import Flag, Whole, section, typed
from fedsieve.privacy import Privacy
from fedsieve.report.page import leave
from fedsieve.show import amount, number, size
from fedsieve.tracking import Tracker, require

DEFAULT_METHOD = "sieve"
SAMPLED = {Counting.ENCODED: "", Counting.SAMPLED: " (estimated from one reply an exchange)"}
FEDERATION = section(Federation, "FederationOptions")
FAILURES = section(Failures, "FailureOptions")
PRIVACY = section(Privacy, "PrivacyOptions")
PACE = section(Pace, "CheckpointOptions")
TaskName = Literal[tuple(TASKS)]
MethodName = Literal[tuple(METHODS)]


def train_command(named_task: str | None, named: str | None, named_model: str | None) -> Callable[..., int]:
    """`fedsieve train` with the options of the named task, method and model."""
    about = TASKS[named_task if named_task in TASKS else "lr"]
    Data = section(about.options, "DataOptions")  # noqa: N806
    cls = algorithm_class(named if named in METHODS else DEFAULT_METHOD)
    options = section(cls, "AlgorithmOptions", defaults=settings_of(about, cls, named_model))

    def train(
        *,
        task: TaskName = "lr",
        method: MethodName = DEFAULT_METHOD,
        density: float | None = None,
        rounds: Whole | None = None,
        seed: Whole = 0,
        engine: Engine = Engine.BATCHED,
        precision: Precision = Precision.SINGLE,
        device: str = "cpu",
        threads: Whole = 1,
        bytes: Counting = Counting.ENCODED,
        judge: Judge = Judge.TEST,
        model: str | None = None,
        start: Path | None = None,
        tune: Whole | None = None,
        config: Path | None = None,
        out: Path | None = None,
        resume: Path | None = None,
        track: Tracker | None = None,
        quiet: Flag = False,
        json: Flag = False,
        data=Data(),  # noqa: ANN001, B008
        federation=FEDERATION(),  # noqa: ANN001, B008
        gates: Gating = Gating(),  # noqa: B008
        failures=FAILURES(),  # noqa: ANN001, B008
        privacy=PRIVACY(),  # noqa: ANN001, B008
        algorithm=options(),  # noqa: ANN001, B008
        checkpoint=PACE(),  # noqa: ANN001, B008
    ) -> int:
        """Train one model with one method; writes a run folder.

        Parameters
        ----------
        task
            what is learned; --data.* are the options of this task
        method
            who learns; --algorithm.* are the options of this method
        density
            fraction of weights that may be non-zero (default: the task's, mostly 0.05)
        rounds
            rounds of training (default: 50 for gradient methods, 100 for the others)
        seed
            every random number follows from it
        engine
            batched is fast, loop is the readable reference
        precision
            double makes both engines give the same bits
        device
            where tensors live
        threads
            threads for tensor arithmetic; results repeat bit for bit for one number of threads
        bytes
            encoded: every message is; sampled: one reply an exchange stands for all
        judge
            rows a run is measured on: test, or for tuning a tenth of each client's rows held out (validation)
        model
            of task file: linear, softmax, multilabel or PACKAGE.MODULE:FACTORY (default: what the target suggests)
        start
            weights to start from: a model.safetensors of an earlier run, or a module's own tensors by name
        tune
            settings to try first on a tenth of each client's rows (step size, batch, schedule; never what is typed), the best is used;
            trials stay in a folder tuning beside the run and are never repeated
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
        run = Run(
            task=task,
            method=method,
            density=density,
            rounds=rounds,
            seed=seed,
            engine=engine,
            precision=precision,
            device=device,
            threads=threads,
            bytes=bytes,
            judge=judge,
            data=about.options(**typed(data)),
            federation=Federation(**typed(federation)),
            gates=gates,
            failures=Failures(**typed(failures)),
            privacy=Privacy(**typed(privacy)),
            model=model,
            start=start,
            algorithm=cls(**typed(algorithm)),
        )
        pace = Pace(**typed(checkpoint))
        require(track)
        if resume is not None:
            if out is not None or tune is not None:
                raise ValueError(f"--resume {resume} goes on in its own folder with its own settings; leave out --out and --tune")
            result = folders.finished(run, resume)
            if result is None:
                with resumable(resume):
                    result = folders.resume(run, resume, pace, quiet=quiet, track=track)
                leave(resume)
            elif not quiet:
                print(f"{resume} is finished, all {run.rounds} rounds; nothing is changed", file=sys.stderr)
            show_result(run, result, resume, quiet=quiet, json=json)
            return 0
        if tune is not None:
            usual_options = typed(options())
            fixed = frozenset(name for name, value in typed(algorithm).items() if value != usual_options[name])
            trials = (Path("runs") if out is None else out.parent) / "tuning" / run.id
            run = tuned(run, tune, trials, fixed=fixed, quiet=quiet)
        problem = Problem(run)
        problem.check()
        folder = store.claim(out or Path("runs") / run.id, chosen=out is not None)
        with resumable(folder):
            result = folders.begin(run, problem, folder, pace, quiet=quiet, track=track)
        leave(folder)
        show_result(run, result, folder, quiet=quiet, json=json)
        return 0

    train.__annotations__ |= {
        "algorithm": options,
        "data": Data,
        "federation": FEDERATION,
        "failures": FAILURES,
        "privacy": PRIVACY,
        "checkpoint": PACE,
    }
    return train


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Whoever interrupts a run learns how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"go on with: fedsieve train --resume {folder}") from None


def show_result(run: Run, result: dict[str, Any], folder: Path, *, quiet: bool, json: bool) -> None:
    """The table a newcomer reads, or all of it as JSON."""
    page = folder / store.REPORT
    result["report"] = str(page) if page.exists() else None
    if json:
        print(json_text.dumps(result))
    if json or quiet:
        return
    table = Table(title=f"{run.method} on {run.task}, {result['rounds']} rounds", show_header=False, title_justify="left")
    kept, total = result["nonzero"], result["size"]
    sent = result["bytes_up"] + result["bytes_down"]
    allowed = kept_count(run.density, total)
    table.add_row("weights kept", f"exactly {kept} of {total}" + (f", in whole groups ({allowed} allowed)" if kept < allowed else ""))
    if result["tdr"] is not None:
        found = round(result["tdr"] * kept)
        true = round(found / max(result["recall"], 1e-9))
        table.add_row("of these right", f"{'all ' if found == kept else ''}{found} (of {true} true ones)" if found else "none")
    best = "" if result["best_possible"] is None else f" (best possible {number(result['best_possible'])})"
    table.add_row(f"{run.judge} {result['metric']}", f"{number(result['value'])}{best}")
    if result["expected_density"] is not None:
        table.add_row("expected density", f"{number(result['expected_density'])} before the final cut")
    if result["replied"] < result["asked"]:
        table.add_row("replies", replies(result))
    if result["epsilon"] is not None:
        table.add_row("privacy", f"epsilon {number(result['epsilon'])} at delta {run.privacy.delta:.1g}, of a client replaced by another")
    if result["features"] is not None:
        named = ", ".join(result["features"][:8]) + (" ..." if len(result["features"]) > 8 else "")
        table.add_row("features used", f"{len(result['features'])}: {named}")
    table.add_row("bytes sent", f"{size(sent)} instead of {size(result['bytes_dense'])} dense")
    table.add_row("  up, down", f"{size(result['bytes_up'])}, {size(result['bytes_down'])}{SAMPLED[run.bytes]}")
    table.add_row("  by the paper's formula", f"{size(result['bytes_up_formula'])}, {size(result['bytes_down_formula'])}")
    table.add_row("time", f"{amount(result['seconds'])} s")
    if result["note"]:
        table.add_row("data", result["note"])
    table.add_row("run folder", str(folder))
    if result["report"]:
        table.add_row("report", result["report"])
    Console(highlight=False).print(table)


def replies(result: dict[str, Any]) -> str:
    """How many came, how many were rejected, and whether some rounds had none."""
    silent = f"; in {result['silent_rounds']} rounds nobody answered" if result["silent_rounds"] else ""
    return f"{result['replied']} of {result['asked']} counted, {result['rejected']} rejected{silent}"


def usual(task: Task, name: str, model: str | None, shared: dict[str, Any]) -> Method:
    """A method with the defaults it has on this task, and what was typed for all."""
    cls = algorithm_class(name)
    return cls(**(settings_of(task, cls, model) | {option: value for option, value in shared.items() if option in cls.offered()}))


def compare_command(named_task: str | None, named_model: str | None) -> Callable[..., int]:
    """`fedsieve compare` with the options of the named task and those all methods share."""
    about = TASKS[named_task if named_task in TASKS else "lr"]
    Data = section(about.options, "DataOptions")  # noqa: N806
    options = section(Method, "SharedOptions", optional=True)

    def compare(
        *,
        task: TaskName = "lr",
        methods: str = "sieve,flops-pa,fed-iter-ht,fed-avg",
        seeds: str = "0,1,2",
        density: float | None = None,
        rounds: Whole | None = None,
        engine: Engine = Engine.BATCHED,
        precision: Precision = Precision.SINGLE,
        device: str = "cpu",
        threads: Whole = 1,
        bytes: Counting = Counting.ENCODED,
        judge: Judge = Judge.TEST,
        model: str | None = None,
        start: Path | None = None,
        config: Path | None = None,
        out: Path | None = None,
        quiet: Flag = False,
        json: Flag = False,
        data=Data(),  # noqa: ANN001, B008
        federation=FEDERATION(),  # noqa: ANN001, B008
        gates: Gating = Gating(),  # noqa: B008
        failures=FAILURES(),  # noqa: ANN001, B008
        privacy=PRIVACY(),  # noqa: ANN001, B008
        algorithm=options(),  # noqa: ANN001, B008
    ) -> int:
        """Train several methods on the same data and seeds: mean +- sd, paired differences, at equal rounds and at equal bytes.

        Parameters
        ----------
        task
            what is learned; --data.* are the options of this task
        methods
            names, separated by commas; the first is what the others are compared with
        seeds
            whole numbers, separated by commas
        density
            fraction of weights that may be non-zero (default: the task's, mostly 0.05)
        rounds
            rounds for every method (default: each method's own)
        engine
            batched is fast, loop is the readable reference
        precision
            double makes both engines give the same bits
        device
            where tensors live
        threads
            threads for tensor arithmetic
        bytes
            encoded: every message is; sampled: one reply an exchange stands for all
        judge
            rows a run is measured on: test, or for tuning a tenth of each client's rows held out (validation)
        model
            of task file: linear, softmax, multilabel or PACKAGE.MODULE:FACTORY (default: what the target suggests)
        start
            weights to start from: a model.safetensors of an earlier run, or a module's own tensors by name
        config
            a TOML file with any of these settings; flags win over it
        out
            folder of the comparison (default: runs/compare-ID)
        quiet
            no progress and no table
        json
            the result as one JSON object on the last line
        """
        names, numbers = comparison.parse(methods, seeds)
        common = {"task": task, "density": density, "rounds": rounds, "engine": engine, "precision": precision}
        common |= {
            "device": device,
            "threads": threads,
            "bytes": bytes,
            "judge": judge,
            "data": about.options(**typed(data)),
            "federation": Federation(**typed(federation)),
            "gates": gates,
            "failures": Failures(**typed(failures)),
            "privacy": Privacy(**typed(privacy)),
            "model": model,
            "start": start,
        }
        shared = typed(algorithm, optional=True)
        for option in shared:
            if not any(option in algorithm_class(name).offered() for name in names):
                raise ValueError(f"--algorithm.{option.replace('_', '-')} has no effect on {' or '.join(names)}; leave it out")
        chosen = {name: usual(about, name, named_model, shared) for name in names}
        runs = [[Run(**common, method=name, seed=s, algorithm=algorithm) for name, algorithm in chosen.items()] for s in numbers]
        folder = store.claim(out or Path("runs") / comparison.identity(runs), chosen=out is not None)
        histories: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
        for per_seed in runs:
            problem = Problem(per_seed[0])
            for run in per_seed:
                inner = folder / f"{run.method}-seed{run.seed}"
                inner.mkdir()
                folders.begin(run, problem.for_run(run), inner, quiet=quiet)
                histories[run.method].append(store.read_metrics(inner))
        result = comparison.compare(histories, runs[0][0].metric, numbers)
        result = {"run": str(folder), "task": task, **result}
        store.replace(folder / store.RESULT, json_text.dumps(result, indent=1).encode())
        result["report"] = leave(folder)
        if json:
            print(json_text.dumps(result))
        elif not quiet:
            comparison.show(result)
        return 0

    compare.__annotations__ |= {"algorithm": options, "data": Data, "federation": FEDERATION, "failures": FAILURES, "privacy": PRIVACY}
    return compare
