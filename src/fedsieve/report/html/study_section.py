"""The section about a study: its table with the paper's numbers, its figures and the claims that it tests."""

import json
from base64 import b64encode
from pathlib import Path

from fedsieve.report import tables
from fedsieve.report.html.elements import Html, PageLimits, TableData, element, html_table
from fedsieve.studies import results


def render_study(folder: Path) -> Html:
    """Return all sections of one study."""
    plan, rows = results.read_plan(folder), results.read_rows(folder)
    found = tables.study_table(plan["name"], plan["description"], plan["scale"], rows)
    parts = [element("h2", f"{plan['name']}, scale {plan['scale']}"), element("p", plan["description"])]
    if found.entries:
        parts.append(html_table(TableData(plan["name"], found.columns, found.formatted_cells()), PageLimits()))
    parts.append(element("ul", *(element("li", note) for note in found.notes)))
    parts += [image_figure(path, plan["description"]) for path in sorted(folder.glob("*.png"))]
    if (folder / results.CLAIMS_FILE).exists():
        parts.append(claims_table(folder / results.CLAIMS_FILE))
    return element("section", *parts)


def image_figure(path: Path, description: str) -> Html:
    """Return an embedded figure with a text alternative."""
    data = f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"
    image = element("img", src=data, alt=f"{path.stem}: {description}; its numbers are in the table above", style="max-width:100%")
    return element("figure", image, element("figcaption", path.stem))


def claims_table(path: Path) -> Html:
    """Return the claims of the paper that this study tests."""
    rows = [(claim["number"], claim["claim"], claim["recipe"], claim["verdict"]) for claim in json.loads(path.read_text())["claims"]]
    return html_table(TableData("claims", ("number", "claim", "recipe", "verdict"), rows), PageLimits())
