"""Tables of a study from its stored rows, as Markdown, as CSV and for the terminal."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rich.table import Table as RichTable

from fedsieve.formatting import format_bytes, spreadsheet_cell
from fedsieve.report import paper
from fedsieve.report.figures import ablation, equal_bytes, published_tables, rivals, robustness, topologies
from fedsieve.report.figures.ablation import DIFFERENCE_TO_DEFAULT
from fedsieve.report.figures.equal_bytes import DIFFERENCE_TO_SIEVE
from fedsieve.report.paper import PublishedCell
from fedsieve.studies import results
from fedsieve.studies.results import PUBLISHED, RECOMMENDED, REFERENCE_ALGORITHM, TUNED, Row
from fedsieve.studies.scale import ScaleName

METRIC_BY_TASK = {"quality": {"lr": "r2"}, "loss": {"lr": "mse"}, "tdr": {"mc": "tdr_features"}}
DEFAULT_METRIC = {"quality": "accuracy", "loss": "ce", "tdr": "tdr"}
OPTIONAL_COLUMNS = (
    "finished",
    "bytes formula",
    "bytes payload",
    "line",
    "before projection",
    "test density",
    "expected density",
    "tdr features",
    "metric",
    "difference",
)
"""Columns that a narrow terminal omits first, in this order; then those with the same value in every row."""
COLUMN_FORMATS = {"difference": "{:+.3f}", "error": "{:.4f}", "95 %": "{:.4f}"}
COLUMN_FORMATS |= {DIFFERENCE_TO_SIEVE: "{:+.4f}", DIFFERENCE_TO_DEFAULT: "{:+.4f}"}
DENSITY_TOLERANCE = 0.05
"""Maximum relative deviation of a density from its target."""
REACHED, MISS, NO_RUN = "reached", "MISS", "no run finished"


class StudyTable(NamedTuple):
    """A table with a title, notes, and one dictionary of plain values per row."""

    title: str
    notes: list[str]
    columns: list[str]
    entries: list[dict[str, Any]]

    def formatted_cells(self) -> list[list[str]]:
        """Return the cells as text."""
        return [[format_cell(column, entry.get(column)) for column in self.columns] for entry in self.entries]

    def to_markdown(self) -> str:
        """Return the table as Markdown, with the notes below."""
        lines = [f"# {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in self.formatted_cells()]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def to_csv(self) -> str:
        """Return plain numbers as CSV; a mean and its standard deviation are two columns."""
        with_sd = {column for column in self.columns for entry in self.entries if isinstance(entry.get(column), Mapping)}
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(name for column in self.columns for name in ((column, f"{column} sd") if column in with_sd else (column,)))
        for entry in self.entries:
            row = []
            for column in self.columns:
                value = entry.get(column)
                row += [value["mean"], value["sd"]] if isinstance(value, Mapping) else [value] + [None] * (column in with_sd)
            writer.writerow("" if value is None else spreadsheet_cell(value) if isinstance(value, str) else value for value in row)
        return out.getvalue()

    def to_rich(self, max_width: int) -> RichTable:
        """Return the table for a terminal. If it is too wide, some columns are omitted."""
        columns = list(self.columns)
        constant = [column for column in self.columns if len({str(entry.get(column)) for entry in self.entries}) == 1]
        for column in (*OPTIONAL_COLUMNS, *constant):
            if column in columns and len(columns) > 1 and self._replace(columns=columns).width > max_width:
                columns.remove(column)
        omitted = [column for column in self.columns if column not in columns]
        notes = [*self.notes, *([f"in the file, not here: {', '.join(omitted)}"] if omitted else [])]
        table = RichTable(title=self.title, title_justify="left", caption="\n".join(notes), caption_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in self._replace(columns=columns).formatted_cells():
            table.add_row(*row)
        return table

    @property
    def width(self) -> int:
        """The width of a terminal that shows the table without wrapped cells."""
        return 1 + sum(3 + max(map(len, column)) for column in zip(self.columns, *self.formatted_cells(), strict=True))


def format_cell(column: str, value: Any) -> str:
    """Return a value as text."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if value["mean"] is None:
            return "none finished"
        if column.startswith("bytes"):
            return format_bytes(value["mean"])
        return _format_decimals(value["mean"]) + (f" ± {_format_decimals(value['sd'])}" if value["sd"] is not None else "")
    if column.startswith("bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return COLUMN_FORMATS.get(column, "{:g}").format(value)
    return str(value)


def _format_decimals(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def metric_name(task: str, measure: str) -> str:
    """Return the stored name of quality, loss or TDR on a task. With many classes the paper counts feature rows (decision F2)."""
    return METRIC_BY_TASK[measure].get(task, DEFAULT_METRIC[measure])


def study_table(name: str, description: str, scale: str, rows: list[Row]) -> StudyTable:
    """Return the table of any study."""
    notes = table_notes(rows, scale)
    if name in ("table-1", "table-2"):
        return paper_table(name, description, rows, notes)
    if name == "equal-bytes":
        entries = equal_bytes.table_entries(rows)
        notes.append(equal_bytes.summarize(entries))
    elif name == "rivals":
        entries = rivals.table_entries(rows)
        notes += [rivals.NOTE, equal_bytes.summarize(entries)]
    elif name == "robustness":
        entries = robustness.table_entries(rows)
        notes += [robustness.NOTE, robustness.summarize(rows)]
    elif name == "ablation":
        entries = ablation.table_entries(rows)
        notes.append(ablation.NOTE)
    elif name == "topologies":
        entries = topologies.table_entries(rows)
        notes.append(topologies.NOTE)
    elif name == "tables":
        entries = published_tables.table_entries(rows)
        notes += [published_tables.NOTE, *published_tables.table_sources()]
    else:
        return condition_table(name, description, rows, notes)
    return StudyTable(description, notes, list(entries[0]) if entries else [], entries)


def condition_table(name: str, description: str, rows: list[Row], notes: list[str]) -> StudyTable:
    """Return a table with one row per condition. Columns without a value are omitted."""
    labels = list(dict.fromkeys(key for row in rows for key in row["label"]))
    entries = [{**group[0]["label"], **condition_metrics(group)} for group in results.group_by_label(rows)]
    if name == "constraint":
        notes = [
            *notes,
            f"within: runs whose expected and test-time density both end within {DENSITY_TOLERANCE:.0%} of the target",
        ]
    measures = dict.fromkeys(key for entry in entries for key in entry if key not in labels)
    columns = [*labels, *(key for key in measures if any(entry.get(key) not in (None, "") for entry in entries))]
    return StudyTable(description, notes, columns, entries)


def table_notes(rows: Iterable[Row], scale: str) -> list[str]:
    """Return notes on seeds, scale and replaced data, and on every run that did not finish."""
    rows = list(rows)
    seeds = f"mean ± sd over seeds {', '.join(map(str, results.distinct_seeds(rows)))}"
    notes = [seeds + ("; scale smoke: no number means anything" if scale == ScaleName.SMOKE else "")]
    notes += [f"data: {data}"] if (data := results.describe_data(rows)) else []
    notes += sorted({row["note"] for row in rows if row["note"]})
    unfinished: dict[tuple[str, str], list[Row]] = {}
    for row in results.diverged_or_failed_rows(rows):
        unfinished.setdefault((row["state"], row["reason"]), []).append(row)
    for (state, reason), group in unfinished.items():
        labels = dict.fromkeys(" ".join(map(str, row["label"].values())) for row in group)
        notes.append(f"**{state}**, seeds {', '.join(map(str, results.distinct_seeds(group)))}: {', '.join(labels)}: {reason}")
    return notes


def condition_metrics(group: list[Row]) -> dict[str, Any]:
    """Return the measurements of one condition."""
    finished = results.done_rows(group)
    label = group[0]["label"]
    entry: dict[str, Any] = {"metric": next((row["metric"] for row in finished), None)}
    entry["value"] = results.mean_and_sd_over_seeds(group, "value")
    entry["before projection"] = value_before_projection(group)
    for name in ("tdr", "tdr_features", "expected_density", "test_density"):
        value = results.mean_and_sd_over_seeds(group, name)
        is_shown = value["mean"] is not None and (name != "tdr_features" or label["task"] == "mc")
        entry[name.replace("_", " ")] = value if is_shown else None
    if "variant" in label:
        entry["within"] = f"{sum(meets_target(row) for row in finished)}/{len(group)}"
    for count, title in (("", "bytes"), ("_payload", "bytes payload"), ("_paper_formula", "bytes formula")):
        entry[title] = results.bytes_over_seeds(finished, count)
    entry["finished"] = count_finished(group)
    return entry


def meets_target(row: Row) -> bool:
    """Return whether expected and test-time density of the last round are both near the target."""
    densities = (row["values"]["expected_density"], row["values"]["test_density"])
    return all(abs(value - row["density"]) <= DENSITY_TOLERANCE * row["density"] for value in densities)


def paper_table(name: str, description: str, rows: list[Row], notes: list[str]) -> StudyTable:
    """Return the cells of a paper's table: the paper's number, the measured one, the difference, and a verdict."""
    entries: list[dict[str, Any]] = []
    for cell in paper.table_cells(name):
        label = {"task": cell.task, "truth": cell.true_density, "skew": cell.skew}
        label |= {"algorithm": cell.algorithm, "target": cell.target_density}
        measure = metric_name(cell.task, cell.measure)
        for setting in (PUBLISHED, RECOMMENDED if cell.algorithm == "flops" else TUNED):
            group = results.filter_rows(rows, **label, setting=setting)
            measured = results.mean_and_sd_over_seeds(group, measure)
            entry = {"setting": setting, "measure": measure, "paper": cell.value, "line": f"L{cell.source_line}", "measured": measured}
            if cell.measure == "quality":
                entry["before projection"] = value_before_projection(group)
            entries.append(label | entry | {"finished": count_finished(group)} | compare_cell(cell, measured))
    for group in results.group_by_label(results.filter_rows(rows, algorithm=REFERENCE_ALGORITHM)):
        label = group[0]["label"]
        for measure in (metric_name(label["task"], kind) for kind in ("quality", "loss", "tdr")):
            measured = results.mean_and_sd_over_seeds(group, measure)
            entries.append({**label, "measure": measure, "measured": measured, "verdict": "not in the paper"})
    columns = ["task", "truth", "skew", "algorithm", "target", "setting", "measure", "paper", "line", "measured", "before projection"]
    columns += ["difference", "finished", "verdict"]
    notes = [
        *notes,
        f"FLoPS: {REACHED} = the mean is at least as good as the paper's number, within the paper's rounding of .005; {MISS} = not",
        "FedIter-HT: better or worse than in the paper, or similar (within .05)",
        *(f"FLoPS {setting}: {count_reached(entries, setting)} cells reached" for setting in (PUBLISHED, RECOMMENDED)),
        "before projection: the model with all of its open test-time gates, before the m largest weights are selected",
    ]
    return StudyTable(description, notes, columns, entries)


def count_reached(entries: Iterable[Mapping[str, Any]], setting: str) -> str:
    """Return how many of the evaluated cells of FLoPS reach the paper's number."""
    verdicts = [entry["verdict"] for entry in entries if entry["algorithm"] == "flops" and entry["setting"] == setting]
    return f"{verdicts.count(REACHED)} of {sum(verdict == REACHED or verdict.startswith(MISS) for verdict in verdicts)}"


def value_before_projection(group: list[Row]) -> dict[str, float | None] | None:
    """Return the metric before the final projection; None if no run finished."""
    value = results.mean_and_sd_over_seeds(group, "value_before_projection")
    return None if value["mean"] is None else value


def count_finished(group: list[Row]) -> str:
    """Return finished runs of all runs, as text."""
    return f"{len(results.done_rows(group))}/{len(group)}"


def compare_cell(cell: PublishedCell, measured: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the difference to the paper, and a verdict."""
    if measured["mean"] is None:
        return {"difference": None, "verdict": f"{MISS}: {NO_RUN}" if cell.algorithm == "flops" else NO_RUN}
    difference = measured["mean"] - cell.value
    gain = -difference if cell.measure == "loss" else difference
    if cell.algorithm != "flops":
        is_similar = abs(gain) <= (0.05 if cell.measure != "loss" else 0.05 * max(cell.value, 1.0))
        verdict = "similar" if is_similar else "better" if gain > 0 else "worse"
    elif cell.target_density > cell.true_density and cell.measure == "tdr":
        rows_bound = ", rows about 0.40" if cell.task == "mc" else ""
        verdict = f"not evaluated: entries at most {paper.PRECISION_BOUND:.3f}{rows_bound}"
    elif cell.target_density > cell.true_density and cell.measure == "loss":
        verdict = "not evaluated: accuracy only"
    else:
        verdict = REACHED if gain + paper.ROUNDING_TOLERANCE >= 0 else MISS
    return {"difference": difference, "verdict": verdict}
