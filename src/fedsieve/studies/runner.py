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
from fedsieve.experiments.config import Run
from fedsieve.experiments.simulation import Problem
from fedsieve.experiments.training import DivergedError, execute, summary
from fedsieve.formatting import Counted
from fedsieve.studies import results
from fedsieve.studies.gate_trace import Trace
from fedsieve.studies.results import Row

POINTS = 100
"""Rounds kept of a curve at most."""
CURVES = ("full", "tdr", "tdr_rows", "expected_density", "test_density", "multiplier")
"""Stored per round beside the metric and the bytes."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of a table or one line of a figure: what it is called, and its run for each seed."""

    label: Mapping[str, Any]
    run: Callable[[int], Run]
    seeds: Sequence[int]
    trace: bool = False
    """whether gates are followed through the rounds, for maps"""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Cells that answer one question."""

    name: str
    about: str
    cells: Sequence[Cell]
    scale: str = ""
    """how large it is, for those who read its numbers"""


class Job(NamedTuple):
    """One run to compute; settings instead of a run, which cannot be sent to another process."""

    settings: dict[str, Any]
    key: str
    data: str
    label: Mapping[str, Any]
    trace: bool


def key_of(run: Run) -> str:
    """What decides the result, as a hash."""
    return blake2b(json.dumps(run.config, sort_keys=True).encode(), digest_size=12).hexdigest()


def data_key(run: Run) -> str:
    """Runs that agree in this share their rows."""
    place = run.federation
    parts = {**asdict(run.data), "task": run.task, "seed": run.seed, "judge": run.judge, "server": place.server_rows}
    parts |= {"clients": place.clients, "partition": place.partition, "alpha": place.alpha}
    return json.dumps(parts, sort_keys=True, default=str)


def jobs_of(study: Study) -> list[Job]:
    """Every run of a study, cell by cell."""
    jobs = []
    for cell in study.cells:
        for seed in cell.seeds:
            run = cell.run(seed)
            settings = {field.name: getattr(run, field.name) for field in fields(run)}
            jobs.append(Job(settings, key_of(run), data_key(run), dict(cell.label), cell.trace))
    return jobs


def compute(study: Study, folder: Path, *, jobs: int = 1, quiet: bool = False) -> list[Row]:
    """All rows of a study: those on disk here or in a study beside this one, and the others computed and stored one by one."""
    if jobs < 1:
        raise ValueError(f"--jobs is a number of processes and must be at least 1; got {jobs}")
    asked = jobs_of(study)
    writer = results.Writer(folder)
    results.plan(folder, study.name, study.about, study.scale, [(job.key, job.label) for job in asked])
    here = {(row["key"], results.named(row["label"])): row for row in results.stored(folder)}
    known = {row["key"]: row for row in (*neighbours(folder), *here.values()) if row["state"] != results.FAILED}
    missing: dict[str, list[Job]] = {}
    for job in asked:
        own = here.get((job.key, results.named(job.label)))
        if own is not None and _serves(own, job):
            continue
        if job.key in known and _serves(known[job.key], job):
            writer.append({**known[job.key], "study": study.name, "label": job.label})
        else:
            missing.setdefault(job.key, []).append(job)
    with Counted(sum(map(len, missing.values())), study.name, "run", quiet=quiet) as bar:
        once = [twins[0]._replace(trace=any(twin.trace for twin in twins)) for twins in missing.values()]
        once.sort(key=lambda job: (job.settings["seed"], job.data))  # runs on the same rows next to each other
        for row in _computed(once, jobs):
            for twin in missing[row["key"]]:
                writer.append({**row, "study": study.name, "label": twin.label})
                bar.advance(" ".join(map(str, twin.label.values())) + f" seed {row['seed']}: {said(row)}")
    return results.read(folder)


def _serves(row: Row, job: Job) -> bool:
    return row["state"] != results.FAILED and (not job.trace or row["trace"] is not None or row["state"] != results.DONE)


def neighbours(folder: Path) -> Iterator[Row]:
    """Rows of the studies beside this one: a run that two studies share is computed once."""
    for path in sorted(folder.parent.glob(f"*/{results.ROWS}")):
        if path.parent != folder:
            yield from results.stored(path.parent)


def said(row: Row) -> str:
    """A row in a few words."""
    return f"{row['metric']} {row['values']['value']:.4f}" if row["state"] == results.DONE else f"{row['state'].upper()}: {row['reason']}"


def _computed(jobs: list[Job], processes: int) -> Iterator[Row]:
    """Rows as they are finished."""
    if processes == 1 or len(jobs) < 2:
        yield from map(compute_one, jobs)
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context, initializer=_settle, initargs=(stop,))
    try:
        for finished in as_completed([pool.submit(compute_one, job) for job in jobs]):
            yield finished.result()
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _settle(stop: Any) -> None:
    """A worker leaves Ctrl-C to its parent, and leaves itself when told to or when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while not stop.wait(1.0):
            if not multiprocessing.parent_process().is_alive():
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_last: dict[str, Problem] = {}
"""The rows this process used last; the next run is often on the same."""


def compute_one(job: Job) -> Row:
    """Execute a run; whatever happens is a row."""
    row = {"key": job.key, "label": job.label, "seed": job.settings["seed"], "version": __version__, "curves": {}, "trace": None}
    row |= {"state": results.DONE, "reason": None, "values": {}, "bytes": {}, "metric": None, "rounds": 0, "seconds": None, "note": None}
    try:
        run = Run(**job.settings)
        row |= {"run": run.id, "metric": run.metric, "density": run.density, "config": run.config}
        if job.data not in _last:
            _last.clear()
            _last[job.data] = Problem(run)
        problem = _last[job.data].for_run(run)
        rows, trace = [], Trace(run.algorithm) if job.trace else None
        try:
            for step in execute(run, problem):
                rows.append(step.row)
                if trace is not None:
                    trace.follow(step.round.server, step.theta)
        finally:
            row["curves"] = curves(rows, run.metric)
        found = summary(run, problem, rows, step.theta)
        row |= {"rounds": len(rows), "seconds": found["seconds"], "note": found["note"], "trace": trace and trace.stored()}
        row["values"] = {name: value for name, value in found.items() if isinstance(value, float) and name != "seconds"}
        row["values"]["full"] = rows[-1].get("full")
        row["bytes"] = {name.removeprefix("bytes_"): found[name] for name in found if name.startswith(("bytes_up", "bytes_down"))}
    except DivergedError as problem:
        row |= {"state": results.DIVERGED, "reason": str(problem)}
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        row |= {"state": results.FAILED, "reason": f"{type(problem).__name__}: {problem} ({Path(place.filename).name}:{place.lineno})"}
    return row


def curves(rows: list[dict[str, Any]], metric: str) -> dict[str, list[float | None]]:
    """What figures draw, at no more than `POINTS` rounds, the last always among them."""
    if not rows:
        return {}
    kept = sorted({round(i * (len(rows) - 1) / max(min(POINTS, len(rows)) - 1, 1)) for i in range(min(POINTS, len(rows)))})
    spent, total = [], 0
    for row in rows:
        total += row["bytes_up"] + row["bytes_down"]
        spent.append(total)
    found = {"round": [rows[i]["round"] for i in kept], "bytes": [spent[i] for i in kept]}
    for name in (metric, *CURVES):
        if any(name in row for row in rows):
            found[name] = [None if name not in rows[i] else float(f"{rows[i][name]:.6g}") for i in kept]
    return found
