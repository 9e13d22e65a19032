"""Tables of a study from its stored rows: markdown, CSV and the terminal; the paper's number beside each measured one."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rich.table import Table as RichTable

from fedsieve.formatting import format_bytes
from fedsieve.report import published
from fedsieve.report.figures import ablation, equal_bytes, robustness
from fedsieve.report.published import PublishedCell
from fedsieve.studies import results
from fedsieve.studies.results import Row

METRIC_BY_TASK = {"quality": {"lr": "r2"}, "loss": {"lr": "mse"}, "tdr": {"mc": "tdr_features"}}
DEFAULT_METRIC = {"quality": "accuracy", "loss": "ce", "tdr": "tdr"}
OPTIONAL_COLUMNS = (
    "finished",
    "bytes formula",
    "bytes payload",
    "line",
    "test density",
    "expected density",
    "tdr features",
    "metric",
    "difference",
)
"""Columns a narrow terminal does without, in this order, and then those that say the same everywhere."""
COLUMN_FORMATS = {"difference": "{:+.3f}", "less sieve": "{:+.4f}", "less sieve default": "{:+.4f}", "error": "{:.4f}", "95 %": "{:.4f}"}
DENSITY_TOLERANCE = 0.05
"""How close a density must come to its target, as a fraction of it."""


class StudyTable(NamedTuple):
    """A table: what it is called, what to know about it, and its entries by column."""

    title: str
    notes: list[str]
    columns: list[str]
    entries: list[dict[str, Any]]
    """plain numbers, for CSV"""

    def formatted_cells(self) -> list[list[str]]:
        """As people read them."""
        return [[format_cell(column, entry.get(column)) for column in self.columns] for entry in self.entries]

    def to_markdown(self) -> str:
        """With the notes below."""
        lines = [f"# {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in self.formatted_cells()]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def to_csv(self) -> str:
        """Plain numbers; a mean and its sd in two columns."""
        names = [name for column in self.columns for name in ((column, f"{column} sd") if column in self._columns_with_sd() else (column,))]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        for entry in self.entries:
            row = []
            for column in self.columns:
                value = entry.get(column)
                row += (
                    [value["mean"], value["sd"]] if isinstance(value, Mapping) else [value] + [None] * (column in self._columns_with_sd())
                )
            writer.writerow(["" if value is None else value for value in row])
        return out.getvalue()

    def _columns_with_sd(self) -> set[str]:
        return {column for column in self.columns for entry in self.entries if isinstance(entry.get(column), Mapping)}

    def to_rich(self, max_width: int) -> RichTable:
        """For a terminal so wide: a table that is wider leaves its details to the files."""
        columns = list(self.columns)
        same = [column for column in self.columns if len({str(entry.get(column)) for entry in self.entries}) == 1]
        for detail in (*OPTIONAL_COLUMNS, *same):
            if detail in columns and len(columns) > 1 and self._replace(columns=columns).width > max_width:
                columns.remove(detail)
        left = [column for column in self.columns if column not in columns]
        notes = [*self.notes, *([f"in the file, not here: {', '.join(left)}"] if left else [])]
        table = RichTable(title=self.title, title_justify="left", caption="\n".join(notes), caption_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in self._replace(columns=columns).formatted_cells():
            table.add_row(*row)
        return table

    @property
    def width(self) -> int:
        """How wide a terminal shows it without a broken cell."""
        return 1 + sum(3 + max(map(len, column)) for column in zip(self.columns, *self.formatted_cells(), strict=True))


def format_cell(column: str, value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if value["mean"] is None:
            return "none finished"
        if column.startswith("bytes"):
            return format_bytes(value["mean"])
        return _format_decimals(value["mean"]) + (f" ± {_format_decimals(value['sd'])}" if value["sd"] is not None else "")
    if isinstance(value, float):
        return COLUMN_FORMATS.get(column, "{:g}").format(value)
    return str(value)


def _format_decimals(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def metric_name(task: str, measure: str) -> str:
    """The stored name of quality, loss or TDR on a task; for many classes the paper counts feature rows (decision F2)."""
    return METRIC_BY_TASK[measure].get(task, DEFAULT_METRIC[measure])


def study_table(name: str, description: str, scale: str, rows: list[Row]) -> StudyTable:
    """The table of any study."""
    notes = table_notes(rows, scale)
    if name in ("table-1", "table-2"):
        return paper_table(name, description, rows, notes)
    if name == "equal-bytes":
        found = equal_bytes.table_entries(rows)
        return StudyTable(description, [*notes, equal_bytes.summarize(found)], list(found[0]) if found else [], found)
    if name == "robustness":
        found = robustness.table_entries(rows)
        return StudyTable(description, [*notes, robustness.NOTE, robustness.summarize(rows)], list(found[0]) if found else [], found)
    if name == "ablation":
        found = ablation.table_entries(rows)
        return StudyTable(description, [*notes, ablation.NOTE], list(found[0]) if found else [], found)
    labels = list(dict.fromkeys(key for row in rows for key in row["label"]))
    groups = group_by_label(rows)
    entries = [{**dict(group[0]["label"]), **cell_metrics(group)} for group in groups]
    if name == "constraint":
        notes.append(f"within: share of runs whose expected and test-time density both end within {DENSITY_TOLERANCE:.0%} of the target")
    columns = list(dict.fromkeys(key for entry in entries for key in entry if key not in labels))
    return StudyTable(
        description, notes, [*labels, *(c for c in columns if any(entry.get(c) not in (None, "") for entry in entries))], entries
    )


def table_notes(rows: Iterable[Row], scale: str) -> list[str]:
    """Seeds, size, stand-ins, and every run that did not come to an end."""
    rows = list(rows)
    seeds = results.distinct_seeds(rows)
    notes = [f"mean ± sd over seeds {', '.join(map(str, seeds))}" + ("" if scale != "smoke" else "; scale smoke: no number means anything")]
    notes += sorted({row["note"] for row in rows if row["note"]})
    lost: dict[tuple[str, str], list[Row]] = {}
    for row in results.diverged_or_failed_rows(rows):
        lost.setdefault((row["state"], row["reason"]), []).append(row)
    for (state, reason), group in lost.items():
        cells = dict.fromkeys(" ".join(map(str, row["label"].values())) for row in group)
        notes.append(f"**{state}**, seeds {', '.join(map(str, results.distinct_seeds(group)))}: {', '.join(cells)}: {reason}")
    return notes


def group_by_label(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of each cell, in the order of cells."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(results.label_key(row["label"]), []).append(row)
    return list(found.values())


def cell_metrics(group: list[Row]) -> dict[str, Any]:
    """What any cell is measured by; columns that are empty everywhere are left out later."""
    done = results.done_rows(group)
    metric = next((row["metric"] for row in done), None)
    entry: dict[str, Any] = {"metric": metric, "value": results.mean_and_sd_over_seeds(group, "value")}
    for name in ("tdr", "tdr_features", "expected_density", "test_density"):
        found = results.mean_and_sd_over_seeds(group, name)
        told = found["mean"] is not None and (name != "tdr_features" or group[0]["label"]["task"] == "mc")
        entry[name.replace("_", " ")] = found if told else None
    if "variant" in group[0]["label"]:
        entry["within"] = f"{sum(meets_target(row) for row in done)}/{len(group)}"
    for part, title in (("", "bytes"), ("_payload", "bytes payload"), ("_paper_formula", "bytes formula")):
        entry[title] = results.mean_and_sd([row["bytes"]["up" + part] + row["bytes"]["down" + part] for row in done])
    entry["finished"] = f"{len(done)}/{len(group)}"
    return entry


def meets_target(row: Row) -> bool:
    """Whether expected and test-time density of the last round are both near the target."""
    found = (row["values"]["expected_density"], row["values"]["test_density"])
    return all(abs(value - row["density"]) <= DENSITY_TOLERANCE * row["density"] for value in found)


def paper_table(name: str, description: str, rows: list[Row], notes: list[str]) -> StudyTable:
    """Cell by cell: the paper's number, ours, the difference, and whether it is reached."""
    entries = []
    for cell in published.table_cells(name):
        place = {"task": cell.task, "method": cell.algorithm, "target": cell.target_density, "truth": cell.true_density, "skew": cell.skew}
        for setting in ("tuned",) if cell.algorithm == "flops" else ("as published", "tuned"):
            found = results.mean_and_sd_over_seeds(
                results.filter_rows(rows, **place, setting=setting), metric_name(cell.task, cell.measure)
            )
            entry = {
                **place,
                "setting": setting,
                "measure": metric_name(cell.task, cell.measure),
                "paper": cell.value,
                "line": f"L{cell.source_line}",
            }
            entries.append(entry | {"measured": found, **compare_cell(cell, found)})
    for row in group_by_label(results.filter_rows(rows, method="sieve")):
        for measure in ("quality", "loss", "tdr"):
            named = metric_name(row[0]["label"]["task"], measure)
            entries.append(
                {
                    **row[0]["label"],
                    "measure": named,
                    "measured": results.mean_and_sd_over_seeds(row, named),
                    "verdict": "ours, not in the paper",
                }
            )
    columns = ["task", "truth", "skew", "method", "target", "setting", "measure", "paper", "line", "measured", "difference", "verdict"]
    notes = [*notes, "FLoPS: reached = at or beyond the paper's number within one sd and the paper's rounding of .005; MISS = not"]
    notes.append("FedIter-HT: better or worse than in the paper, or alike (within .05)")
    misses = sum(entry["verdict"].startswith("MISS") for entry in entries)
    judged_count = misses + sum(entry["verdict"] == "reached" for entry in entries)
    return StudyTable(description, [*notes, f"FLoPS: {judged_count - misses} of {judged_count} cells reached"], columns, entries)


def compare_cell(cell: PublishedCell, measured: Mapping[str, float | None]) -> dict[str, Any]:
    """The difference to the paper, and what it means."""
    if measured["mean"] is None:
        return {"difference": None, "verdict": "MISS: no run finished" if cell.algorithm == "flops" else "no run finished"}
    difference = measured["mean"] - cell.value
    gain = -difference if cell.measure == "loss" else difference
    if cell.algorithm == "flops":
        if cell.target_density > cell.true_density and cell.measure == "tdr":
            bound = f"entries at most {published.PRECISION_BOUND:.3f}" + (", rows about 0.40" if cell.task == "mc" else "")
            return {"difference": difference, "verdict": f"not judged: {bound}"}
        if cell.target_density > cell.true_density and cell.measure == "loss":
            return {"difference": difference, "verdict": "not judged: accuracy only"}
        reached = gain + (measured["sd"] or 0.0) + published.ROUNDING_TOLERANCE >= 0
        return {"difference": difference, "verdict": "reached" if reached else "MISS"}
    close = abs(gain) <= (0.05 if cell.measure != "loss" else 0.05 * max(cell.value, 1.0))
    return {"difference": difference, "verdict": "alike" if close else "better" if gain > 0 else "worse"}
