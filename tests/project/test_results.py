"""The tables of the results page are those of their data files."""

import csv
import re
from pathlib import Path

import pytest

from benchmarks import estimators, networks
from benchmarks.stored_rows import read_rows, read_section
from fedsieve.report.figures.ablation import DIFFERENCE_TO_DEFAULT
from fedsieve.report.tables import StudyTable

ROOT = Path(__file__).parents[2]
PAGE, *OTHERS = ((ROOT / "docs" / name).read_text() for name in ("results.md", "figures.md", "topologies.md", "reliability.md"))
PAGES = "".join((PAGE, *OTHERS))
NUMBERS = ("truth", "target", "paper", "error", DIFFERENCE_TO_DEFAULT, "bytes of a node", "rounds to target")


@pytest.fixture
def tool(monkeypatch):
    """The tool that writes the page."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return __import__("publish_results")


def read_table(name):
    """Return the stored table of a study; a mean and its standard deviation are two columns of the file."""
    rows = list(csv.DictReader((ROOT / "docs" / "data" / f"{name}.csv").read_text().splitlines()))
    return StudyTable("", [], list(rows[0]), [read_entry(row) for row in rows])


def read_entry(row):
    """Return a row with numbers in place of their text."""
    number = {column: float(text) if text else None for column, text in row.items() if column in NUMBERS or f"{column} sd" in row}
    means = {column: read_mean(number[column], row[f"{column} sd"]) for column in number if f"{column} sd" in row}
    return {**row, **number, **means}


def read_mean(mean, sd):
    """Return a mean and its standard deviation, which one seed does not have; None if nothing was measured."""
    return None if mean is None else {"mean": mean, "sd": float(sd) if sd else None}


@pytest.mark.parametrize("name", ["communication", "table-1", "table-2", "ablation", "topologies", "robustness"])
def test_a_table_of_the_page_is_that_of_its_data(name, tool):
    section = PAGES.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    assert "\n".join(line for line in section.splitlines() if line.startswith("|")) == tool.TABLES[name](read_table(name))


def test_tables_of_benchmarks_are_those_of_their_data():
    assert read_section(networks.PAGE, "networks") == networks.results_table(read_rows(networks.DATA))
    rows = read_rows(estimators.DATA)
    for section, hospitals in estimators.SECTIONS.items():
        kept = [row for row in rows if row["hospitals"] == hospitals]
        assert read_section(estimators.PAGE, section) == estimators.results_table(kept)


def test_the_page_on_densities_shows_the_stored_runs_of_sieve(tool):
    rows = list(csv.DictReader((ROOT / "docs" / "data" / "sieve.csv").read_text().splitlines()))
    page = (ROOT / "docs" / "density.md").read_text()
    assert tool.replace_section(page, "density", tool.density_table(rows, tool.data_of_tasks(PAGE))) == page, "run tools/publish_results.py"


def test_every_figure_is_shown_in_its_section(tool):
    for name, (image, _) in tool.IMAGES.items():
        section = PAGES.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
        assert re.search(rf"^!\[.+\]\(images/{image}\.png\)$", section, re.MULTILINE)
        assert (ROOT / "docs" / "images" / f"{image}.png").exists() and (ROOT / "docs" / "data" / f"{name}.csv").exists()


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 220
