"""Trackers see what metrics.jsonl has, on this machine, and only when asked."""

import json
import os
import subprocess
import sys
import types

import pytest

from fedsieve.cli.main import main
from fedsieve.experiments.trackers import Tracker, numeric_values
from fedsieve.storage.run_directory import read_metrics

pytestmark = pytest.mark.usefixtures("few_test_rows")
QUICK = [
    "--data.num-examples",
    "300",
    "--data.num-features",
    "40",
    "--density",
    "0.1",
    "--federation.clients",
    "10",
    "--federation.participation",
    "0.3",
]
QUICK += ["--rounds", "3", "--algorithm.local-steps", "2", "--out", "run", "--json", "--quiet"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(capsys, tracker):
    assert main(["train", *QUICK, "--tracker", tracker]) == 0
    said = capsys.readouterr().out
    json.loads(said)  # what trackers say does not stand beside it
    return said


def test_tensorboard_has_every_number_of_every_round(capsys, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained(capsys, "tensorboard")
    rows = read_metrics(tmp_path / "run")
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(numeric_values(rows[0]))
    for name in ("r2", "bytes_up", "expected_density"):
        found = events.Scalars(name)
        assert [event.step for event in found] == [1, 2, 3]
        assert [event.value for event in found] == pytest.approx([row[name] for row in rows])


def test_every_run_of_a_comparison_is_tracked(capsys, tmp_path):
    pytest.importorskip("tensorboard")
    assert main(["compare", "--algorithms", "fed-avg,sieve", "--seeds", "0", *QUICK, "--tracker", "tensorboard"]) == 0
    assert sorted(path.parent.parent.name for path in tmp_path.glob("run/*/tensorboard/events*")) == ["fed-avg-seed0", "sieve-seed0"]


def test_trackio_has_every_number_of_every_round(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
import json, sys
from fedsieve.cli.main import main
assert main(["train", *{QUICK}, "--tracker", "trackio"]) == 0
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("fedsieve", "run")))
"""
    own = {"TRACKIO_DIR": str(tmp_path / "trackio")}  # read when trackio is imported
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result, logged = map(json.loads, done.stdout.splitlines())
    rows = read_metrics(tmp_path / "run")
    assert result["value"] == rows[-1]["r2"]
    assert [entry["step"] for entry in logged] == [1, 2, 3]
    assert [entry["r2"] for entry in logged] == pytest.approx([row["r2"] for row in rows])


class Recorded:
    """Stands for a tracker that is not installed: remembers how it was called."""

    def __init__(self):
        self.given, self.rows = {}, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def log(self, row, step):
        self.rows.append((step, row))


def test_wandb_is_offline_by_default(capsys, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run, package = Recorded(), types.ModuleType("wandb")
    package.init = lambda **given: run.given.update(given) or run
    monkeypatch.setitem(sys.modules, "wandb", package)
    trained(capsys, "wandb")
    assert run.given["mode"] == "offline" and run.given["dir"] == "run" and run.closed
    assert [step for step, _ in run.rows] == [1, 2, 3] and "r2" in run.rows[0][1]


def test_mlflow_gets_settings_and_rounds(capsys, monkeypatch):
    run, package, seen = Recorded(), types.ModuleType("mlflow"), {}
    package.set_experiment = lambda name: seen.update(experiment=name)
    package.start_run = lambda run_name: seen.update(name=run_name) or run
    package.log_params = lambda given: seen.update(given)
    package.log_metrics = lambda row, step: run.rows.append((step, row))
    monkeypatch.setitem(sys.modules, "mlflow", package)
    trained(capsys, "mlflow")
    assert seen["experiment"] == "fedsieve" and seen["name"] == "run" and seen["algorithm.local-steps"] == 2
    assert [step for step, _ in run.rows] == [1, 2, 3]


@pytest.mark.parametrize("tracker", Tracker)
def test_a_missing_tracker_is_reported_before_anything_is_written(tracker, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker.value, None)
    monkeypatch.delitem(sys.modules, "tensorboard.backend", raising=False)
    assert main(["train", *QUICK, "--tracker", tracker]) == 2
    said = capsys.readouterr().err
    assert "pip install" in said and tracker in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
