"""The command `fedsieve compare` and its table."""

import json as json_text
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.cli.options import Switch, option_class, to_kwargs
from fedsieve.cli.train import COMMON_OPTIONS, FLATTENED, PANELS, EarlyArguments, hint_resume, run_options, run_settings, select_task
from fedsieve.experiments import compare as comparison
from fedsieve.experiments import runner
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.tasks import Task, default_options
from fedsieve.experiments.trackers import Tracker, check_installed
from fedsieve.formatting import format_bytes, format_number
from fedsieve.report.html.page import write_default_report
from fedsieve.storage import run_directory


def default_algorithm(task: Task, name: str, model: str | None, shared: dict[str, Any]) -> BaseAlgorithm:
    """Return an algorithm with its defaults on the task and the options set for all algorithms."""
    cls = algorithm_class(name)
    return cls(**(default_options(task, cls, model) | {option: value for option, value in shared.items() if option in cls.option_names()}))


def compare_command(arguments: EarlyArguments) -> Callable[..., int]:
    """Return `fedsieve compare` with the options of the task and those that all algorithms share."""
    about = select_task(arguments)
    offered = run_options(
        about,
        option_class(
            BaseAlgorithm,
            "SharedOptions",
            optional=True,
            group=PANELS["algorithm"],
            prefix="algorithm",
            shown=None if arguments.show_all else COMMON_OPTIONS["algorithm"],
        ),
        exclude=("algorithm_name", "seed"),
        show_all=arguments.show_all,
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
        """Compare algorithms on the same data and seeds: mean +- sd and paired differences, at equal rounds and at equal bytes.

        --help-all shows every option.

        Parameters
        ----------
        algorithms
            names of algorithms, separated by commas; the others are compared with the first
        seeds
            whole numbers, separated by commas
        config
            TOML file with any of these settings; options on the command line take precedence
        out
            directory of the comparison (default: runs/compare-ID); an interrupted comparison resumes there
        tracker
            also write every round of every run to a tracker, on this machine unless its own settings name a server
        quiet
            print no progress and no table
        json
            print the result as one JSON object on the last line
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
                simulation = Simulation(per_seed[0])
                for run in per_seed:
                    inner = folder / comparison.run_name(run)
                    runner.start_or_resume(run, simulation.with_config(run), inner, quiet=quiet, tracker=tracker)
                    histories[run.algorithm_name].append(run_directory.read_metrics(inner))
        result = comparison.compare_histories(histories, runs[0][0].metric, numbers)
        result = {"run": str(folder), "task": common["task"], **result}
        run_directory.atomic_write(folder / run_directory.RESULT, json_text.dumps(result, indent=1).encode())
        result["report"] = write_default_report(folder)
        if json:
            print(json_text.dumps(result))
        elif not quiet:
            print_comparison(result)
        return 0

    compare.__annotations__ |= {"options": Annotated[offered, FLATTENED]}
    return compare


def _format_mean_and_sd(statistics: dict[str, float | None]) -> str:
    if statistics["mean"] is None:
        return "no round fits"
    return format_number(statistics["mean"]) + (f" +- {format_number(statistics['sd'])}" if statistics["sd"] is not None else "")


def _format_difference(statistics: dict[str, float | None]) -> str:
    if statistics["difference"] is None:
        return ""
    return f"{statistics['difference']:+.4f}" + (
        f" +- {format_number(statistics['interval'])}" if statistics["interval"] is not None else ""
    )


def print_comparison(result: dict[str, Any]) -> None:
    """Print one table at equal rounds and one at equal bytes, in at most 80 columns."""
    console = Console(highlight=False)
    seeds = ", ".join(map(str, result["seeds"]))
    for key, title in (
        ("equal_rounds", "after all rounds"),
        ("equal_bytes", f"at {format_bytes(result['equal_bytes_limit'])} sent, what the cheapest needs"),
    ):
        table = Table(title=f"{result['metric']} {title} (mean +- sd, seeds {seeds})", title_justify="left")
        for column in ("algorithm", result["metric"], f"less {result['base']} (95 %)", "TDR", "bytes"):
            table.add_column(column, justify="left" if column == "algorithm" else "right")
        for name, entry in result["algorithms"].items():
            part = entry[key]
            own = "" if name == result["base"] else _format_difference(part)
            table.add_row(
                name,
                _format_mean_and_sd(part),
                own,
                "" if entry["tdr"]["mean"] is None else f"{entry['tdr']['mean']:.2f}",
                format_bytes(entry["bytes_up"] + entry["bytes_down"]),
            )
        console.print(table)
    console.print(f"runs in {result['run']}")
    if result["report"]:
        console.print(f"report in {result['report']}")
