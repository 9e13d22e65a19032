"""The page: one self-contained HTML file from stored results."""

import shlex
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import fedsieve
from fedsieve.report.html import clients, gossip_nodes, overview, supports, training_charts
from fedsieve.report.html.elements import Html, PageLimits, element
from fedsieve.report.html.run_record import RunRecord, find_runs, read_comparison, read_run
from fedsieve.storage import run_directory
from fedsieve.studies.results import find_studies

RESOURCES = files("fedsieve.report.html")


def render_report(folders: Sequence[Path], *, live: bool = False) -> str:
    """Return the page about the runs or studies in these directories; a `live` page polls its server."""
    if studies := [place for folder in folders for place in find_studies(folder)]:
        from fedsieve.report.html.study_section import render_study  # loads matplotlib, which the page of a run does not need

        title = studies[0].name if len(studies) == 1 else f"{len(studies)} studies"
        return render_document(title, Html("".join(map(render_study, studies))), live=live)
    runs = [read_run(place) for folder in folders for place in find_runs(folder)]
    if not any(run.rows for run in runs) and not live:
        raise run_directory.RunDirectoryError(f"{runs[0].folder} has no finished round yet")
    comparison = read_comparison(folders[0]) if len(folders) == 1 else None
    try:
        return render_runs(runs, comparison, live=live)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        names = ", ".join(map(str, folders))
        raise run_directory.RunDirectoryError(f"{names} has a file that fedsieve did not write: {type(error).__name__} {error}") from error


def render_runs(runs: list[RunRecord], comparison: Mapping[str, Any] | None, *, live: bool) -> str:
    """Return the page of one run, or the overview of several runs followed by each of them."""
    if len(runs) == 1:
        run = runs[0]
        body = element("section", element("h2", f"{run.name}, seed {run.seed}"), render_run(run, PageLimits()))
        return render_document(f"{run.algorithm} on {run.task}", body, live=live)
    limits = PageLimits(len(runs))
    links = {i: f"run-{i + 1}" for i in range(len(runs))}
    order = list(comparison["algorithms"]) if comparison else sorted({run.algorithm for run in runs})
    runs = sorted(runs, key=lambda run: (run.task, order.index(run.algorithm) if run.algorithm in order else len(order), run.seed))
    headings = (element("h2", f"{run.name}: {run.algorithm} on {run.task}, seed {run.seed}") for run in runs)
    details = (
        element("details", element("summary", heading), render_run(run, limits), id=links[i], class_="run")
        for i, (run, heading) in enumerate(zip(runs, headings, strict=True))
    )
    body = overview.overview_sections(runs, limits, comparison, links) + element("section", element("h2", "Each run"), *details)
    return render_document(page_title(runs), Html(body), live=live)


def page_title(runs: Sequence[RunRecord]) -> str:
    """Return the title of several runs."""
    algorithms, tasks = (", ".join(dict.fromkeys(names)) for names in ([run.algorithm for run in runs], [run.task for run in runs]))
    return f"{len(runs)} runs: {algorithms} on {tasks}"


def render_run(run: RunRecord, limits: PageLimits) -> Html:
    """Return all sections of one run."""
    if not run.rows:
        return element("p", "No round is finished yet.")
    copy = run.folder.with_name(run.folder.name + "-again")
    command = f"fedsieve train --config {shlex.quote(str(run.folder / run_directory.CONFIG))} --out {shlex.quote(str(copy))}"
    parts = (
        training_charts.headline_section(run),
        training_charts.quality_section(run, limits),
        gossip_nodes.nodes_section(run, limits),
        training_charts.density_section(run, limits),
        training_charts.traffic_section(run, limits),
        supports.stability_section(run, limits),
        supports.recovery_section(run, limits),
        supports.kept_weights_section(run, limits),
        clients.clients_section(run, limits),
        clients.privacy_section(run, limits),
        training_charts.reproduction_section(run, run_directory.to_toml(run.config), command),
    )
    return Html("".join(part for part in parts if part))


def render_document(title: str, body: Html, *, live: bool) -> str:
    """Return the document with inline style and script; external resources are forbidden."""
    style, script = ((RESOURCES / name).read_text() for name in ("page.css", "page.js"))
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return Template((RESOURCES / "template.html").read_text()).substitute(
        title=escape(title),
        policy=policy + ("; connect-src 'self'" if live else ""),
        style=style,
        script=script,
        body=body,
        live="live" if live else "still",
        version=fedsieve.__version__,
    )


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of some directories to a file."""
    page = render_report(folders)
    try:
        run_directory.atomic_write(path, page.encode())
    except OSError as error:
        raise run_directory.RunDirectoryError(
            f"cannot write the report to {path}: {error.strerror}; choose another file with --out"
        ) from None
    return path


def write_default_report(folder: Path) -> str | None:
    """Write the page of a finished run to its directory; return None and print a note if that fails."""
    try:
        return str(write_report([folder], folder / run_directory.REPORT))
    except Exception as error:  # a run of hours must not fail because of its report
        print(f"note: the run is stored, but its report was not written: {type(error).__name__}: {error}", file=sys.stderr)
        return None
