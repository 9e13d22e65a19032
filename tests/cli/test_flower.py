"""The command `fedsieve flower`."""

import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsieve.cli.flower import parse_pairs, resume_hint
from fedsieve.cli.main import main
from fedsieve.core.settings import flatten
from fedsieve.deployment.deployment_config import deployment_config


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_new_app_is_complete_and_its_run_config_is_valid(tmp_path, capsys):
    from fedsieve.deployment.template.app.task import OBJECTIVE

    assert main(["flower", "new", "My App!"]) == 0
    assert "fedsieve flower run" in capsys.readouterr().out
    written = tomllib.loads((tmp_path / "My App!" / "pyproject.toml").read_text())
    assert written["project"]["name"] == "my-app" and written["project"]["dependencies"] == []
    deployment = deployment_config(flatten(written["tool"]["flwr"]["app"]["config"]), OBJECTIVE)
    assert deployment.clients == 3 and deployment.algorithm_name == "flops-pa"
    assert "APP-NAME" not in "".join(path.read_text() for path in (tmp_path / "My App!").rglob("*.*") if path.is_file())


def test_a_new_app_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    assert main(["flower", "new", "there"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "cannot be read"),
        (["app", "--nodes", "0"], "--nodes must be a whole number, at least 1; got 0"),
        (["app", "--run-config", "clients=none"], "clients must be a whole number, at least 1; got none"),
        (["app", "--nodes", "2", "--run-config", "clients=3"], "set the same thing"),
        (["app", "--run-config", "run-dir=/here"], "use --out /here"),
        (["app", "--nodes", "two"], "whole number"),
        (["app", "--run-config", "speed=1"], "the app has no such setting"),
        (["app", "--run-config", "rounds"], "KEY=VALUE"),
        (["app", "--run-config", "rounds=2 speed"], "KEY=VALUE"),
        (["app", "--run-config", "rounds=2 speed=1"], "--run-config speed: the app has no such setting"),
        (["other"], "no Flower app"),
        (["app", "--resume", "nowhere"], "holds no run"),
        (["app", "--resume", "there", "--out", "here"], "has no meaning with --resume"),
    ],
)
def test_an_invalid_command_is_refused_before_any_process_starts(tmp_path, capsys, arguments, message):
    assert main(["flower", "new", "app"]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert main(["flower", "run", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_run_config_pairs_are_parsed_as_flower_parses_them():
    arguments = ('rounds=2 density=0.1 algorithm.name="fed-avg"', "run-dir='/a b'", "data.path=/x", "client-weighting=sqrt")
    expected = {"rounds": 2, "density": 0.1, "algorithm.name": "fed-avg", "run-dir": "/a b", "data.path": "/x", "client-weighting": "sqrt"}
    assert parse_pairs(arguments) == expected


def test_a_failed_run_is_resumed_only_if_it_had_started(tmp_path):
    assert resume_hint(Path("app"), tmp_path) == "start again with: fedsieve flower run app"
    (tmp_path / "config.toml").touch()
    assert resume_hint(Path("app"), tmp_path) == f"resume with: fedsieve flower run app --resume {tmp_path}"


def test_without_flower_the_error_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fedsieve.deployment.local_cluster.shutil.which", lambda *_, **__: None)
    assert main(["flower", "new", "app"]) == 0
    assert main(["flower", "run", "app"]) == 1
    assert "pip install 'fedsieve[flower]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_ray_the_error_of_a_simulation_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("fedsieve.cli.flower.find_spec", lambda name: None)
    assert main(["flower", "new", "app"]) == 0
    assert main(["flower", "run", "app", "--simulation"]) == 1
    assert "Flower's simulation needs Ray" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def added_lines(page, name):
    """The lines that docs/deploy.md adds to a file of Flower's quickstart."""
    (block,) = re.findall(rf"`{name}`[^\n]*\n\n```diff\n(.*?)```", page, flags=re.DOTALL)
    return "".join(line[1:] + "\n" for line in block.splitlines() if line.startswith("+"))


def test_the_lines_in_the_docs_adapt_the_quickstart_of_flower(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    package = tmp_path / "pytorchexample"
    package.mkdir()
    (package / "task.py").write_text(QUICKSTART + added_lines(page, "task.py"))
    for name in ("client_app.py", "server_app.py"):
        (package / name).write_text(added_lines(page, name))
    lines = [line for name in ("task.py", "client_app.py", "server_app.py") for line in added_lines(page, name).splitlines() if line]
    assert len(lines) == 15
    config = flatten(tomllib.loads(added_lines(page, "pyproject.toml")))
    monkeypatch.syspath_prepend(str(tmp_path))
    client, server = import_module("pytorchexample.client_app"), import_module("pytorchexample.server_app")
    assert isinstance(client.app, ClientApp) and isinstance(server.app, ServerApp)
    context = SimpleNamespace(run_config=config, node_config={"partition-id": 1, "num-partitions": 3})
    data = deployment_config(config, client.OBJECTIVE).client_engine(1, *client.load_examples(context)).data
    assert data.num_examples[1] == 30 and data.x.shape[1:] == (3, 4, 4)
    assert data.x[:, 0, 0, 0].tolist() == list(range(30)), "the same order every time"


QUICKSTART = """
import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(48, 10))


def load_data(partition_id, num_partitions, batch_size):
    examples = [{"img": torch.full((3, 4, 4), float(i)), "label": i % 10} for i in range(30)]
    return DataLoader(examples, batch_size=batch_size, shuffle=True), None


"""


@pytest.mark.long
def test_the_command_runs_an_app_and_writes_a_run_directory(tmp_path, capfd):
    assert main(["flower", "new", "app"]) == 0
    assert main(["flower", "run", "app", "--nodes", "3", "--run-config", "rounds=2", "--json", "--out", "run"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["rounds"] == 2 and result["nonzero"] == 208 and result["accuracy"] > 0.5 and result["rejected_by_client"] == {}
    assert main(["flower", "run", "app", "--nodes", "3", "--simulation", "--run-config", "rounds=2", "--quiet", "--out", "simulated"]) == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "simulated")]
    assert models[0] == models[1]
    assert main(["report", "run"]) == 0
    assert main(["inspect", "run"]) == 0


@pytest.mark.long
def test_a_run_that_fails_reports_why_in_one_line_and_exits_1(tmp_path, capfd):
    assert main(["flower", "new", "app"]) == 0
    path = tmp_path / "app" / "app" / "task.py"
    path.write_text(path.read_text().replace("x, y = generate_examples(seed=1, num_examples=2000)", "raise OSError('no examples here')"))
    assert main(["flower", "run", "app", "--simulation", "--run-config", "start-seconds=60", "--quiet"]) == 1
    error = capfd.readouterr().err
    assert "0 of 3 clients have a node after 60 s" in error and "no examples here" in error
    assert error.endswith("start again with: fedsieve flower run app\n")
