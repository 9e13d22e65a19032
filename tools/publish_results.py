"""Write the results of studies into the documentation: `python tools/publish_results.py reports`.

Reads the folders of `fedsieve reproduce`, and writes docs/data, docs/images and the sections of docs/results.md, docs/figures.md,
docs/topologies.md, docs/reliability.md, docs/density.md and README.md between `<!-- NAME -->` and `<!-- /NAME -->`. A study that is not
in the folder keeps its section and its checks of claims.
"""

import csv
import json
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.report import claims, tables, verdicts
from fedsieve.report.figures.ablation import DIFFERENCE_TO_DEFAULT
from fedsieve.report.figures.style import line_label
from fedsieve.report.tables import StudyTable, format_cell
from fedsieve.studies import results
from fedsieve.studies.catalog import PAPER_STUDIES
from fedsieve.studies.results import DEFAULT_VARIANT, PUBLISHED, REFERENCE_ALGORITHM

PROJECT = Path(__file__).parent.parent
DOCS = PROJECT / "docs"
IMAGES = {
    "communication": ("quality-against-bytes", "Quality against bytes sent on LR, LG and MC"),
    "ablation": ("ablation", "Difference of each variant of sieve to the default, with two standard errors"),
    "gates": ("gates", "Expected and test-time density of FLoPS per epoch on LR, LG and MC, under both recipes"),
    "iou": ("iou", "Overlap of gates (FLoPS) and of masks (FedIter-HT) between epochs on LR"),
    "learning-rates": ("learning-rates", "Test R2 of FLoPS-PA and sieve over their two learning rates"),
    "convergence": ("convergence", "Test R2 and accuracy over rounds; dashed lines are settings as published"),
    "real-data": ("real-data", "Test score over rounds on RCV1, MNIST and EMNIST"),
    "test-time-gates": ("test-time-gates", "Single test-time gates of FLoPS over the epochs, and their overlap, under both recipes"),
    "regimes": ("regimes", "True discovery rate per epoch in the other three regimes of noise and correlation, nine panels"),
    "heterogeneity": ("heterogeneity", "FLoPS and FLoPS-PA beside the dense models of FedSGD and FedAvg on heterogeneous clients"),
    "topologies": ("topologies-lr", "Mean node over bytes, and rounds to the target over the spectral gap, on LR without a server"),
    "starts": ("starts", "Test R2 of FLoPS and FLoPS-PA over the start of the gates"),
    "constraint": ("constraint-lr-dense", "Density and multiplier per round on LR from a dense start, without log-alpha scaling"),
}
"""Study: the figure that the documentation shows, and its text."""
DENSITY_CELLS = {
    "mnist-5": ("MNIST, softmax", "mnist", 0.05),
    "mnist-1": ("MNIST, softmax", "mnist", 0.01),
    "lenet": ("MNIST, LeNet", "mnist-cnn", 0.05),
    "rcv1": ("RCV1, 34 labels", "rcv1", 0.005),
}
"""Cells of sieve.csv that the page on densities shows: title, task and density."""
MAX_LINE_LENGTH = 120
QUALITY_AND_TDR = ("r2", "accuracy", "tdr", "tdr_features")
"""What the page shows of a table of the paper; the CSV file has the losses too."""
OMITTED_NOTES = ("before projection", "FLoPS: reached = ", "FedIter-HT: better or worse")
"""Beginnings of notes about columns that the page does not show."""
PROJECTION_NOTE = "in brackets, as published, before the projection to the m largest weights"
CELL_NOTE = f"quality / TDR (MC: of features); a FLoPS cell that misses the paper's number is bold; {PROJECTION_NOTE}"


