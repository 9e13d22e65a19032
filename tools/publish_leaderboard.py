"""Write the study `rivals` into the leaderboard: `python tools/publish_leaderboard.py reports/rivals`.

Stores its table in docs/data/rivals.csv, and writes one line per row into docs/leaderboard.md, then which cells of the study have no rows.
Cells that the folder does not have keep their published rows.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import fill

from fedsieve.formatting import format_bytes
from fedsieve.report import tables
from fedsieve.studies import results, rivals

DOCS = Path(__file__).parent.parent / "docs"
CSV, PAGE = DOCS / "data" / "rivals.csv", DOCS / "leaderboard.md"
BEGIN, END = "<!-- leaderboard -->\n", "<!-- /leaderboard -->\n"
COLUMNS = {
    "task": "task",
    "factor": "setting",
    "algorithm": "algorithm",
    "density": "density",
    "at sieve's bytes": "value at sieve's bytes",
    "difference to sieve": "difference to sieve",
    "after all rounds": "value after all rounds",
    "bytes": "bytes, all rounds",
    "bytes to target": "bytes to target",
    "seeds": "seeds",
    "command": "command",
}
"""Columns of the page by their name in the file."""
TEXT_COLUMNS = ("task", "factor", "algorithm", "seeds", "command")


def main(folder: Path) -> None:
    """Publish the study in a folder."""
    plan = results.read_plan(folder)
    if plan["scale"] == "smoke":
        sys.exit(f"{folder} has scale smoke, whose numbers mean nothing; publish scale short or paper")
    table = tables.study_table(plan["name"], plan["description"], plan["scale"], results.read_rows(folder)).to_csv()
    rows = merge_cells(read_rows(CSV.read_text()), read_rows(table))
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(insert_table(PAGE.read_text(), read_rows(CSV.read_text())))


def read_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of a stored table."""
    return list(csv.DictReader(text.splitlines()))


def all_cells() -> list[tuple[str, str]]:
    """Return task and setting of every cell of the study."""
    return [(task, factor) for task, factors in rivals.FACTORS.items() for factor in factors]


def merge_cells(published: Sequence[dict[str, str]], new: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of all cells in the order of the study: the new ones, or those published before."""
    merged = []
    for cell in all_cells():
        found = ([row for row in rows if (row["task"], row["factor"]) == cell] for rows in (new, published))
        merged += next(filter(None, found), [])
    return merged


def insert_table(page: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page with the table of these rows."""
    before, rest = page.split(BEGIN)
    header = "".join(f"<th>{escape(title, quote=False)}</th>" for title in COLUMNS.values())
    table = (
        f'<table id="leaderboard-table">\n<thead><tr>{header}</tr></thead>\n<tbody>\n{"".join(map(table_line, rows))}</tbody>\n</table>\n'
    )
    data = fill(f"Data: {describe_data(rows)}.", 120)
    measured = {(row["task"], row["factor"]) for row in rows}
    missing = "; ".join(" ".join(cell) for cell in all_cells() if cell not in measured)
    remark = f"\n{fill(f'Not measured with this version: {missing}.', 120)}\n" if missing else ""
    return f"{before}{BEGIN}{table}\n{data}\n{remark}{END}{rest.split(END)[1]}"


def describe_data(rows: Sequence[Mapping[str, str]]) -> str:
    """Return one sentence on the examples of each task."""
    return results.describe_data({"label": {"task": row["task"]}, "data": row["data"]} for row in rows)


def table_line(row: Mapping[str, str]) -> str:
    """Return one line of the table. Cells with numbers hold the exact value for sorting."""
    cells = []
    for column in COLUMNS:
        text = row[column]
        if column in TEXT_COLUMNS:
            shown = f"<code>{escape(text)}</code>" if column == "command" else escape(display_name(row) if column == "algorithm" else text)
            cells.append(f"<td>{shown}</td>")
        else:
            cells.append(f'<td data-value="{text}">{format_number(column, text, row.get(column + " sd", ""))}</td>')
    return f"<tr>{''.join(cells)}</tr>\n"


def display_name(row: Mapping[str, str]) -> str:
    """Return the algorithm, and whether the line shows its dense model."""
    return row["algorithm"] + (f", {row['model']}" if row["model"] == results.DENSE_MODEL else "")


def format_number(column: str, text: str, sd: str) -> str:
    """Return a number as a reader expects it; nothing if there is none."""
    if not text:
        return ""
    if column.startswith("bytes"):
        return format_bytes(float(text))
    if column == "density":
        return f"{float(text):g}"
    return f"{float(text):+.4f}" if column == "difference to sieve" else f"{float(text):.4f}" + (f" ± {float(sd):.4f}" if sd else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
