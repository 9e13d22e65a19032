"""Code that a file of a stranger names: it runs only if the user says so."""

import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from fedsieve.cli.main import main
from fedsieve.models.export import Format
from fedsieve.storage import run_directory
from helpers.models import lenet_model

STRANGE_CODE = """from pathlib import Path
from torch import nn
Path("executed").touch()
def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
"""
RNG = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with examples and a module of a stranger that leaves a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.py").write_text(STRANGE_CODE)
    np.savez(tmp_path / "rows.npz", x=RNG.standard_normal((60, 4)).astype(np.float32), y=np.arange(60) % 3)
    yield tmp_path
    sys.modules.pop("strange", None)


def was_executed(folder):
    return (folder / "executed").exists()


TRAIN = ["train", "--task", "file", "--data.path", "rows.npz", "--federation.clients", "3", "--rounds", "2", "--density", "0.5", "--quiet"]


@pytest.fixture
def trained(folder):
    """A run whose model the user named on the command line; the trace of this first import is removed."""
    assert main([*TRAIN, "--model", "strange:build", "--out", "run"]) == 0
    assert was_executed(folder)
    (folder / "executed").unlink()
    del sys.modules["strange"]
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "run", "rows.npz"],
        ["predict", "run/model.safetensors", "rows.npz"],
        ["export", "run", "--format", "torch"],
        ["export", "run", "--format", "onnx"],
        ["export", "run", "--verify"],
        ["train", "--resume", "run", "--rounds", "3"],
        ["train", "--config", "run/config.toml", "--out", "again"],
    ],
)
def test_a_factory_in_a_file_runs_only_with_trust(words, trained, capsys):
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "names strange:build, which would be imported and called" in text and "--trust" in text
    assert not was_executed(trained)
    if "onnx" not in words:
        assert main([*words, "--trust"]) == 0
        assert was_executed(trained)


def test_a_comparison_imports_no_factory_of_its_folder(trained, capsys):
    words = ["compare", "--algorithms", "fed-avg", "--seeds", "0", "--density", "0.5", "--rounds", "2", "--quiet"]
    words += ["--task", "file", "--data.path", "rows.npz", "--federation.clients", "3", "--out", "both"]
    assert main(words) == 0
    shutil.copy("run/config.toml", "both/fed-avg-seed0/config.toml")
    assert main(words) == 2
    assert not was_executed(trained)


@pytest.mark.parametrize("words", [["inspect", "run"], ["export", "run", "--format", "npz"], ["report", "run"]])
def test_what_needs_no_module_needs_no_trust(words, trained, capsys):
    assert main(words) == 0
    assert not was_executed(trained)


def test_a_factory_on_the_command_line_needs_no_flag(trained):
    assert main(["train", "--resume", "run", "--rounds", "3", "--model", "strange:build", "--quiet"]) == 0
    assert was_executed(trained)


def test_the_networks_of_this_package_need_no_flag(write_model, folder, capsys):
    np.savez(folder / "images.npz", x=RNG.standard_normal((2, 28, 28)).astype(np.float32))
    assert main(["predict", str(write_model(lenet_model())), "images.npz"]) == 0


@pytest.mark.parametrize("name", ["sys:exit", "fedsieve.cli.main:main", "strange:missing"])
def test_a_factory_that_is_none_is_one_line_even_with_trust(name, write_model, folder, capsys, monkeypatch):
    model = lenet_model()
    path = write_model(replace(model, metadata=replace(model.metadata, factory=name)), Format.SAFETENSORS)
    np.savez(folder / "images.npz", x=RNG.standard_normal((2, 28, 28)).astype(np.float32))
    assert main(["predict", str(path), "images.npz"]) == 2
    assert "--trust" in capsys.readouterr().err
    if name != "fedsieve.cli.main:main":  # it is a function, and builds no module
        assert main(["predict", str(path), "images.npz", "--trust"]) == 2
        assert "cannot be loaded" in capsys.readouterr().err


def test_a_file_in_the_working_directory_replaces_no_package(folder):
    """`python -m` would put the working directory first: matplotlib.py there would run instead of the package."""
    (folder / "matplotlib.py").write_text(STRANGE_CODE)
    (folder / "strange.py").write_text(STRANGE_CODE + "import matplotlib\nassert hasattr(matplotlib, '__version__')\n")
    words = [sys.executable, "-m", "fedsieve", "data", "show", "digits"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not was_executed(folder)
    assert main([*TRAIN, "--model", "strange:build", "--out", "run"]) == 0


def test_the_stored_settings_say_nothing_about_trust(trained):
    assert "trust" not in tomllib.loads((trained / "run" / run_directory.CONFIG).read_text())
