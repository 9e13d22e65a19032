"""A run folder says everything that decides its result."""

from pathlib import Path

import pytest

from fedsieve.algorithms import METHODS
from fedsieve.data.builtin import Files, Source
from fedsieve.experiments.config import Federation, Gating, Run
from fedsieve.experiments.config_io import from_config, restore
from fedsieve.experiments.tasks import TASKS
from fedsieve.objectives.module import Group
from fedsieve.storage import run_directory

RUNS = [Run(method=method) for method in METHODS] + [Run(task=task) for task in TASKS if task != "file"]
RUNS += [
    Run(task="digits", gates=Gating(group=Group.FEATURE), federation=Federation(clients=7, central=True), seed=3),
    Run(task="mnist-cnn", data=Files(source=Source.STAND_IN), start=Path("weights.safetensors")),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_run_is_restored_from_what_it_writes(run, tmp_path):
    assert from_config(run.config) == run
    (tmp_path / run_directory.CONFIG).write_text(run_directory.toml(run.config))
    again = restore(tmp_path)
    assert again == run and again.id == run.id


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "'task'"),
        ('task = "nope"\nmethod = "sieve"\n', "nope"),
        ('task = "lr"\nmethod = "sieve"\nstrange = 1\n', "strange"),
        ("not toml", "TOMLDecodeError"),
    ],
)
def test_settings_of_another_kind_are_refused_in_one_line(change, said, tmp_path):
    (tmp_path / run_directory.CONFIG).write_text(change)
    with pytest.raises(run_directory.FolderError, match=said):
        restore(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(run_directory.FolderError, match="holds no run"):
        restore(tmp_path)