def main(reports: Path) -> None:
    """Publish every study in a folder."""
    pages = {name: (DOCS / name).read_text() for name in ("results.md", "figures.md", "topologies.md", "reliability.md")}
    studies = {path.parent.name: path.parent for path in sorted(reports.glob(f"*/{results.PLAN_FILE}"))}
    for name, folder in studies.items():
        publish_files(name, folder)
        if name in TABLES or name in IMAGES:
            page = next(page for page, text in pages.items() if f"<!-- {name} -->" in text)
            pages[page] = replace_section(pages[page], name, study_section(name, folder))
    rows = {name: results.read_rows(folder) for name, folder in studies.items() if name in PAPER_STUDIES}
    found = claims.make_document(rows, common_scale(studies))
    document = with_other_studies(found, json.loads((DOCS / "data" / results.CLAIMS_FILE).read_text()), studies)
    evaluated = {claim["number"] for claim in document["claims"]}
    if missing := [number for number in claims.CLAIMS if number not in evaluated]:
        print(f"no study has evaluated claims {', '.join(map(str, missing))} so far; `fedsieve reproduce all` computes them")
    if "communication" in studies:
        readme = PROJECT / "README.md"
        table = study_table_of("communication", studies["communication"])
        kept = [entry for entry in table.entries if entry["setting"] != PUBLISHED]
        readme.write_text(replace_section(readme.read_text(), "communication", overview_table(table._replace(entries=kept))))
    (DOCS / "data" / results.CLAIMS_FILE).write_text(json.dumps(document, indent=1) + "\n")
    pages["results.md"] = replace_section(pages["results.md"], "claims", verdicts.verdict_table(document))
    sieve_rows = list(csv.DictReader((DOCS / "data" / "sieve.csv").read_text().splitlines()))
    density_page = (DOCS / "density.md").read_text()
    pages["density.md"] = replace_section(density_page, "density", density_table(sieve_rows, data_of_tasks(pages["results.md"])))
    for name, text in pages.items():
        (DOCS / name).write_text(text)


def common_scale(studies: Mapping[str, Path]) -> str:
    """Return the scale of all studies, which is not smoke."""
    scales = {results.read_plan(folder)["scale"] for folder in studies.values()}
    if len(scales) != 1 or scales == {"smoke"}:
        sys.exit(f"all studies must have one scale, and not smoke, whose numbers mean nothing; got {', '.join(sorted(scales)) or 'none'}")
    return scales.pop()


def with_other_studies(found: Mapping[str, Any], before: Mapping[str, Any], studies: Collection[str]) -> dict[str, Any]:
    """Return the document with the published checks of studies that are not in the folder."""
    merged = {(verdict.number, verdict.recipe): verdict for verdict in verdicts.read_verdicts(before)}
    for verdict in verdicts.read_verdicts(found):
        other = merged.get((verdict.number, verdict.recipe), verdict)
        kept = [check for check in other.checks if check.case.get("in", next(iter(studies))) not in studies]
        keys = claims.CLAIMS[verdict.number].group_keys
        merged[verdict.number, verdict.recipe] = verdicts.make_verdict(*verdict[:3], [*kept, *verdict.checks], keys)
    order = sorted(merged, key=lambda pair: (pair[0], list(claims.RECIPES).index(pair[1])))
    about = {"seeds": sorted({*found["seeds"], *before["seeds"]}), "versions": sorted({*found["versions"], *before["versions"]})}
    documents = (before, found) if found["claims"] else (before,)
    data = "; ".join(dict.fromkeys(part for document in documents for part in document["data"].split("; ")))
    return verdicts.to_document([merged[pair] for pair in order], scale=found["scale"], **about, data=data)


