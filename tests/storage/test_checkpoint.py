"""A checkpoint gives back the same bits, or says why not."""

import errno
import json
import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import save as packed

from fedsieve.algorithms import ALGORITHMS
from fedsieve.core.optimizers import Optimizer
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import Engine, FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.runner import initial_state, run_rounds
from fedsieve.experiments.simulation import Simulation
from fedsieve.runtime.evaluation import RunState
from fedsieve.storage import checkpoint
from fedsieve.storage.checkpoint import CheckpointError, SettingsChangedError
from helpers.algorithms import make_algorithm

DATA = Synthetic(num_examples=200, num_features=30, true_density=0.1)


class Inner(NamedTuple):
    count: int
    rate: float
    seen: torch.Tensor


class State(NamedTuple):
    weights: torch.Tensor
    inner: Inner
    note: str | None = None


def state(value=1.0, size=3):
    return State(torch.full((size,), float(value)), Inner(7, 0.1, torch.tensor(2.5, dtype=torch.float64)), "a")


def small(method="sieve", **fields):
    options = {
        "task": "lr",
        "density": 0.1,
        "rounds": 4,
        "seed": 5,
        "data": DATA,
        "federation": FederationConfig(clients=8, participation=0.5),
    }
    algorithm = make_algorithm(method, 3, server_optimizer=Optimizer.ADAM, server_learning_rate=0.1)
    return resolve(RunConfig(algorithm_name=method, algorithm=algorithm, **(options | fields)))


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("method", ALGORITHMS)
@pytest.mark.parametrize("engine", Engine)
def test_every_method_goes_on_from_a_checkpoint_to_the_same_bits(method, engine, tmp_path):
    run = small(method, engine=engine)
    problem = Simulation(run)
    steps = list(run_rounds(run, problem))
    checkpoint.save(tmp_path, 2, steps[1].result.server, run.settings_dict)
    found = checkpoint.latest(tmp_path)
    rest = list(run_rounds(run, problem, RunState(found.restore(initial_state(run, problem).server), found.rounds_done)))
    assert [step.metrics["round"] for step in rest] == [3, 4]
    last, again = (checkpoint.encode(4, step.result.server, run.settings_dict) for step in (steps[-1], rest[-1]))
    assert last == again


def test_a_state_comes_back_with_every_bit_and_every_type(tmp_path):
    odd = torch.tensor([-0.0, 5e-324, float("inf")], dtype=torch.float64)
    before = State(odd, Inner(-3, 0.1 + 0.2, torch.tensor(1e-45)), None)
    checkpoint.save(tmp_path, 1, before, {})
    after = checkpoint.latest(tmp_path).restore(
        state()._replace(weights=torch.zeros(3, dtype=torch.float64), note=None, inner=before.inner)
    )
    assert after.weights.numpy().tobytes() == odd.numpy().tobytes()
    assert after.inner.rate == before.inner.rate and type(after.inner.count) is int and after.note is None
    assert after.inner.seen.shape == () and torch.equal(after.inner.seen, before.inner.seen)


def test_the_newest_is_found_and_only_the_one_before_is_kept(tmp_path):
    for rounds in (1, 2, 3, 10):
        checkpoint.save(tmp_path, rounds, state(rounds), {})
    assert [int(path.name[:6]) for path in checkpoint.list_checkpoints(tmp_path)] == [3, 10]
    found = checkpoint.latest(tmp_path)
    assert found.rounds_done == 10 and found.damage_reports == ()
    assert found.restore(state()).weights.tolist() == [10.0] * 3


def test_nothing_saved_is_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("harm", ["cut", "bit", "empty", "longer", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(harm, tmp_path):
    checkpoint.save(tmp_path, 4, state(4), {})
    path = checkpoint.save(tmp_path, 5, state(5), {})
    content = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes({"cut": content[:-10], "bit": content, "empty": b"", "longer": path.read_bytes() + b"0"}[harm])
    found = checkpoint.latest(tmp_path)
    assert found.rounds_done == 4 and found.restore(state()).weights.tolist() == [4.0] * 3
    assert len(found.damage_reports) == (harm != "gone") and all(path.name in text for text in found.damage_reports)


def test_every_single_bit_of_a_checkpoint_is_guarded(tmp_path):
    path = checkpoint.save(tmp_path, 1, state(), {"a": 1})
    content = path.read_bytes()
    for place in range(0, 8 * len(content), 7):
        harmed = bytearray(content)
        harmed[place // 8] ^= 1 << place % 8
        path.write_bytes(harmed)
        with pytest.raises(CheckpointError, match="digest"):
            checkpoint.latest(tmp_path)


def test_a_good_checkpoint_outlives_damaged_ones(tmp_path):
    checkpoint.save(tmp_path, 2, state(2), {})
    checkpoint.save(tmp_path, 9, state(9), {}).write_bytes(b"nonsense")
    checkpoint.save(tmp_path, 5, state(5), {})
    assert [int(path.name[:6]) for path in checkpoint.list_checkpoints(tmp_path)] == [2, 5]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_write_that_fails_leaves_what_was_there(call, code, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state(1), {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match=os.strerror(code)):
            checkpoint.save(tmp_path, 2, state(2), {})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_checkpoint_of_another_model_or_method_is_refused(tmp_path):
    checkpoint.save(tmp_path, 1, state(), {})
    found = checkpoint.latest(tmp_path)
    with pytest.raises(SettingsChangedError, match=r"another model: its weights is torch.float32 \(3,\)"):
        found.restore(state(size=4))
    with pytest.raises(SettingsChangedError, match=r"another method or version: its state has .*inner.seen"):
        found.restore(state().inner)
    with pytest.raises(TypeError, match="weights is a list"):
        checkpoint.save(tmp_path, 2, State([1.0], state().inner), {})


def test_changed_settings_are_named_but_rounds_may_change():
    before = {"rounds": 5, "density": 0.1, "algorithm": {"step_rule": "polyak", "max_gradient_norm": float("inf")}}
    checkpoint.check_settings(before, before | {"rounds": 9})
    with pytest.raises(SettingsChangedError, match=r"density was 0.1, is 0.2; leave"):
        checkpoint.check_settings(before, before | {"density": 0.2})
    with pytest.raises(SettingsChangedError, match=r"algorithm.step-rule was polyak, is capped"):
        checkpoint.check_settings(before, before | {"algorithm": {"step_rule": "capped", "max_gradient_norm": float("inf")}})


def about(**fields):
    return json.dumps({"format": 1, "rounds": 1, "settings": {}, "state": {}} | fields)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "not a checkpoint"),
        ({"checkpoint": "{"}, "not a checkpoint"),
        ({"checkpoint": "[" * 100_000}, "not a checkpoint"),
        ({"checkpoint": "[]"}, "another format"),
        ({"checkpoint": about(format=2)}, "another format"),
        ({"checkpoint": about(rounds=-1)}, "make no sense"),
        ({"checkpoint": about(rounds=True)}, "make no sense"),
        ({"checkpoint": about(settings=[])}, "make no sense"),
        ({"checkpoint": about(state={"weights": 1})}, "make no sense"),
    ],
)
def test_bytes_that_are_no_checkpoint_are_refused(metadata, text):
    content = packed({"weights": np.zeros(3, np.float32)}, metadata)
    with pytest.raises(CheckpointError, match=text):
        checkpoint.decode(content)
