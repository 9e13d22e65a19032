"""The command `fedsieve compare` and its table."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import require_recipes
from fedsieve.cli.help import documented_command
from fedsieve.cli.train import hint_resume
from fedsieve.core.settings import ALGORITHM_KEY, build_settings, field_types, parse_settings
from fedsieve.experiments import compare as comparison
from fedsieve.experiments import runner
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.config_io import build_config, parse_names, section_classes, setting_types
from fedsieve.experiments.processes import divide_workers, map_runs
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.experiments.simulation import cached_simulation
from fedsieve.experiments.trackers import Tracker, check_installed
from fedsieve.formatting import PlainConsole, ProgressBar, format_bytes, format_number
from fedsieve.report.html.page import write_default_report
from fedsieve.runtime.cores import Workers
from fedsieve.storage import run_directory


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of the command, beside the settings of its runs."""

    algorithms: str = "sieve,flops-pa,fed-iter-ht,fed-avg"
    """names of algorithms, separated by commas; the others are compared with the first"""
    seeds: str = "0,1,2"
    """whole numbers, separated by commas"""
    config: Path | None = None
    """TOML file with any of these settings; options on the command line take precedence"""
    out: Path | None = None
    """directory of the comparison (default: runs/compare-ID); an interrupted comparison resumes there"""
    trust: bool = False
    """import and call a PACKAGE.MODULE:FACTORY that the file of --config names; --model on the command line needs no flag"""
    tracker: Tracker | None = None
    """also write every round of every run to a tracker, on this machine unless its own settings name a server"""
    quiet: bool = False
    """print no progress and no table"""
    json: bool = False
    """print the result as one JSON object on the last line"""


def option_types(task: str) -> dict[str, Any]:
    """Return the type of every option by key; the options of algorithms are those that all share."""
    first = field_types(CompareOptions, ("algorithms", "seeds"))
    recipe = field_types(BaseAlgorithm, ("recipe",), "algorithm")
    types = first | setting_types(task, BaseAlgorithm) | recipe | field_types(CompareOptions)
    return {key: kind for key, kind in types.items() if key not in (ALGORITHM_KEY, "seed")}


def document(values: Mapping[str, Any], *, show_all: bool) -> Callable[..., None]:
    """Return the command with the options of the task in `values`; the defaults of algorithms differ and are not shown."""
    task, _ = parse_names(values, "--")
    types = option_types(task)
    classes = {CompareOptions: "", RunConfig: "", BaseAlgorithm: "algorithm"} | {cls: name for name, cls in section_classes(task).items()}
    return documented_command(types, classes, {key: None for key in types if key.startswith("algorithm.")}, show_all=show_all)


def compare(values: Mapping[str, Any]) -> int:
    """Compare algorithms on the same data and seeds: mean +- sd and paired differences, at equal rounds and at equal bytes."""
    task, _ = parse_names(values, "--")
    parsed = parse_settings(option_types(task), values, "--")
    options, config = build_settings(CompareOptions, parsed), build_config(parsed)
    names, seeds = comparison.parse_algorithms_and_seeds(options.algorithms, options.seeds)
    check_installed(options.tracker)
    algorithm_options = select_options(names, config)
    runs = [
        [resolve(replace(config, algorithm_name=name, seed=seed, algorithm=algorithm_options[name])) for name in names] for seed in seeds
    ]
    folder = options.out or Path("runs") / comparison.comparison_id(runs)
    if not comparison.is_resumable(folder, runs):
        folder = run_directory.create_run_dir(folder, explicit=options.out is not None)
    with hint_resume("the same command"):
        compute_runs([run for per_seed in runs for run in per_seed], folder, options, config.workers)
    histories = {
        name: [run_directory.read_metrics(folder / comparison.run_name(per_seed[i])) for per_seed in runs] for i, name in enumerate(names)
    }
    result = comparison.compare_histories(histories, runs[0][0].metric, seeds)
    described = (run_directory.read_result(folder / comparison.run_name(run))["data"] for per_seed in runs for run in per_seed)
    recipes = {name: algorithm_options[name].get("recipe") for name in names}
    result = {"run": str(folder), "task": task, "data": "; ".join(dict.fromkeys(described)), "recipes": recipes, **result}
    run_directory.atomic_write(folder / run_directory.RESULT, json.dumps(result, indent=1).encode())
    result["report"] = write_default_report(folder)
    if options.json:
        print(json.dumps(result))
    elif not options.quiet:
        print_comparison(result)
    return 0


def compute_runs(runs: list[ResolvedRun], folder: Path, options: CompareOptions, workers: Workers) -> None:
    """Compute the runs in their folders, several at a time; with several processes one progress bar shows the finished runs."""
    num_processes, workers_of_run = divide_workers(workers, len(runs))
    is_quiet = options.quiet or num_processes > 1
    tasks = [
        ({f.name: getattr(run.config, f.name) for f in fields(RunConfig)} | {"workers": workers_of_run}, folder, is_quiet, options.tracker)
        for run in runs
    ]
    with ProgressBar(len(tasks), "compare", "run", quiet=options.quiet or num_processes == 1) as bar:
        for finished in map_runs(compute_run, tasks, num_processes):
            bar.advance(finished)


def compute_run(settings: dict[str, Any], folder: Path, is_quiet: bool, tracker: Tracker | None) -> str:
    """Start or resume one run of the comparison and return its name."""
    run = resolve(RunConfig(**settings))
    name = comparison.run_name(run)
    runner.start_or_resume(run, cached_simulation(run), folder / name, quiet=is_quiet, tracker=tracker)
    return name


def select_options(names: list[str], config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the shared options that each algorithm has; an option that none has is an error."""
    assert isinstance(config.algorithm, Mapping)
    supported = {name: algorithm_class(name).option_names() for name in names}
    if not any("recipe" in option_names for option_names in supported.values()):
        require_recipes(names[0], config.algorithm.get("recipe"))
    for option in config.algorithm:
        if not any(option in option_names for option_names in supported.values()):
            raise ValueError(f"--algorithm.{option.replace('_', '-')} has no effect on {' or '.join(names)}; leave it out")
    return {name: {option: value for option, value in config.algorithm.items() if option in supported[name]} for name in names}


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
    console = PlainConsole()
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
            recipe = result["recipes"][name]
            table.add_row(
                name if recipe is None else f"{name} ({recipe})",
                _format_mean_and_sd(part),
                own,
                "" if entry["tdr"]["mean"] is None else f"{entry['tdr']['mean']:.2f}",
                format_bytes(entry["bytes_up"] + entry["bytes_down"]),
            )
        console.print(table)
    if recipe := next(filter(None, result["recipes"].values()), None):
        others = ", ".join(name for name in result["recipes"] if result["recipes"][name] is None)
        console.print(
            f"recipe {recipe} in brackets" + (f"; without recipes, with their defaults: {others}" if others else ""), soft_wrap=True
        )
    console.print(f"data: {result['data']}", soft_wrap=True)
    console.print(f"runs in {result['run']}")
    if result["report"]:
        console.print(f"report in {result['report']}")
