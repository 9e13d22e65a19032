"""Tiny runs of every kind, trained once for all tests of their page."""

import contextlib
import io
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
