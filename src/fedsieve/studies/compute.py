"""Computes a study: runs over conditions and seeds, each run once, in several processes; can be stopped and continued at any time."""

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from fedsieve import __version__
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.processes import divide_workers, map_runs
from fedsieve.experiments.resolve import ResolvedRun, resolve
from fedsieve.experiments.simulation import cached_simulation, data_key
from fedsieve.experiments.summary import summarize
from fedsieve.experiments.training import run_rounds
from fedsieve.formatting import ProgressBar
from fedsieve.runtime.cores import Workers, require_workers
from fedsieve.runtime.evaluation import DivergedError
from fedsieve.studies import results
from fedsieve.studies.gate_trace import GateTrace, evenly_spaced
from fedsieve.studies.results import Row

MAX_CURVE_POINTS = 100
"""Maximum number of rounds stored of a curve."""
CURVE_NAMES = ("mse", "ce", "dense_value", "tdr", "tdr_features", "expected_density", "test_density", "multiplier")
"""Curves that are stored in addition to the metric and the bytes."""
NODE_CURVES = ("worst_node", "mean_node", "consensus_distance", "support_agreement")
"""Curves of runs without a server; the first two are measured in some rounds only."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One entry of a table or one line of a figure: a label, and a run for each seed."""

    label: Mapping[str, Any]
    config_for_seed: Callable[[int], RunConfig]
    seeds: Sequence[int]
    trace: bool = False
    """whether to record the gates of every round, for heatmaps"""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Conditions that answer one question."""

    name: str
    description: str
    conditions: Sequence[Condition]
    scale: str = ""
    """the name of its size, for reports"""


class Job(NamedTuple):
    """One run to compute. Contains settings because a RunConfig cannot be pickled."""

    settings: dict[str, Any]
    key: str
    data_key: str
    label: Mapping[str, Any]
    trace: bool


def run_key(run: ResolvedRun) -> str:
    """Return a hash of all settings that determine the result."""
    return blake2b(json.dumps(run.settings_dict, sort_keys=True).encode(), digest_size=12).hexdigest()


def list_jobs(study: Study) -> list[Job]:
    """Return every run of a study, condition by condition."""
    jobs = []
    for condition in study.conditions:
        for seed in condition.seeds:
            run = resolve(condition.config_for_seed(seed))
            settings = {field.name: getattr(run.config, field.name) for field in fields(RunConfig)}
            jobs.append(Job(settings, run_key(run), data_key(run), dict(condition.label), condition.trace))
    return jobs


def compute_study(study: Study, folder: Path, *, workers: Workers = 1, quiet: bool = False) -> list[Row]:
    """Return all rows of a study. Rows in this folder or in sibling folders are reused; the others are computed and stored."""
    require_workers(workers)
    jobs = list_jobs(study)
    writer = results.RowWriter(folder)
    results.write_plan(folder, study.name, study.description, study.scale, [(job.key, job.label) for job in jobs])
    stored = {(row["key"], results.label_key(row["label"])): row for row in results.all_rows(folder)}
    by_key = {row["key"]: row for row in (*rows_of_sibling_studies(folder), *stored.values()) if row["state"] != results.FAILED}
    missing: dict[str, list[Job]] = {}
    for job in jobs:
        row = stored.get((job.key, results.label_key(job.label)))
        if row is not None and _is_usable(row, job):
            continue
        if job.key in by_key and _is_usable(by_key[job.key], job):
            writer.append({**by_key[job.key], "study": study.name, "label": job.label})
        else:
            missing.setdefault(job.key, []).append(job)
    with ProgressBar(sum(map(len, missing.values())), study.name, "run", quiet=quiet) as bar:
        # Several labels may share a run: it is computed once, with a trace if one of them needs it.
        unique = [same_run[0]._replace(trace=any(job.trace for job in same_run)) for same_run in missing.values()]
        unique.sort(key=lambda job: (job.settings["seed"], job.data_key))  # so that consecutive runs share their data
        num_processes, workers_of_run = divide_workers(workers, len(unique))
        tasks = [(job._replace(settings={**job.settings, "workers": workers_of_run}),) for job in unique]
        for row in map_runs(run_job, tasks, num_processes):
            for job in missing[row["key"]]:
                writer.append({**row, "study": study.name, "label": job.label})
                bar.advance(" ".join(map(str, job.label.values())) + f" seed {row['seed']}: {describe_row(row)}")
    return results.read_rows(folder)


def _is_usable(row: Row, job: Job) -> bool:
    return row["state"] != results.FAILED and (not job.trace or row["trace"] is not None or row["state"] != results.DONE)


def rows_of_sibling_studies(folder: Path) -> Iterator[Row]:
    """Yield the rows of the studies in the same parent folder, so that a shared run is computed once."""
    for path in sorted(folder.parent.glob(f"*/{results.ROWS_FILE}")):
        if path.parent != folder:
            yield from results.all_rows(path.parent)


def describe_row(row: Row) -> str:
    """Return a short description of a result."""
    return f"{row['metric']} {row['values']['value']:.4f}" if row["state"] == results.DONE else f"{row['state'].upper()}: {row['reason']}"


def run_job(job: Job) -> Row:
    """Execute a run and return its row, also if the run diverges or fails."""
    row: Row = {"key": job.key, "label": job.label, "seed": job.settings["seed"], "version": __version__, "curves": {}, "trace": None}
    row |= {"state": results.DONE, "reason": None, "values": {}, "bytes": {}, "metric": None, "rounds": 0, "seconds": None}
    row |= {"note": None, "data": None}
    try:
        _execute(job, row)
    except DivergedError as error:
        row |= {"state": results.DIVERGED, "reason": str(error)}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        row |= {"state": results.FAILED, "reason": f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"}
    return row


def _execute(job: Job, row: Row) -> None:
    """Fill in the results of a run; the curves also if it diverges."""
    run = resolve(RunConfig(**job.settings))
    row |= {"run": run.id, "metric": run.metric, "density": run.density, "config": run.settings_dict}
    simulation = cached_simulation(run)
    row["data"] = simulation.dataset.description
    trace = GateTrace(run.algorithm) if job.trace else None
    metrics, server = [], None
    try:
        for measured in run_rounds(run, simulation):
            metrics.append(measured.metrics)
            server = measured.result.server
            if trace is not None:
                trace.record(server, measured.parameters)
    finally:
        row["curves"] = extract_curves(metrics, run.metric)
    summary = summarize(run, simulation, metrics, server)
    row |= {"rounds": len(metrics), "seconds": summary["seconds"], "note": summary["note"], "trace": trace and trace.to_dict()}
    row["values"] = {name: value for name, value in summary.items() if isinstance(value, float) and name != "seconds"}
    row["values"]["dense_value"] = metrics[-1].get("dense_value")
    row["bytes"] = {name.removeprefix("bytes_"): summary[name] for name in summary if name.startswith(("bytes_up", "bytes_down"))}


def extract_curves(metrics: list[dict[str, Any]], metric: str) -> dict[str, list[float | None]]:
    """Return the curves of the figures at no more than `MAX_CURVE_POINTS` rounds, including the last."""
    if not metrics:
        return {}
    indices = evenly_spaced(len(metrics), MAX_CURVE_POINTS)
    cumulative_bytes, total = [], 0
    for row in metrics:
        total += row["bytes_up"] + row["bytes_down"]
        cumulative_bytes.append(total)
    curves = {"round": [metrics[i]["round"] for i in indices], "bytes": [cumulative_bytes[i] for i in indices]}
    for name in (metric, *CURVE_NAMES, *NODE_CURVES):
        if any(name in row for row in metrics):
            curves[name] = [None if name not in metrics[i] else float(f"{metrics[i][name]:.6g}") for i in indices]
    return curves
