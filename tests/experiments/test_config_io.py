"""A run folder says everything that decides its result."""

from pathlib import Path

import pytest

from fedsieve.algorithms import ALGORITHMS
from fedsieve.data.builtin import BuiltinFiles, Source
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.config_io import from_settings_dict, load_run
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.tasks import TASKS
from fedsieve.objectives.module import GateGranularity
from fedsieve.storage import run_directory

RUNS = [resolve(RunConfig(algorithm_name=method)) for method in ALGORITHMS] + [
    resolve(RunConfig(task=task)) for task in TASKS if task != "file"
]
RUNS += [
    resolve(
        RunConfig(task="digits", gate_granularity=GateGranularity.FEATURE, federation=FederationConfig(clients=7), centralized=True, seed=3)
    ),
    resolve(RunConfig(task="mnist-cnn", data=BuiltinFiles(source=Source.SYNTHETIC), init_weights=Path("weights.safetensors"))),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_run_is_restored_from_what_it_writes(run, tmp_path):
    assert resolve(from_settings_dict(run.settings_dict)) == run == resolve(run.config)
    (tmp_path / run_directory.CONFIG).write_text(run_directory.to_toml(run.settings_dict))
    again = load_run(tmp_path)
    assert again == run and again.id == run.id


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "algorithm and task is missing"),
        ('task = "nope"\n[algorithm]\nname = "sieve"\n', "nope"),
        ('task = "lr"\nstrange = 1\n[algorithm]\nname = "sieve"\n', "strange"),
        ("not toml", "Expected '='"),
    ],
)
def test_settings_of_another_kind_are_refused_in_one_line(change, said, tmp_path):
    (tmp_path / run_directory.CONFIG).write_text(change)
    with pytest.raises(run_directory.RunDirectoryError, match=said):
        load_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(run_directory.RunDirectoryError, match="holds no run"):
        load_run(tmp_path)
