"""Write the study `tables` into the documentation: `python tools/publish_tables.py reports/tables`.

Stores its table in docs/data/tables.csv, and writes the last round of every row into docs/tables.md. Published tables without a run in the
folder keep the rows that are stored already.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsieve.cli.reproduce import TABLE_CSV_FILE
from fedsieve.formatting import format_bytes
from fedsieve.report.figures.published_tables import NOT_RUN

DOCS = Path(__file__).parent.parent / "docs"
CSV, PAGE = DOCS / "data" / "tables.csv", DOCS / "tables.md"
BEGIN, END = "<!-- tables -->\n", "<!-- /tables -->\n"
HEADER = "| table | row | published | measured here | bytes theirs | bytes here |\n|---|---|---|---|---|---|\n"


def main(folder: Path) -> None:
    """Publish the study in a folder."""
    stored = read_rows(CSV)
    rows = merge_tables(stored, read_rows(folder / TABLE_CSV_FILE))
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, stored[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(insert_table(PAGE.read_text(), read_rows(CSV)))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a stored table."""
    return list(csv.DictReader(path.read_text().splitlines()))


def merge_tables(stored: Sequence[dict[str, str]], new: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of all tables in their order: the new ones if the table has a run or is not stored yet, else the stored ones."""
    merged = []
    for table in dict.fromkeys(row["table"] for row in new):
        before, now = ([row for row in rows if row["table"] == table] for rows in (stored, new))
        merged += now if not before or any(row["measured"] != NOT_RUN for row in now) else before
    return merged


def insert_table(page: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page with the table of these rows."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + HEADER + "".join(table_line(row, rows) for row in rows if is_last_round(row, rows)) + END + rest.split(END)[1]


def is_last_round(row: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> bool:
    """Return whether no row of the same table is of a later round."""
    return int(row["round"]) == max(int(other["round"]) for other in rows if other["table"] == row["table"])


def table_line(row: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> str:
    """Return one line: our own algorithms in bold, the name of a table only in its first line."""
    is_first = next(other for other in rows if is_last_round(other, rows) and other["table"] == row["table"]) is row
    table = f"{row['table']}: {row['measure']} after {row['round']} rounds" if is_first else ""
    name = f"**{row['row']}**" if row["role"] == "ours" else row["row"]
    measured = row["measured"]
    if row["measured sd"] or is_number(measured):
        measured = format_value(measured) + (f" +- {format_value(row['measured sd'])}" if row["measured sd"] else "")
    theirs, here = (format_bytes(float(row[column])) if row[column] else "" for column in ("bytes theirs", "bytes here"))
    return f"| {table} | {name} | {row['published']} | {measured or 'diverged'} | {theirs} | {here} |\n"


def is_number(text: str) -> bool:
    """Return whether a cell holds a number."""
    return text.replace(".", "", 1).replace("e-", "", 1).isdigit()


def format_value(text: str) -> str:
    """Return a number with three decimals, or two from 1 on."""
    value = float(text)
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
