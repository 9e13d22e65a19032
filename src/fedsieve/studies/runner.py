"""A study: named cells of runs over seeds, computed once each, by several processes, to be broken off and taken up at any time."""

import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from fedsieve import __version__
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.runner import run_rounds, summarize
from fedsieve.experiments.simulation import Simulation
from fedsieve.formatting import ProgressBar
from fedsieve.runtime.evaluation import DivergedError
from fedsieve.studies import results
from fedsieve.studies.gate_trace import GateTrace
from fedsieve.studies.results import Row

MAX_CURVE_POINTS = 100
"""Rounds kept of a curve at most."""
CURVE_NAMES = ("dense_value", "tdr", "tdr_features", "expected_density", "test_density", "multiplier")
"""Stored per round beside the metric and the bytes."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One entry of a table or one line of a figure: what it is called, and its run for each seed."""

    label: Mapping[str, Any]
    config_for_seed: Callable[[int], RunConfig]
    seeds: Sequence[int]
    trace: bool = False
    """whether gates are followed through the rounds, for maps"""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Cells that answer one question."""

    name: str
    description: str
    conditions: Sequence[Condition]
    scale: str = ""
    """how large it is, for those who read its numbers"""


class Job(NamedTuple):
    """One run to compute; settings instead of a run, which cannot be sent to another process."""

    settings: dict[str, Any]
    key: str
    data_key: str
    label: Mapping[str, Any]
    trace: bool


def run_key(run: RunConfig) -> str:
    """What decides the result, as a hash."""
    return blake2b(json.dumps(run.settings_dict, sort_keys=True).encode(), digest_size=12).hexdigest()


def data_key(run: RunConfig) -> str:
    """Runs that agree in this share their rows."""
    place = run.federation
    parts = {**asdict(run.data), "task": run.task, "seed": run.seed, "evaluate_on": run.evaluate_on, "server": place.server_examples}
    parts |= {"clients": place.clients, "partition": place.partition, "alpha": place.alpha}
    return json.dumps(parts, sort_keys=True, default=str)


def list_jobs(study: Study) -> list[Job]:
    """Every run of a study, cell by cell."""
    jobs = []
    for cell in study.conditions:
        for seed in cell.seeds:
            run = cell.config_for_seed(seed)
            settings = {field.name: getattr(run, field.name) for field in fields(run)}
            jobs.append(Job(settings, run_key(run), data_key(run), dict(cell.label), cell.trace))
    return jobs


def compute_study(study: Study, folder: Path, *, num_processes: int = 1, quiet: bool = False) -> list[Row]:
    """All rows of a study: those on disk here or in a study beside this one, and the others computed and stored one by one."""
    if num_processes < 1:
        raise ValueError(f"--jobs is a number of processes and must be at least 1; got {num_processes}")
    asked = list_jobs(study)
    writer = results.RowWriter(folder)
    results.write_plan(folder, study.name, study.description, study.scale, [(job.key, job.label) for job in asked])
    here = {(row["key"], results.label_key(row["label"])): row for row in results.all_rows(folder)}
    known = {row["key"]: row for row in (*rows_of_sibling_studies(folder), *here.values()) if row["state"] != results.FAILED}
    missing: dict[str, list[Job]] = {}
    for job in asked:
        own = here.get((job.key, results.label_key(job.label)))
        if own is not None and _is_usable(own, job):
            continue
        if job.key in known and _is_usable(known[job.key], job):
            writer.append({**known[job.key], "study": study.name, "label": job.label})
        else:
            missing.setdefault(job.key, []).append(job)
    with ProgressBar(sum(map(len, missing.values())), study.name, "run", quiet=quiet) as bar:
        once = [twins[0]._replace(trace=any(twin.trace for twin in twins)) for twins in missing.values()]
        once.sort(key=lambda job: (job.settings["seed"], job.data_key))  # runs on the same rows next to each other
        for row in _compute_rows(once, num_processes):
            for twin in missing[row["key"]]:
                writer.append({**row, "study": study.name, "label": twin.label})
                bar.advance(" ".join(map(str, twin.label.values())) + f" seed {row['seed']}: {describe_row(row)}")
    return results.read_rows(folder)


def _is_usable(row: Row, job: Job) -> bool:
    return row["state"] != results.FAILED and (not job.trace or row["trace"] is not None or row["state"] != results.DONE)


def rows_of_sibling_studies(folder: Path) -> Iterator[Row]:
    """Rows of the studies beside this one: a run that two studies share is computed once."""
    for path in sorted(folder.parent.glob(f"*/{results.ROWS_FILE}")):
        if path.parent != folder:
            yield from results.all_rows(path.parent)


def describe_row(row: Row) -> str:
    """A row in a few words."""
    return f"{row['metric']} {row['values']['value']:.4f}" if row["state"] == results.DONE else f"{row['state'].upper()}: {row['reason']}"


def _compute_rows(jobs: list[Job], num_processes: int) -> Iterator[Row]:
    """Rows as they are finished."""
    if num_processes == 1 or len(jobs) < 2:
        yield from map(run_job, jobs)
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=context, initializer=_init_worker, initargs=(stop,))
    try:
        for finished in as_completed([pool.submit(run_job, job) for job in jobs]):
            yield finished.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _init_worker(stop_event: Any) -> None:
    """A worker leaves Ctrl-C to its parent, and leaves itself when told to or when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while not stop_event.wait(1.0):
            if not multiprocessing.parent_process().is_alive():
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_cached_simulation: dict[str, Simulation] = {}
"""The rows this process used last; the next run is often on the same."""


