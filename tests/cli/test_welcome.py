"""The first commands of a new user: `fedsieve`, `doctor` and shell completion."""

import json
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError

import pytest

from fedsieve.cli import doctor
from fedsieve.cli.main import COMMANDS, SIMPLE_COMMANDS, main

KNOWN = {*COMMANDS, *SIMPLE_COMMANDS, "data", "flower", "completion"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def make_run(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (None, "fedsieve train "),
        (["config.toml"], "fedsieve train --resume runs/lr-sieve-12345678"),
        (["config.toml", "result.json"], "fedsieve inspect runs/lr-sieve-12345678"),
    ],
    ids=["no run", "interrupted run", "finished run"],
)
def test_fedsieve_without_arguments_suggests_the_next_command(files, expected, capsys, tmp_path):
    if files:
        make_run(tmp_path / "runs" / "lr-sieve-12345678", *files)
    assert main([]) == 0
    output = capsys.readouterr().out
    assert expected in output
    assert all(len(line) <= 80 for line in output.splitlines())
    assert set(re.findall(r"^  fedsieve (\w+)", output, flags=re.M)) <= KNOWN


def test_the_doctor_checks_what_a_run_needs(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {"fedsieve", "torch", "cores", "numpy", "flwr", "mnist", "browser", "runs/"} <= set(findings)
    assert findings["torch"]["state"] == findings["digits"]["state"] == "ok"
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "torch" in output and "\x1b" not in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_the_doctor_prints_the_command_that_installs_a_missing_package(capsys, monkeypatch):
    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", nothing)
    assert main(["doctor", "--json"]) == 1
    findings = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert findings["scipy"]["state"] == "WRONG" and "pip install scipy" in findings["scipy"]["detail"]
    assert findings["onnx"]["state"] == "-" and "pip install 'fedsieve[onnx]'" in findings["onnx"]["detail"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_every_command_and_is_valid_in_its_shell(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in KNOWN)
    assert "density" in script and "verify" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        assert subprocess.run([shell, "-n", "script"], capture_output=True, check=False).returncode == 0


def test_an_unknown_shell_is_one_line_and_exit_code_two(capsys):
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
