"""What a newcomer meets first: `fedsieve` alone, the doctor, the shell's completion."""

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
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def left(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (None, "fedsieve train "),
        (["config.toml"], "fedsieve train --resume runs/lr-sieve-12345678"),
        (["config.toml", "result.json"], "fedsieve inspect runs/lr-sieve-12345678"),
    ],
    ids=["nothing here", "a run broke off", "a run is finished"],
)
def test_fedsieve_alone_says_what_to_do_next(files, wanted, capsys, tmp_path):
    if files:
        left(tmp_path / "runs" / "lr-sieve-12345678", *files)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert wanted in said
    assert all(len(line) <= 80 for line in said.splitlines())
    assert set(re.findall(r"^  fedsieve (\w+)", said, flags=re.M)) <= KNOWN


def test_the_doctor_finds_what_a_run_needs(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {"fedsieve", "torch", "cores", "numpy", "flwr", "mnist", "browser", "runs/"} <= set(found)
    assert found["torch"]["state"] == found["digits"]["state"] == "ok"
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "torch" in said and "\x1b" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_the_doctor_says_how_to_get_what_is_missing(capsys, monkeypatch):
    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", nothing)
    assert main(["doctor", "--json"]) == 1
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["scipy"]["state"] == "WRONG" and "pip install scipy" in found["scipy"]["detail"]
    assert found["onnx"]["state"] == "-" and "pip install 'fedsieve[onnx]'" in found["onnx"]["detail"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_is_a_script_of_that_shell(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in KNOWN)
    assert "density" in script and "verify" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        assert subprocess.run([shell, "-n", "script"], capture_output=True, check=False).returncode == 0


def test_an_unknown_shell_is_one_line(capsys):
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