def run_job(job: Job) -> Row:
    """Execute a run; whatever happens is a row."""
    row = {"key": job.key, "label": job.label, "seed": job.settings["seed"], "version": __version__, "curves": {}, "trace": None}
    row |= {"state": results.DONE, "reason": None, "values": {}, "bytes": {}, "metric": None, "rounds": 0, "seconds": None, "note": None}
    try:
        run = RunConfig(**job.settings)
        row |= {"run": run.id, "metric": run.metric, "density": run.density, "config": run.settings_dict}
        if job.data_key not in _cached_simulation:
            _cached_simulation.clear()
            _cached_simulation[job.data_key] = Simulation(run)
        problem = _cached_simulation[job.data_key].with_config(run)
        rows, trace = [], GateTrace(run.algorithm) if job.trace else None
        try:
            for step in run_rounds(run, problem):
                rows.append(step.metrics)
                if trace is not None:
                    trace.record(step.result.server, step.parameters)
        finally:
            row["curves"] = extract_curves(rows, run.metric)
        found = summarize(run, problem, rows, step.parameters)
        row |= {"rounds": len(rows), "seconds": found["seconds"], "note": found["note"], "trace": trace and trace.to_dict()}
        row["values"] = {name: value for name, value in found.items() if isinstance(value, float) and name != "seconds"}
        row["values"]["dense_value"] = rows[-1].get("dense_value")
        row["bytes"] = {name.removeprefix("bytes_"): found[name] for name in found if name.startswith(("bytes_up", "bytes_down"))}
    except DivergedError as problem:
        row |= {"state": results.DIVERGED, "reason": str(problem)}
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        row |= {"state": results.FAILED, "reason": f"{type(problem).__name__}: {problem} ({Path(place.filename).name}:{place.lineno})"}
    return row


def extract_curves(rows: list[dict[str, Any]], metric: str) -> dict[str, list[float | None]]:
    """What figures draw, at no more than `POINTS` rounds, the last always among them."""
    if not rows:
        return {}
    kept = sorted(
        {round(i * (len(rows) - 1) / max(min(MAX_CURVE_POINTS, len(rows)) - 1, 1)) for i in range(min(MAX_CURVE_POINTS, len(rows)))}
    )
    spent, total = [], 0
    for row in rows:
        total += row["bytes_up"] + row["bytes_down"]
        spent.append(total)
    found = {"round": [rows[i]["round"] for i in kept], "bytes": [spent[i] for i in kept]}
    for name in (metric, *CURVE_NAMES):
        if any(name in row for row in rows):
            found[name] = [None if name not in rows[i] else float(f"{rows[i][name]:.6g}") for i in kept]
    return found
