"""What is released: a wheel with everything in it, which works where nothing else is installed than what it asks for."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import fedsieve

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built with what is installed here, so that no network is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_every_module_its_types_and_the_parts_of_the_report(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    there = {
        str(path.relative_to(source)) for path in (source / "fedsieve").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert there <= inside
    assert {"fedsieve/py.typed", "fedsieve/report/html/template.html", "fedsieve/report/html/page.css"} <= inside
    assert wheel.name.startswith(f"fedsieve-{fedsieve.__version__}-py3")


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == fedsieve.__version__
    assert f"version: {fedsieve.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert json.loads((ROOT / "codemeta.json").read_text())["version"] == fedsieve.__version__


def test_the_hosted_tests_use_every_python_that_the_package_claims():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    claimed = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert claimed[0] == PROJECT["requires-python"].removeprefix(">=") and re.findall(r'"(3\.\d+)"', workflow) == claimed


def test_workflows_and_hooks_call_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for path in (*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".pre-commit-config.yaml"):
        called = re.findall(r"(?:run|entry): make ([a-z-]+)$", path.read_text(), flags=re.MULTILINE)
        listed = re.findall(r"target: \[(.+)\]", path.read_text())
        assert called or listed, path
        assert {*called, *(name for names in listed for name in names.split(", "))} <= targets, path


USED = """
import sys

optional = {optional}


class Refuse:
    \"\"\"As if these were not installed.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in optional:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Refuse())
import fedsieve

print(fedsieve.__file__)
for name in fedsieve.__all__:
    getattr(fedsieve, name)
from fedsieve.cli.main import main

small = ["--data.num-examples", "300", "--data.num-features", "40", "--density", "0.1", "--federation.clients", "10"]
assert main(["train", *small, "--rounds", "1", "--federation.participation", "0.3", "--quiet", "--out", "run"]) == 0
assert main(["report", "run"]) == main(["inspect", "run"]) == main(["doctor"]) == 0
assert main(["export", "run", "--format", "npz", "--verify"]) == 0
assert main(["export", "run", "--format", "onnx"]) == main(["train", "--tracker", "tensorboard", "--quiet"]) == 2
"""
OPTIONAL = {
    "onnx",
    "onnxruntime",
    "onnxscript",
    "tensorboard",
    "trackio",
    "flwr",
    "numba",
    "plotly",
    "jinja2",
    "pandas",
    "zensical",
    "playwright",
}


def used(python, folder, path=""):
    done = subprocess.run(
        [python, "-c", USED.format(optional=OPTIONAL)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'fedsieve[onnx]'" in done.stderr and "pip install 'fedsieve[track]'" in done.stderr
    return Path(done.stdout.splitlines()[0])


def test_the_wheel_works_with_the_core_dependencies_only(wheel, tmp_path):
    target = tmp_path / "installed"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(words, check=True, capture_output=True)
    assert used(sys.executable, tmp_path, str(target)).is_relative_to(target)


@pytest.mark.long  # gets torch
def test_the_wheel_is_installed_into_an_empty_environment_and_works(wheel, tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    assert used(python, tmp_path).is_relative_to(tmp_path / "empty")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_nothing_needs_a_package_that_the_wheel_does_not_ask_for():
    extras = [text for name, extra in PROJECT["optional-dependencies"].items() if name != "dev" for text in extra]
    asked = {re.match(r"[\w-]+", text)[0].lower().replace("-", "_") for text in [*PROJECT["dependencies"], *extras]}
    allowed = asked - {"scikit_learn"} | {
        "sklearn",
        "fedsieve",
        "wandb",
        "mlflow",
        *sys.stdlib_module_names,
    }  # two trackers nobody is made to have
    for path in (ROOT / "src" / "fedsieve").rglob("*.py"):
        if "template" not in path.parts:  # a user's own app
            assert set(imported(path)) <= allowed, path