def replace_section(text: str, name: str, content: str) -> str:
    """Return a page with another text between two marks."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def study_table_of(name: str, folder: Path) -> StudyTable:
    """Return the table of the study in a folder."""
    plan = results.read_plan(folder)
    return tables.study_table(name, plan["description"], plan["scale"], results.read_rows(folder))


def publish_files(name: str, folder: Path) -> None:
    """Copy the figure of a study, and write its CSV file."""
    if name in IMAGES:
        image = f"{IMAGES[name][0]}.png"
        shutil.copy(folder / image, DOCS / "images" / image)
    (DOCS / "data" / f"{name}.csv").write_text(study_table_of(name, folder).to_csv())


def study_section(name: str, folder: Path) -> str:
    """Return figure, one paragraph (caption, command, notes, file with all numbers) and table of a study as Markdown, if it has them."""
    table = study_table_of(name, folder)
    parts, text = [], ""
    if name in IMAGES:
        image, caption = IMAGES[name]
        parts.append(f"![{caption}](images/{image}.png)")
        text = f"{caption}. "
    notes = table.notes
    if name not in TABLES:
        notes = with_count_of_unfinished(notes)
    elif TABLES[name] is cell_table:
        notes = [*(note for note in notes if not note.startswith(OMITTED_NOTES)), CELL_NOTE]
    elif TABLES[name] is overview_table:
        notes = [*notes, PROJECTION_NOTE]
    text += f"`fedsieve reproduce {name} --scale {results.read_plan(folder)['scale']}`: {'; '.join(notes)}. "
    text += f"All numbers: [{name}.csv](data/{name}.csv)."
    parts.append(fill(text, MAX_LINE_LENGTH, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join([*parts, TABLES[name](table)] if name in TABLES else parts)


def with_count_of_unfinished(notes: Sequence[str]) -> list[str]:
    """Return notes with one line in place of those that list runs that did not finish."""
    unfinished = sum(note.startswith("**") for note in notes)
    return [note for note in notes if not note.startswith("**")] + [f"{unfinished} sets of runs did not finish"] * (unfinished > 0)


def overview_table(table: StudyTable) -> str:
    """Return one line per algorithm: quality and TDR on each synthetic task, and bytes."""
    lines = ["| | LR R2 / TDR | LG accuracy / TDR | MC accuracy / TDR | MB sent, LR / MC |", "|---|---|---|---|---|"]
    algorithms = dict.fromkeys(line_label(entry) for entry in table.entries)
    for algorithm in algorithms:
        entries = {entry["task"]: entry for entry in table.entries if line_label(entry) == algorithm}
        cells = [f"{format_projected(entry, 'value')} / {format_mean(entry['tdr'])}" for entry in entries.values()]
        sent = " / ".join(format_megabytes(entries[task]["bytes"]) for task in ("lr", "mc"))
        lines.append(f"| {algorithm} | {' | '.join(cells)} | {sent} |")
    return "\n".join(lines)


def format_projected(entry: Mapping[str, Any], column: str) -> str:
    """Return the value of the projected model; as published, then in brackets the mean before the projection."""
    before = entry.get("before projection") if entry["setting"] == PUBLISHED else None
    return format_cell("", entry[column]) + (f" ({before['mean']:.3f})" if before else "")


def format_mean(value: Mapping[str, Any] | None) -> str:
    """Return a mean with two decimals."""
    return "" if value is None or value["mean"] is None else f"{value['mean']:.2f}"


def format_megabytes(value: Mapping[str, Any]) -> str:
    """Return a mean number of bytes in MB."""
    return "" if value["mean"] is None else f"{value['mean'] / 1e6:.3g}"


def ablation_table(table: StudyTable) -> str:
    """Return one line per setting and one column per variant: the default's quality, and the differences to it."""
    variants = list(dict.fromkeys(entry["part"] for entry in table.entries))
    lines = ["| setting | " + " | ".join(variants) + " |", "|" + "---|" * (1 + len(variants))]
    for task, setting in dict.fromkeys((entry["task"], entry["setting"]) for entry in table.entries):
        entries = {entry["part"]: entry for entry in table.entries if (entry["task"], entry["setting"]) == (task, setting)}
        cells = [format_cell("", entries[DEFAULT_VARIANT]["value"])]
        cells += [f"{entries[part][DIFFERENCE_TO_DEFAULT]:+.3f} ± {entries[part]['error']:.3f}" for part in variants[1:]]
        lines.append(f"| {task.upper()}, {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell_table(table: StudyTable) -> str:
    """Return a table of the paper: one line per setting; for each algorithm the paper's quality / TDR, then the measured ones."""
    cells: dict[tuple[str, ...], dict[str, list[str]]] = {}
    columns: list[str] = []
    for entry in sorted(table.entries, key=lambda entry: entry["measure"].startswith("tdr")):
        setting = (entry["task"].upper(), f"{entry['truth']:g}", entry["skew"], f"{entry['target']:g}")
        if entry["measure"] not in QUALITY_AND_TDR or (entry["task"], entry["measure"]) == ("mc", "tdr"):
            continue
        name = entry["algorithm"].replace("fed-iter-ht", "FedIter-HT").replace("flops", "FLoPS")
        line = cells.setdefault(setting, {})
        if entry.get("paper"):
            line.setdefault(f"{name}, paper", [])
            if entry["setting"] == PUBLISHED:
                line[f"{name}, paper"].append(f"{entry['paper']:.2f}")
        measured = format_mean(entry["measured"]) if entry["measure"].startswith("tdr") else format_projected(entry, "measured")
        is_miss = str(entry.get("verdict")).startswith(tables.MISS)
        column = name if entry["algorithm"] == REFERENCE_ALGORITHM else f"{name}, {entry['setting']}"
        line.setdefault(column, []).append(f"**{measured}**" if is_miss else measured)
        columns += [each for each in line if each not in columns]
    header = ["task", "true density", "clients", "density", *columns]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join((*setting, *(' / '.join(line.get(name, [])) for name in columns)))} |" for setting, line in cells.items()]
    return "\n".join(lines)


