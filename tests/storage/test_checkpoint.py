"""A checkpoint restores the same bits, or the error says why not."""

import errno
import json
import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_safetensors

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.core.optimizers import Optimizer
from fedsieve.experiments.config import Engine
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import initial_state, run_rounds
from fedsieve.runtime.evaluation import RunState
from fedsieve.storage import checkpoint
from fedsieve.storage.checkpoint import CheckpointError, SettingsChangedError
from helpers.algorithms import make_algorithm
from helpers.runs import small_run


class Inner(NamedTuple):
    count: int
    rate: float
    mean: torch.Tensor


class State(NamedTuple):
    weights: torch.Tensor
    inner: Inner
    note: str | None = None


def state(value=1.0, size=3):
    return State(torch.full((size,), float(value)), Inner(7, 0.1, torch.tensor(2.5, dtype=torch.float64)), "a")


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("algorithm_name", ALGORITHMS)
@pytest.mark.parametrize("engine", Engine)
def test_every_algorithm_resumes_from_a_checkpoint_to_the_same_bits(algorithm_name, engine, tmp_path):
    adam = {"server_optimizer": Optimizer.ADAM} if "server_optimizer" in algorithm_class(algorithm_name).option_names() else {}
    algorithm = make_algorithm(algorithm_name, 3, server_learning_rate=0.1, **adam)
    run = small_run(algorithm_name, engine=engine, algorithm=algorithm)
    simulation = Simulation(run)
    steps = list(run_rounds(run, simulation))
    checkpoint.save(tmp_path, 2, steps[1].result.server, run.settings_dict, steps[1].result.memories)
    latest = checkpoint.latest(tmp_path)
    server = latest.restore(initial_state(run, simulation).server)
    rest = list(run_rounds(run, simulation, RunState(server, latest.rounds_done, memories=latest.memories)))
    assert [step.metrics["round"] for step in rest] == [3, 4]
    results = [step.result for step in (steps[-1], rest[-1])]
    last, again = (checkpoint.encode(4, result.server, run.settings_dict, result.memories) for result in results)
    assert last == again


def test_a_state_is_restored_with_every_bit_and_type(tmp_path):
    odd = torch.tensor([-0.0, 5e-324, 1.7976931348623157e308], dtype=torch.float64)
    before = State(odd, Inner(-3, 0.1 + 0.2, torch.tensor(1e-45)), None)
    checkpoint.save(tmp_path, 1, before, {})
    after = checkpoint.latest(tmp_path).restore(
        state()._replace(weights=torch.zeros(3, dtype=torch.float64), note=None, inner=before.inner)
    )
    assert after.weights.numpy().tobytes() == odd.numpy().tobytes()
    assert after.inner.rate == before.inner.rate and type(after.inner.count) is int and after.note is None
    assert after.inner.mean.shape == () and torch.equal(after.inner.mean, before.inner.mean)


def test_the_newest_checkpoint_is_read_and_only_one_older_is_kept(tmp_path):
    for rounds in (1, 2, 3, 10):
        checkpoint.save(tmp_path, rounds, state(rounds), {})
    assert [int(path.name[:6]) for path in checkpoint.list_checkpoints(tmp_path)] == [3, 10]
    latest = checkpoint.latest(tmp_path)
    assert latest.rounds_done == 10 and latest.damage_reports == ()
    assert latest.restore(state()).weights.tolist() == [10.0] * 3


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "longer", "gone"])
def test_the_previous_checkpoint_replaces_a_damaged_one(damage, tmp_path):
    checkpoint.save(tmp_path, 4, state(4), {})
    path = checkpoint.save(tmp_path, 5, state(5), {})
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes({"cut": content[:-10], "bit": content, "empty": b"", "longer": path.read_bytes() + b"0"}[damage])
    latest = checkpoint.latest(tmp_path)
    assert latest.rounds_done == 4 and latest.restore(state()).weights.tolist() == [4.0] * 3
    assert len(latest.damage_reports) == (damage != "gone") and all(path.name in text for text in latest.damage_reports)


def test_the_digest_detects_every_flipped_bit(tmp_path):
    path = checkpoint.save(tmp_path, 1, state(), {"a": 1})
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="digest"):
            checkpoint.latest(tmp_path)


def test_saving_removes_damaged_checkpoints_and_keeps_a_valid_one(tmp_path):
    checkpoint.save(tmp_path, 2, state(2), {})
    checkpoint.save(tmp_path, 9, state(9), {}).write_bytes(b"nonsense")
    checkpoint.save(tmp_path, 5, state(5), {})
    assert [int(path.name[:6]) for path in checkpoint.list_checkpoints(tmp_path)] == [2, 5]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_failed_write_changes_no_file(call, code, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1), {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(code)):
            checkpoint.save(tmp_path, 2, state(2), {})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_checkpoint_of_another_model_or_algorithm_is_an_error(tmp_path):
    checkpoint.save(tmp_path, 1, state(), {})
    latest = checkpoint.latest(tmp_path)
    with pytest.raises(SettingsChangedError, match=r"another model: its weights is torch.float32 \(3,\)"):
        latest.restore(state(size=4))
    with pytest.raises(SettingsChangedError, match=r"another algorithm or version: .*inner.mean"):
        latest.restore(state().inner)
    with pytest.raises(TypeError, match="weights is a list"):
        checkpoint.save(tmp_path, 2, State([1.0], state().inner), {})


def test_only_the_number_of_rounds_may_change():
    before = {"rounds": 5, "density": 0.1, "algorithm": {"step_rule": "polyak", "max_gradient_norm": float("inf")}}
    checkpoint.check_settings(before, before | {"rounds": 9})
    with pytest.raises(SettingsChangedError, match=r"density was 0.1, is 0.2; leave"):
        checkpoint.check_settings(before, before | {"density": 0.2})
    with pytest.raises(SettingsChangedError, match=r"algorithm.step-rule was polyak, is capped"):
        checkpoint.check_settings(before, before | {"algorithm": {"step_rule": "capped", "max_gradient_norm": float("inf")}})


def metadata_text(**fields):
    return json.dumps({"format": 1, "rounds": 1, "settings": {}, "state": {}} | fields)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "not a checkpoint"),
        ({"checkpoint": "{"}, "not a checkpoint"),
        ({"checkpoint": "[" * 100_000}, "not a checkpoint"),
        ({"checkpoint": "[]"}, "another format"),
        ({"checkpoint": metadata_text(format=2)}, "another format"),
        ({"checkpoint": metadata_text(rounds=-1)}, "are invalid"),
        ({"checkpoint": metadata_text(rounds=True)}, "are invalid"),
        ({"checkpoint": metadata_text(settings=[])}, "are invalid"),
        ({"checkpoint": metadata_text(state={"weights": 1})}, "are invalid"),
    ],
)
def test_bytes_that_are_not_a_checkpoint_raise_an_error(metadata, text):
    content = save_safetensors({"weights": np.zeros(3, np.float32)}, metadata)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.decode(content)
