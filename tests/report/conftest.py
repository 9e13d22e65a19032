"""Tiny runs of every kind, trained once for all tests of their page, and a browser."""

import contextlib
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedsieve.cli.main import main

SMALL = [
    "--data.num-examples",
    "300",
    "--data.num-features",
    "40",
    "--data.true-density",
    "0.1",
    "--density",
    "0.1",
    "--federation.clients",
    "10",
]
QUICK = ["--federation.participation", "0.3", "--rounds", "4", "--algorithm.local-steps", "3", "--quiet"]


NET = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(12, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))
"""


def quietly(*words):
    """A command that must succeed; what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(list(words)) == 0
    return out.getvalue()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders: lr, mc, digits, dense (a method without gates), comparison, groups (layers, whole neurons)."""
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsieve.data.synthetic.NUM_TEST_EXAMPLES", 200)
        quietly("train", "--task", "lr", *SMALL, *QUICK, "--out", str(home / "lr"))
        quietly("train", "--task", "mc", "--algorithm", "flops-pa", *SMALL, *QUICK, "--out", str(home / "mc"))
        quietly("train", "--task", "digits", *QUICK, "--out", str(home / "digits"))
        quietly("train", "--task", "lr", "--algorithm", "fed-avg", *SMALL, *QUICK, "--out", str(home / "dense"))
        words = ["--algorithms", "fed-iter-ht,sieve,fed-avg", "--seeds", "1,2", *SMALL, *QUICK]
        quietly("compare", "--task", "lr", *words, "--out", str(home / "comparison"))
        patch.chdir(home)
        np.savez("rows.npz", x=np.random.default_rng(0).normal(size=(200, 12)), y=np.arange(200) % 3)
        Path("pages_net.py").write_text(NET)
        own = [
            "--task",
            "file",
            "--data.path",
            "rows.npz",
            "--data.target",
            "y",
            "--model",
            "pages_net:build",
            "--gate-granularity",
            "neuron",
        ]
        quietly("train", *own, *QUICK, "--density", "0.4", "--algorithm.sparsity-allocation", "global", "--out", "groups")
    return home


@pytest.fixture(scope="session")
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