def topology_table(table: StudyTable) -> str:
    """Return one line per algorithm and topology: value of the worst node (of a star: its model) by task, and what it costs."""
    lines = ["| | spectral gap | LR R2 | LG accuracy | kB per node | LR: rounds to target |", "|---|---|---|---|---|---|"]
    for algorithm, topology in dict.fromkeys((entry["algorithm"], entry["topology"]) for entry in table.entries):
        by_task = {entry["task"]: entry for entry in table.entries if (entry["algorithm"], entry["topology"]) == (algorithm, topology)}
        entry = by_task["lr"]
        values = [by_task[task]["worst node"] or by_task[task]["mean model"] if task in by_task else None for task in ("lr", "lg")]
        rounds = "" if entry["rounds to target"] is None else f"{float(entry['rounds to target']):.0f}"
        cells = [
            f"{float(entry['gap']):.2g}",
            *(format_cell("", value) for value in values),
            f"{float(entry['bytes of a node']) / 1e3:.3g}",
            rounds,
        ]
        lines.append(f"| {algorithm}, {topology} | {' | '.join(cells)} |")
    return "\n".join(lines)


def robustness_table(table: StudyTable) -> str:
    """Return one line per algorithm and attack by the largest fraction of malicious clients, and one column per aggregator."""
    aggregators = [column for column in table.columns if column not in ("task", "algorithm", "attack", "malicious")]
    lines = ["| algorithm | attack | " + " | ".join(aggregators) + " |", "|" + "---|" * (2 + len(aggregators))]
    largest = max((entry["malicious"] for entry in table.entries), key=lambda share: int(share.rstrip("%")))
    for entry in table.entries:
        if entry["malicious"] in (largest, "0%"):
            lines.append(f"| {entry['algorithm']} | {entry['attack']} | " + " | ".join(entry[name] for name in aggregators) + " |")
    return "\n".join(lines)


def density_table(rows: Sequence[Mapping[str, str]], data: Mapping[str, str]) -> str:
    """Return what sieve reaches at the densities of real tasks: weights, mean and standard deviation, seeds and data."""
    lines = ["| task | weights | density | quality | seeds | data |", "|---|---|---|---|---|---|"]
    for cell, (title, task, density) in DENSITY_CELLS.items():
        found = [row for row in rows if row["cell"] == cell]
        seeds = [int(row["seed"]) for row in found]
        quality = format_cell("", results.mean_and_sd([float(row["value"]) for row in found]))
        weights = f"{resolve(RunConfig(task=task, density=density)).objective.layout.num_gated:,}"
        lines.append(f"| {title} | {weights} | {100 * density:g} % | {quality} | {min(seeds)}-{max(seeds)} | {data[title.split(',')[0]]} |")
    return "\n".join(lines)


def data_of_tasks(page: str) -> dict[str, str]:
    """Return the data of each task from the first table of the results page."""
    table = page.split("| task | data |\n|---|---|\n")[1].split("\n\n")[0]
    return {name.strip("` "): text.strip() for name, text in (line.strip("|").split("|") for line in table.splitlines())}


TABLES = {
    "robustness": robustness_table,
    "table-1": cell_table,
    "table-2": cell_table,
    "communication": overview_table,
    "ablation": ablation_table,
    "topologies": topology_table,
}
"""Studies with a table on a page; others with a figure have a section without one. All numbers are files in docs/data."""

if __name__ == "__main__":
    main(Path(sys.argv[1]))
