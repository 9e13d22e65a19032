"""Rows of a benchmark in docs/data, and the table that a page shows of them."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the stored rows."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def compute_rows(path: Path, keys: Sequence[str], cells: Sequence[tuple[Any, ...]], measure: Callable[..., Mapping[str, Any]]) -> None:
    """Append the row of each cell (its values of the first columns) that is not stored yet."""
    for cell in cells:
        rows = read_rows(path)
        if any(tuple(row[key] for key in keys) == tuple(map(str, cell)) for row in rows):
            continue
        row = dict(zip(keys, cell, strict=True)) | dict(measure(*cell))
        print(row, flush=True)
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if not rows:
                writer.writeheader()
            writer.writerow(row)


def read_section(page: Path, name: str) -> str:
    """Return the text of a page between the marks of a table."""
    return page.read_text().split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]


def write_section(page: Path, name: str, table: str) -> None:
    """Replace the text of a page between the marks of a table."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, rest = page.read_text().split(begin)
    page.write_text(f"{head}{begin}{table}\n{end}{rest.split(end)[1]}")
