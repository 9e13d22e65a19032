"""Pieces of HTML: escaped text, tables that sort and download, figures with a text alternative."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

Cell = str | float | int | bool | None


class Html(str):
    """Text that is HTML and is not escaped."""

    __slots__ = ()


class PageLimits:
    """Limits for the size of a page: a page of many runs shows every n-th row."""

    def __init__(self, num_runs: int = 1) -> None:
        self.max_rows = max(12, min(1000, 1000 // max(num_runs, 1)))
        self.max_cells = 10 * self.max_rows
        self.max_points = max(60, min(400, 4000 // max(num_runs, 1)))


class TableData(NamedTuple):
    """A table with named columns."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def escape_text(value: Any) -> str:
    """Return escaped text; HTML is returned unchanged."""
    return value if isinstance(value, Html) else escape(str(value))


def element(name: str, *content: Any, **attributes: Any) -> Html:
    """Return an element; `class_` and `aria_label` become class and aria-label, None and False are left out."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{attribute_text}>{''.join(map(escape_text, content))}</{name}>")


def format_cell(value: Cell) -> str:
    """Return the text of a cell: large numbers with thousands separators, others with five digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and 10_000 <= abs(value) < 1e15:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def downsample(items: Sequence[Any], max_items: int) -> list[Any]:
    """Return at most `max_items` evenly spaced items, including the first and the last."""
    if len(items) <= max_items:
        return list(items)
    indices = sorted({round(i * (len(items) - 1) / (max_items - 1)) for i in range(max_items)})
    return [items[i] for i in indices]


def html_table(data: TableData, limits: PageLimits, *, sortable: bool = True) -> Html:
    """Return a table that sorts by column and downloads as CSV. Cells contain the exact number as an attribute."""
    data = drop_empty_columns(data)
    rows = downsample(data.rows, max(2, min(limits.max_rows, limits.max_cells // len(data.columns))))
    caption = data.caption + (f" ({len(rows)} of {len(data.rows)} rows, evenly spaced)" if len(rows) < len(data.rows) else "")
    numeric = [any(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows) for i in range(len(data.columns))]
    heads = (
        element("th", element("button", name, type="button") if sortable else name, scope="col", class_="n" if number else None)
        for name, number in zip(data.columns, numeric, strict=True)
    )
    body = ("<tr>" + "".join(map(_cell_html, row, numeric)) + "</tr>" for row in rows)
    head = f"<caption>{escape_text(caption)}</caption><thead><tr>{''.join(heads)}</tr></thead>"
    table = Html(f"<table>{head}<tbody>{''.join(body)}</tbody></table>")
    return element("div", table, class_="table", tabindex="0", role="region", aria_label=caption)


def drop_empty_columns(data: TableData) -> TableData:
    """Return the table without empty columns."""
    keep = [i for i in range(len(data.columns)) if not data.rows or any(row[i] is not None for row in data.rows)]
    return data._replace(columns=[data.columns[i] for i in keep], rows=[[row[i] for i in keep] for row in data.rows])


def _cell_html(value: Cell, numeric: bool) -> str:
    text = format_cell(value)
    is_rounded = isinstance(value, int | float) and not isinstance(value, bool) and text and repr(value) != text
    attributes = (' class="n"' if numeric else "") + (f' data-v="{value!r}"' if is_rounded else "")
    return f"<td{attributes}>{escape_text(value if isinstance(value, Html) else text)}</td>"


def figure(title: str, description: str, chart: str, data: TableData, limits: PageLimits, *, wide: bool = False) -> Html:
    """Return a chart with its caption, a text alternative and its numbers."""
    return element(
        "figure",
        element("figcaption", element("strong", title), " ", element("span", description)),
        Html(chart),
        element("details", element("summary", "Numbers"), html_table(data, limits), class_="numbers"),
        class_="wide" if wide else None,
    )


def definition_list(pairs: Iterable[tuple[str, Any]]) -> Html:
    """Return a list of names and values."""
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs))


def section(title: str, *content: Any, level: int = 2) -> Html:
    """Return a section with a heading."""
    return element("section", element(f"h{level}", title), *content)


def figure_grid(*figures: Html) -> Html:
    """Return figures next to each other if there is room."""
    return element("div", *figures, class_="figures")
