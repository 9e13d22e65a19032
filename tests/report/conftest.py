"""Tiny runs of every kind, trained once for all tests of their page."""

import contextlib
import io

import pytest

from fedsieve.cli import main

SMALL = ["--data.rows", "300", "--data.features", "40", "--data.true-density", "0.1", "--density", "0.1", "--federation.clients", "10"]
QUICK = ["--federation.participation", "0.3", "--rounds", "4", "--algorithm.steps", "3", "--quiet"]


def quietly(*words):
    """A command that must succeed; what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(list(words)) == 0
    return out.getvalue()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders: lr, mc, digits, dense (a method without gates), comparison."""
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsieve.data.synthetic.TEST_ROWS", 200)
        quietly("train", "--task", "lr", *SMALL, *QUICK, "--out", str(home / "lr"))
        quietly("train", "--task", "mc", "--method", "flops-pa", *SMALL, *QUICK, "--out", str(home / "mc"))
        quietly("train", "--task", "digits", *QUICK, "--out", str(home / "digits"))
        quietly("train", "--task", "lr", "--method", "fed-avg", *SMALL, *QUICK, "--out", str(home / "dense"))
        words = ["--methods", "fed-iter-ht,sieve,fed-avg", "--seeds", "1,2", *SMALL, *QUICK]
        quietly("compare", "--task", "lr", *words, "--out", str(home / "comparison"))
    return home
