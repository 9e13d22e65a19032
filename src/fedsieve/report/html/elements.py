"""Pieces of HTML: escaped text, tables that sort and download, figures with a text alternative."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

Cell = str | float | int | bool | None


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


class Budget:
    """How much a page may hold of each run: a page of many runs shows every n-th row."""

    def __init__(self, runs: int = 1) -> None:
        self.rows = max(12, min(1000, 1000 // max(runs, 1)))
        self.cells = 10 * self.rows
        self.points = max(60, min(400, 4000 // max(runs, 1)))


class Table(NamedTuple):
    """Rows under named columns."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def text(value: Any) -> str:
    """Escaped, unless it is markup."""
    return value if isinstance(value, Markup) else escape(str(value))


def tag(name: str, *content: Any, **attributes: Any) -> Markup:
    """An element; `class_` and `aria_label` become class and aria-label, None and False are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>{''.join(map(text, content))}</{name}>")


def shown(value: Cell) -> str:
    """A cell as people read it: large numbers whole and in groups of three, others to five digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and 10_000 <= abs(value) < 1e15:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def thinned(rows: Sequence[Any], most: int) -> list[Any]:
    """At most about `most` of the rows, evenly, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    places = sorted({round(i * (len(rows) - 1) / (most - 1)) for i in range(most)})
    return [rows[i] for i in places]


def table(data: Table, budget: Budget, *, sortable: bool = True) -> Markup:
    """A table whose headers sort and whose rows download as CSV. The exact number stands beside a shortened one."""
    data = without_empty_columns(data)
    rows = thinned(data.rows, max(2, min(budget.rows, budget.cells // len(data.columns))))
    caption = data.caption + (f" ({len(rows)} of {len(data.rows)} rows, evenly)" if len(rows) < len(data.rows) else "")
    numeric = [any(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows) for i in range(len(data.columns))]
    heads = (
        tag("th", tag("button", name, type="button") if sortable else name, scope="col", class_="n" if number else None)
        for name, number in zip(data.columns, numeric, strict=True)
    )
    body = ("<tr>" + "".join(map(_cell, row, numeric)) + "</tr>" for row in rows)
    return tag(
        "div",
        Markup(f"<table><caption>{text(caption)}</caption><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(body)}</tbody></table>"),
        class_="table",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def without_empty_columns(data: Table) -> Table:
    """What no row has is not shown."""
    keep = [i for i in range(len(data.columns)) if not data.rows or any(row[i] is not None for row in data.rows)]
    return data._replace(columns=[data.columns[i] for i in keep], rows=[[row[i] for i in keep] for row in data.rows])


def _cell(value: Cell, numeric: bool) -> str:
    seen = shown(value)
    exact = (
        f' data-v="{value!r}"' if isinstance(value, int | float) and not isinstance(value, bool) and repr(value) != seen and seen else ""
    )
    aligned = ' class="n"' if numeric else ""
    return f"<td{aligned}{exact}>{text(value if isinstance(value, Markup) else seen)}</td>"


def figure(title: str, says: str, drawing: str, data: Table, budget: Budget, *, wide: bool = False) -> Markup:
    """A drawing with its caption, what it says in words, and its numbers."""
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), " ", tag("span", says)),
        Markup(drawing),
        tag("details", tag("summary", "Numbers"), table(data, budget), class_="numbers"),
        class_="wide" if wide else None,
    )


def facts(pairs: Iterable[tuple[str, Any]]) -> Markup:
    """Names and values."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs))


def section(title: str, *content: Any, level: int = 2) -> Markup:
    """A part of the page with a heading."""
    return tag("section", tag(f"h{level}", title), *content)


def figures(*drawn: Markup | None) -> Markup:
    """Figures side by side where there is room."""
    return tag("div", *(one for one in drawn if one), class_="figures")
