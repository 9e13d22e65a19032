"""The documentation: generated pages are what the code says, every link leads somewhere, every command of the first page works."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page, language):
    """Return the code blocks of one language on a page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("name", ["cli", "api"])
def test_generated_pages_are_what_the_code_says(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool = __import__(f"{name}_reference")
    assert (ROOT / "docs" / f"{name}.md").read_text() == tool.build_reference(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_have_existing_targets(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation():
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted([*named, "research-log.md"]) == [page.name for page in PAGES], "name the page in mkdocs.yml; the log has no entry"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from a copy; warnings (a link or an anchor that leads nowhere) are errors."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    words = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return folder / "site"


def test_the_site_is_built_without_a_warning_and_has_every_page(site):
    assert {page.stem for page in PAGES} <= {page.stem for page in site.glob("*.html")}


def test_the_site_loads_no_external_resources(site):
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)", page.read_text())
        assert not loaded, page.name


WORKS = """
import shlex
from fedsieve.cli.main import main

for kind, text in {steps!r}:
    if kind == "python":
        exec(text, {{}})
        continue
    for line in text.replace(chr(92) + chr(10), " ").splitlines():
        assert line.startswith("fedsieve "), line
        assert main(shlex.split(line)[1:]) == 0, line
"""


def test_every_command_of_the_first_page_works_and_so_does_the_python_of_the_others(tmp_path):
    """In a process of its own, where shapes are not checked, at the speed that users see."""
    steps = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), flags=re.DOTALL)
    assert sum(kind == "sh" for kind, _ in steps) >= 6
    (nets, load, objective), (own,), (read,) = blocks("module.md", "python"), blocks("data.md", "python"), blocks("use.md", "python")
    (tmp_path / "nets.py").write_text(nets)
    saved = "import torch; from nets import build; torch.save(build().state_dict(), 'model.pt')"
    steps += [("python", text) for text in (saved, load, objective, own, read, *blocks("python.md", "python"))]
    done = subprocess.run([sys.executable, "-c", WORKS.format(steps=steps)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in (
        "exactly 64 of 640",
        "exactly 6 of 30",
        "6 strongest of 6 used features",
        "what the cheapest needs",
        "verified in onnxruntime",
        "weights have a gate",
    ):
        assert text in done.stdout
    assert "accuracy 0.9" in done.stderr
    assert (tmp_path / "predictions.csv").read_text().startswith("prediction,probability\n")


def test_every_test_the_reliability_page_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text())
    assert len(named) > 15
    for file, function in named:
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), function


def test_every_test_the_security_page_names_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 30
    for file, function in named:
        path = ROOT / "tests" / (file if "/" in file else f"attacks/{file}")
        assert f"def {function}(" in path.read_text(), function
