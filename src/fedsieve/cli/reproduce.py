"""`fedsieve reproduce`: compute a study, then write its table, figures and verdicts from stored rows. Only computing imports torch."""

import json
from pathlib import Path
from typing import Literal

from rich.table import Table as RichTable

from fedsieve.cli.options import Switch
from fedsieve.formatting import PlainConsole
from fedsieve.report import claims, tables, verdicts
from fedsieve.storage.run_directory import REPORT, RunDirectoryError, atomic_write
from fedsieve.studies import results
from fedsieve.studies.catalog import PAPER_STUDIES, STUDIES
from fedsieve.studies.scale import SCALES, ScaleName

Workers = int | Literal["auto"]
StudyName = Literal["list", "all", *STUDIES]
TABLE_FILE, TABLE_CSV_FILE, VERDICTS_FILE = "table.md", "table.csv", "claims.md"
TUNING_DIR, SELECTED_OPTIONS_FILE = "tuning", "chosen.json"


def reproduce(
    study: StudyName,  # pyright: ignore[reportInvalidTypeForm]  # its names are known only at run time
    *,
    scale: ScaleName = ScaleName.SHORT,
    workers: Workers = "auto",
    out: Path | None = None,
    quiet: Switch = False,
) -> int:
    """Compute a table or figure of the paper and compare it with the paper's numbers and claims.

    Finished runs are stored and never computed again: stop at any time and start again.

    Parameters
    ----------
    study
        list shows all studies; all computes every table and figure of the paper
    scale
        smoke: a minute or two, the numbers mean nothing; short: 5 seeds; paper: 10 seeds, all rounds
    workers
        processes that compute runs: at most this many, or auto for one per core
    out
        folder of the study; with all, the parent of one folder per study (default: reports/STUDY)
    quiet
        print no progress and no tables
    """
    if study == "list":
        print_studies()
        return 0
    from fedsieve.report.html import page

    console = PlainConsole(quiet=quiet)
    names = list(PAPER_STUDIES) if study == "all" else [study]
    parent = Path("reports") if out is None else out
    folders = {name: parent / name if study == "all" or out is None else out for name in names}
    num_failed = 0
    for name, folder in folders.items():
        num_failed += compute(name, folder, scale, workers, quiet=quiet)
        write_report(folder, console)
        page.write_report([folder], folder / REPORT)
    if study == "all":
        page.write_report([parent], parent / REPORT)
        write_verdicts(parent, {name: results.read_rows(folder) for name, folder in folders.items()}, scale, console)
    return 1 if num_failed else 0


def compute(name: str, folder: Path, scale: ScaleName, workers: Workers, *, quiet: bool) -> int:
    """Compute the rows of a study and return the number of failed runs; diverged runs do not count."""
    from fedsieve.studies.compute import compute_study
    from fedsieve.studies.registry import BUILDERS, TUNED_STUDIES

    if name in TUNED_STUDIES:
        build_tuning, select_options, build = TUNED_STUDIES[name]
        tuning_folder = folder / TUNING_DIR
        options = select_options(compute_study(build_tuning(SCALES[scale]), tuning_folder, workers=workers, quiet=quiet))
        atomic_write(tuning_folder / SELECTED_OPTIONS_FILE, json.dumps(options, indent=1).encode())
        study = build(SCALES[scale], options)
    else:
        study = BUILDERS[name](SCALES[scale])
    rows = compute_study(study, folder, workers=workers, quiet=quiet)
    return sum(row["state"] == results.FAILED for row in rows)


def write_report(folder: Path, console: PlainConsole) -> None:
    """Write table, figures and verdicts of the study in a folder from its stored rows."""
    from fedsieve.report.figures import paper

    plan, rows = results.read_plan(folder), results.read_rows(folder)
    table = tables.study_table(plan["name"], plan["description"], plan["scale"], rows)
    try:
        atomic_write(folder / TABLE_FILE, table.to_markdown().encode())
        atomic_write(folder / TABLE_CSV_FILE, table.to_csv().encode())
        figures = paper.draw(plan["name"], plan["scale"], rows, folder, table)
    except OSError as error:
        raise RunDirectoryError(f"cannot write the report into {folder}: {error.strerror}; choose another folder with --out") from None
    console.print(table.to_rich(console.width))
    console.print(f"table in {folder / TABLE_FILE}" + "".join(f", figure in {path}" for path in figures), soft_wrap=True)
    write_verdicts(folder, {plan["name"]: rows}, plan["scale"], console)


def write_verdicts(folder: Path, studies: dict[str, list[results.Row]], scale: str, console: PlainConsole) -> None:
    """Write and print the verdicts on the claims that the stored rows can evaluate."""
    document = claims.make_document(studies, scale)
    if not document["claims"]:
        return
    is_smoke_test = scale == ScaleName.SMOKE
    title = "# The paper's claims, from the rows stored here" + (", which mean nothing at scale smoke" if is_smoke_test else "")
    page = [title, "", verdicts.verdict_table(document), "", verdicts.verdict_details(document)]
    atomic_write(folder / VERDICTS_FILE, "\n".join(page).encode())
    atomic_write(folder / results.CLAIMS_FILE, json.dumps(document, indent=1).encode())
    prefix = "scale smoke, " if is_smoke_test else ""
    for verdict in verdicts.read_verdicts(document):
        text = f"{prefix}claim {verdict.number}, recipe {verdict.recipe}, {verdict.claim}: {verdict.verdict}"
        console.print(text, soft_wrap=True)


def print_studies() -> None:
    """Print the names and descriptions of all studies."""
    table = RichTable("study", "what it shows", title="fedsieve reproduce STUDY", title_justify="left")
    for name, description in STUDIES.items():
        table.add_row(name, description)
    table.add_row("all", "all studies of the paper, and its claims")
    PlainConsole().print(table)
