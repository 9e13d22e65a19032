"""A study on the page: its table beside the paper's numbers, its figures, and the claims its rows judge."""

import json
from base64 import b64encode
from pathlib import Path

from fedsieve.report import tables
from fedsieve.report.html.elements import Budget, Markup, Table, table, tag
from fedsieve.studies import results

CLAIMS = "claims.json"


def is_study(folder: Path) -> bool:
    """Whether `fedsieve reproduce` filled this folder."""
    return (folder / results.PLAN).exists()


def find_studies(folder: Path) -> list[Path]:
    """The study in a folder, or those in the folders below it."""
    return [folder] if is_study(folder) else sorted(path for path in folder.glob("*") if is_study(path))


def study(folder: Path) -> Markup:
    """Everything about one study."""
    plan, rows = results.read_plan(folder), results.read(folder)
    found = tables.study_table(plan["name"], plan["about"], plan["scale"], rows)
    parts = [tag("h2", f"{plan['name']}, scale {plan['scale']}"), tag("p", plan["about"])]
    if found.entries:
        parts.append(table(Table(plan["name"], found.columns, found.cells()), Budget()))
    parts.append(tag("ul", *(tag("li", note) for note in found.notes)))
    parts += [picture(path, plan["about"]) for path in sorted(folder.glob("*.png"))]
    if (folder / CLAIMS).exists():
        parts.append(verdicts(folder / CLAIMS))
    return tag("section", *parts)


def picture(path: Path, about: str) -> Markup:
    """A figure inside the page, told in words for those who do not see it."""
    data = f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"
    image = tag("img", src=data, alt=f"{path.stem}: {about}; its numbers are in the table above", style="max-width:100%")
    return tag("figure", image, tag("figcaption", path.stem))


def verdicts(path: Path) -> Markup:
    """The paper's claims, as far as this study judges them."""
    rows = [(claim["number"], claim["claim"], claim["verdict"]) for claim in json.loads(path.read_text())]
    return table(Table("claims", ("claim", "what it says", "verdict"), rows), Budget())
