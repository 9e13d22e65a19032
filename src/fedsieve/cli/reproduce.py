"""`fedsieve reproduce`: compute a study, then its table, figures and verdicts from what is stored. Torch loads only to compute."""

import json
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable

from fedsieve.cli.options import Integer, Switch
from fedsieve.report import claims, tables
from fedsieve.report.claims import NOT_EVALUATED, Verdict
from fedsieve.storage.run_directory import REPORT, RunDirectoryError, atomic_write
from fedsieve.studies import results
from fedsieve.studies.catalog import PAPER_STUDIES, STUDIES
from fedsieve.studies.scale import SCALES, ScaleName

StudyName = Literal["list", "all", *STUDIES]
TABLE_FILE, TABLE_CSV_FILE, VERDICTS_FILE, VERDICTS_JSON_FILE = "table.md", "table.csv", "claims.md", "claims.json"


def reproduce(
    study: StudyName,
    *,
    scale: ScaleName = ScaleName.SHORT,
    jobs: Integer = 1,
    out: Path | None = None,
    quiet: Switch = False,
) -> int:
    """Compute a table or figure of the paper and hold it against the paper's numbers and claims.

    A run that is finished is never computed again: break off at any time and start again.

    Parameters
    ----------
    study
        list shows what there is; all computes every table and figure of the paper
    scale
        smoke: a minute or two, numbers mean nothing; short: 5 seeds; paper: 10 seeds, all rounds
    jobs
        processes that compute runs, each with one thread
    out
        folder of the study, with all of one folder a study (default: reports/STUDY)
    quiet
        no progress and no tables
    """
    if study == "list":
        print_studies()
        return 0
    from fedsieve.report.html import page

    console = Console(highlight=False, quiet=quiet, soft_wrap=False)
    names = list(PAPER_STUDIES) if study == "all" else [study]
    top = Path("reports") if out is None else out
    folders = {name: top / name if study == "all" or out is None else out for name in names}
    lost = 0
    for name, folder in folders.items():
        lost += compute(name, folder, scale, jobs, quiet=quiet)
        write_report(folder, console)
        page.write_report([folder], folder / REPORT)
    if study == "all":
        page.write_report([top], top / REPORT)
        verdicts = claims.evaluate_claims({name: results.read_rows(folder) for name, folder in folders.items()})
        write_verdicts(top, verdicts, scale, console)
    return 1 if lost else 0


def compute(name: str, folder: Path, scale: ScaleName, jobs: int, *, quiet: bool) -> int:
    """The rows of a study; how many runs failed, apart from those that diverged."""
    from fedsieve.studies.registry import BUILDERS, TUNED_STUDIES
    from fedsieve.studies.runner import compute_study as compute_study

    if name in TUNED_STUDIES:
        trials, choose, build = TUNED_STUDIES[name]
        chosen = choose(compute_study(trials(SCALES[scale]), folder / "tuning", num_processes=jobs, quiet=quiet))
        atomic_write(folder / "tuning" / "chosen.json", json.dumps(chosen, indent=1).encode())
        study = build(SCALES[scale], chosen)
    else:
        study = BUILDERS[name](SCALES[scale])
    rows = compute_study(study, folder, num_processes=jobs, quiet=quiet)
    return sum(row["state"] == results.FAILED for row in rows)


def write_report(folder: Path, console: Console) -> None:
    """Table, figures and verdicts of the study in a folder, from its stored rows."""
    from fedsieve.report.figures import paper

    plan, rows = results.read_plan(folder), results.read_rows(folder)
    table = tables.study_table(plan["name"], plan["description"], plan["scale"], rows)
    try:
        atomic_write(folder / TABLE_FILE, table.to_markdown().encode())
        atomic_write(folder / TABLE_CSV_FILE, table.to_csv().encode())
        drawn = paper.draw(plan["name"], rows, folder, table)
    except OSError as problem:
        raise RunDirectoryError(f"cannot write the report into {folder}: {problem.strerror}; choose another folder with --out") from None
    console.print(table.to_rich(console.width))
    console.print(f"table in {folder / TABLE_FILE}" + "".join(f", figure in {path}" for path in drawn), soft_wrap=True)
    write_verdicts(folder, claims.evaluate_claims({plan["name"]: rows}), plan["scale"], console)


def write_verdicts(folder: Path, verdicts: list[Verdict], scale: str, console: Console) -> None:
    """The claims that these rows can judge."""
    title = "# The paper's claims, from the rows stored here" + (", which mean nothing at scale smoke" if scale == ScaleName.SMOKE else "")
    judged = [verdict for verdict in verdicts if verdict.verdict != NOT_EVALUATED]
    if not judged:
        return
    atomic_write(folder / VERDICTS_FILE, "\n".join([title, "", *(v.to_markdown() for v in judged)]).encode())
    plain = [{**v._asdict(), "checks": [check._asdict() for check in v.checks]} for v in judged]
    atomic_write(folder / VERDICTS_JSON_FILE, json.dumps(plain, indent=1).encode())
    for v in judged:
        console.print(
            f"{'scale smoke, ' if scale == ScaleName.SMOKE else ''}claim {v.number}, {v.claim}: {v.verdict}", soft_wrap=True, markup=False
        )


def print_studies() -> None:
    """What can be computed."""
    table = RichTable("study", "what it shows", title="fedsieve reproduce STUDY", title_justify="left")
    for name, about in STUDIES.items():
        table.add_row(name, about)
    table.add_row("all", "all of the paper's, and its claims")
    Console(highlight=False).print(table)
