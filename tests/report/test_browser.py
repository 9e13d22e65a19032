"""The page in a real browser: it draws, sorts, downloads and follows a run, and asks nobody for anything.

Needs Debian's chromium (`apt-get install chromium`). FEDSIEVE_NO_BROWSER=1 leaves these tests out, and says so.
"""

import os
import shutil
import threading

import pytest

from fedsieve.report.html.live_server import create_server
from fedsieve.storage import run_directory


@pytest.fixture(scope="module")
def browser():
    if os.environ.get("FEDSIEVE_NO_BROWSER"):
        pytest.skip("asked for with FEDSIEVE_NO_BROWSER: this machine has no browser, so the page is not tested in one")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("no browser: `apt-get install chromium`, or set FEDSIEVE_NO_BROWSER=1 to leave these tests out", pytrace=False)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def visit(browser):
    """Open an address; afterwards nothing may have been logged, thrown, or asked of anybody but that address."""
    said, asked, contexts = [], [], []

    def go(address, width=1280, scheme="light", **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_navigation_timeout(120_000)  # a busy machine is slow, not broken
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda problem: said.append(str(problem)))
        page.on("request", lambda request: asked.append(request.url) if not request.url.startswith(("data:", "blob:", address)) else None)
        page.goto(address)
        return page

    yield go
    for context in contexts:
        context.close()
    assert said == [] and asked == []


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
