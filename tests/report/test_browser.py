"""The page in a real browser: it draws, sorts, downloads and follows a run, and asks nobody for anything.

Needs Debian's chromium (`apt-get install chromium`). FEDSIEVE_NO_BROWSER=1 leaves these tests out, and says so.
"""

import re
import shutil
import threading
from pathlib import Path

import pytest

from fedsieve.report.html.live_server import create_server
from fedsieve.storage import run_directory

KINDS = ["lr", "mc", "digits", "dense", "groups", "comparison"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_every_chart_is_drawn_and_the_page_does_not_overflow(runs, visit, kind, width, scheme):
    page = visit((runs / kind / "report.html").as_uri(), width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    drawn = page.evaluate(
        """[...document.querySelectorAll('svg.chart')].map((chart) => {
            const box = chart.getBoundingClientRect();
            const marks = [...chart.querySelectorAll('.line, .fill, image')].map((mark) => mark.getBBox());
            return box.width > 100 && box.height > 20 && marks.some((mark) => mark.width > 0 || mark.height > 0);
        })"""
    )
    assert len(drawn) >= 8 and all(drawn)
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_tables_sort_by_click_and_by_keyboard(runs, visit):
    page = visit((runs / "comparison" / "report.html").as_uri())
    table = page.locator("table", has=page.locator("caption", has_text="6 runs"))
    head = table.locator("th", has_text="bytes")
    column = head.evaluate("(cell) => cell.cellIndex")

    def shown():
        return [
            int(row)
            for row in table.evaluate(
                f"(t) => [...t.tBodies[0].rows].map((r) => r.cells[{column}].dataset.v ?? r.cells[{column}].textContent)"
            )
        ]

    assert head.get_attribute("aria-sort") is None
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending" and shown() == sorted(shown())
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and shown() == sorted(shown(), reverse=True)
    other = table.locator("th", has_text="algorithm").locator("button")
    other.focus()
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") is None


def test_a_table_downloads_as_the_data(runs, visit, tmp_path):
    page = visit((runs / "lr" / "report.html").as_uri())
    figure = page.locator("figure", has=page.locator("strong", has_text="Density per round"))
    figure.locator("summary").click()
    with page.expect_download() as download:
        figure.get_by_role("button", name="Download as CSV").click()
    assert download.value.suggested_filename == "density-per-round.csv"
    download.value.save_as(tmp_path / "d.csv")
    head, *lines = (tmp_path / "d.csv").read_text().splitlines()
    assert head == "round,expected,at test time"
    rows = run_directory.read_metrics(runs / "lr")
    assert [[float(v) for v in line.split(",")] for line in lines] == [[r["round"], r["expected_density"], r["test_density"]] for r in rows]


def test_the_numbers_of_a_chart_are_shown_by_keyboard(runs, visit):
    page = visit((runs / "lr" / "report.html").as_uri())
    page.locator("figure", has=page.locator("strong", has_text="R2 per round")).locator("svg.chart").focus()
    page.keyboard.press("Home")
    assert page.locator("#tip").inner_text().startswith("round  1\n")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").inner_text().startswith("round  2\n")
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_the_theme_follows_the_system_until_it_is_chosen(runs, visit):
    page = visit((runs / "lr" / "report.html").as_uri(), scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.locator("#theme").click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)" != dark
    page.locator("#theme").click()
    assert page.evaluate(paper) == dark


def test_reading_needs_no_script(runs, visit):
    page = visit((runs / "lr" / "report.html").as_uri(), java_script_enabled=False)
    assert page.locator("svg.chart").first.is_visible()
    details = page.locator("details.numbers").first
    details.locator("summary").click()
    assert details.locator("table").is_visible()
    assert not page.locator("#theme").is_visible()


def test_a_link_to_a_run_opens_it(runs, visit):
    page = visit((runs / "comparison" / "report.html").as_uri())
    page.locator("a", has_text="sieve-seed2").click()
    page.wait_for_function("document.querySelectorAll('details.run[open]').length === 1")


def test_a_watched_page_follows_the_run_and_keeps_what_is_open(runs, visit, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(runs / "lr", place)
    (place / "result.json").unlink()
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(lines[:2]))
    made = create_server(place, 0)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        page = visit(f"http://127.0.0.1:{made.server_address[1]}/")
        page.get_by_text("2 of 4", exact=True).wait_for()
        page.locator("details.numbers summary").first.click()
        page.wait_for_timeout(1200)
        with (place / "metrics.jsonl").open("a") as file:
            file.write(lines[2])
        page.get_by_text("3 of 4", exact=True).wait_for(timeout=10_000)
        assert page.locator("details.numbers").first.evaluate("(one) => one.open")
        assert page.locator("details.numbers").first.locator("tbody tr").count() == 3
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def test_the_leaderboard_sorts_numbers_and_shows_one_task(visit, tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    table = re.search(r"<table.*</table>", (docs / "leaderboard.md").read_text(), re.DOTALL)
    assert table is not None
    (tmp_path / "index.html").write_text(f"<meta charset='utf-8'>{table[0]}<script>{(docs / 'leaderboard.js').read_text()}</script>")
    page = visit((tmp_path / "index.html").as_uri())
    page.get_by_role("button", name="bytes, all rounds").click()
    page.get_by_label("task and setting").select_option("mc, density .05")
    rows = [row for row in page.locator("tbody tr").all() if row.is_visible()]
    assert {row.locator("td").first.inner_text() for row in rows} == {"mc"}
    sent = [float(row.locator("td").nth(7).get_attribute("data-value")) for row in rows]
    assert len(sent) > 5 and sent == sorted(sent, reverse=True)
