"""`fedsieve flower` as a user meets it, as far as no process is needed."""

import re
import tomllib

import pytest

from fedsieve.cli import main
from fedsieve.plan import plan_from


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_new_app_is_complete_and_every_setting_in_it_is_one(tmp_path, capsys):
    from fedsieve.template.app.task import OBJECTIVE

    assert main(["flower", "new", "My App!"]) == 0
    assert "fedsieve flower run" in capsys.readouterr().out
    written = tomllib.loads((tmp_path / "My App!" / "pyproject.toml").read_text())
    assert written["project"]["name"] == "my-app" and written["project"]["dependencies"] == []
    config = written["tool"]["flwr"]["app"]["config"]
    assert all(re.fullmatch("[a-z-]+", name) for name in config)
    assert plan_from(config, OBJECTIVE).clients == 3
    assert "APP-NAME" not in "".join(path.read_text() for path in (tmp_path / "My App!").rglob("*.*") if path.is_file())


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    assert main(["flower", "new", "there"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "cannot be read"),
        (["app", "--nodes", "0"], "at least 1"),
        (["app", "--nodes", "two"], "whole number"),
        (["app", "--run-config", "speed=1"], "the app has no such setting"),
        (["app", "--run-config", "rounds"], "KEY=VALUE"),
        (["other"], "no Flower app"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path, capsys, words, message):
    assert main(["flower", "new", "app"]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert main(["flower", "run", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
