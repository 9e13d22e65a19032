"""A run directory of a stranger: links in it, damaged files, and what must not happen when it is used."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fedsieve.cli.main import main
from fedsieve.storage import atomic, run_directory

pytestmark = pytest.mark.usefixtures("few_test_rows")
SMALL = ["--data.num-examples", "200", "--data.num-features", "30", "--federation.clients", "8", "--density", "0.1"]
QUICK = [*SMALL, "--federation.participation", "0.5", "--rounds", "3", "--algorithm.local-steps", "2", "--quiet"]
PRIVATE_TEXT = "a file of the user\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedsieve.data.synthetic.NUM_TEST_EXAMPLES", 200)
        assert main(["train", *QUICK, "--checkpoint.seconds", "0", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def private_file(tmp_path):
    """A file of the user outside the run, which no command may change."""
    path = tmp_path / "private.txt"
    path.write_text(PRIVATE_TEXT)
    yield path
    assert path.read_text() == PRIVATE_TEXT


# Links


COMMANDS = {
    "report.html": ["report", "run"],
    "model.npz": ["export", "run", "--format", "npz"],
    "model.png": ["inspect", "run"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("suffix", ["", ".part"])
def test_no_command_writes_through_a_link_of_a_strangers_folder(name, suffix, run, private_file, capsys):
    (run / name).unlink(missing_ok=True)
    (run / (name + suffix)).symlink_to(private_file)
    assert main(COMMANDS[name]) == 0
    assert (run / name).stat().st_size > 100
    assert not (run / name).is_symlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "supports.bin", "supports.npz", "result.json.part", "checkpoints", "config.toml"])
def test_a_run_with_a_link_is_not_resumed(name, run, private_file, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    if (run / name).exists():
        shutil.move(run / name, elsewhere)
    else:
        elsewhere.write_text(PRIVATE_TEXT)
    before = {path: path.read_bytes() for path in (elsewhere, *elsewhere.rglob("*")) if path.is_file()}
    (run / name).symlink_to(elsewhere)
    assert main(["train", "--resume", "run", "--rounds", "4", "--quiet"]) == 2
    assert f"{name} is a symbolic link" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (elsewhere, *elsewhere.rglob("*")) if path.is_file()} == before


def test_a_link_that_appears_while_a_run_trains_is_not_followed(run, private_file):
    from fedsieve.storage.run_log import open_for_append

    (run / "supports.bin").unlink()
    (run / "supports.bin").symlink_to(private_file)
    with pytest.raises(OSError, match="symbolic links"):
        open_for_append(run / "supports.bin", 0)


def test_temporary_names_cannot_be_guessed_and_killed_writes_are_removed(run, monkeypatch):
    names = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: names.append(str(path)) or real(path, *rest))
    for _ in range(2):
        atomic.atomic_write(run / "x", b"content")
    parts = [name for name in names if name.endswith(".part")]
    assert len(set(parts)) == 2
    (run / ".fedsieve-0123.part").write_text("left by a killed process")
    with run_directory.lock(run):
        assert not list(run.rglob("*.part"))


# What ends in a traceback


def test_a_file_system_without_locks_is_one_line(run, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fedsieve.storage.run_directory.fcntl.flock", flock)
    assert main(["train", "--resume", "run", "--rounds", "4", "--quiet"]) == 2
    assert "cannot be locked" in capsys.readouterr().err


def test_a_report_that_the_full_disk_did_not_take_is_written_on_resume(run, capsys):
    (run / "report.html").unlink()
    assert main(["train", "--resume", "run", "--quiet"]) == 0
    assert (run / "report.html").exists()


def test_ctrl_c_pressed_many_times_is_no_traceback(tmp_path):
    words = [sys.executable, "-m", "fedsieve", "train", *SMALL, "--rounds", "100000", "--out", str(tmp_path / "run")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "Traceback" not in text and "interrupted; what was finished is kept" in text


# Damage


def flip(path, bit):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_every_flipped_bit_of_the_metrics_is_noticed_and_its_line_named(run, capsys):
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 61):
        path.write_bytes(whole)
        flip(path, bit)
        line = whole[: bit // 8].count(b"\n") + 1
        with pytest.raises(run_directory.RunDirectoryError, match=rf"damaged in line ({line}|{line + 1}):"):
            run_directory.read_metrics(run)


@pytest.mark.parametrize("words", [["train", "--resume", "run", "--rounds", "4", "--quiet"], ["report", "run"]])
def test_a_changed_number_in_the_metrics_is_one_line(words, run, capsys):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"bytes_up": ', '"bytes_up": 1', 1))
    before = path.read_bytes()
    assert main(words) == 2
    assert "metrics.jsonl is damaged in line 1: its checksum does not match" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_metrics_of_older_versions_without_checksums_are_read(run):
    path = run / "metrics.jsonl"
    rows = run_directory.read_metrics(run)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_directory.read_metrics(run) == rows


def test_every_flipped_bit_of_the_supports_is_noticed_on_resume(run):
    from fedsieve.storage.run_log import read_supports

    path = run / "supports.bin"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 13):
        path.write_bytes(whole)
        flip(path, bit)
        with pytest.raises(run_directory.RunDirectoryError, match="is damaged at round"):
            read_supports(path, 3)


def test_a_damaged_trace_is_one_line_in_the_report(run):
    from fedsieve.report.html.page import render_report

    path = run / "supports.npz"
    whole, num_refused = path.read_bytes(), 0
    chance = random.Random(0)
    for trial in range(300):
        content = bytearray(whole)
        for _ in range(1 + trial % 3):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.randrange(len(content))] if trial % 5 == 0 else content)
        try:
            render_report([run])
        except run_directory.RunDirectoryError as error:
            num_refused += "supports.npz" in str(error)
    assert num_refused > 100


@pytest.mark.parametrize(
    "arrays",
    [
        {"supports": np.zeros(5, np.int32)},
        {"supports": np.zeros((3, 2), np.float64)},
        {"supports": np.full((3, 2), -9)},
        {"gate_histogram": np.zeros((3, 20), "S3")},
        {"supports": np.zeros((), np.int64)},
    ],
)
def test_a_trace_of_another_kind_is_one_line(arrays, run, capsys):
    np.savez(run / "supports.npz", **arrays)
    assert main(["report", "run"]) == 2
    assert "must be a table of whole numbers" in capsys.readouterr().err
