"""Processes that torchrun starts on this machine: the files of a simulation, one message if something is wrong, and a resumed run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fedsieve.cli.main import main

SMALL = ["--data.num-examples", "300", "--data.num-features", "40", "--federation.clients", "12"]
TRAIN = ["train", "--precision", "double", "--quiet", *SMALL]


def torchrun(num_ranks, words, **options):
    """Start a command as several ranks on this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m", "fedsieve", *words]
    return subprocess.Popen(launch, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def messages(process, seconds=300):
    """Return what fedsieve printed on standard error, without the report of torchrun, after the processes ended."""
    _, errors = process.communicate(timeout=seconds)
    return [line for line in errors.splitlines() if line.startswith("fedsieve:")]


def model_of(folder):
    return (folder / "model.safetensors").read_bytes()


def rows_of(folder):
    return [{**json.loads(line), "seconds": 0, "crc32": ""} for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--algorithm", "flops", "--federation.participation", "0.5"], id="flops"),
        pytest.param(["--topology", "ring", "--federation.partition", "iid"], id="ring", marks=pytest.mark.long),
    ],
)
def test_ranks_write_the_model_of_the_simulation(options, tmp_path, monkeypatch):
    """FLoPS, whose clients exchange gradients after every mini-batch, and nodes without a server."""
    monkeypatch.chdir(tmp_path)
    words = [*TRAIN, *options, "--rounds", "2"]
    process = torchrun(2, [*words, "--out", "ranks"])
    assert main([*words, "--out", "alone"]) == 0
    assert messages(process) == [] and process.returncode == 0
    assert model_of(tmp_path / "ranks") == model_of(tmp_path / "alone")
    assert rows_of(tmp_path / "ranks") == rows_of(tmp_path / "alone")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--federation.clients", "2", "--federation.participation", "1"], "3 ranks are more than the clients in a round"),
        (["train", "--rouns", "3"], "--rouns is unknown"),
        (["train", "--tune-trials", "2"], "tune without torchrun"),
        (["compare"], "a cluster runs fedsieve train, and not fedsieve compare"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(words, message, tmp_path):
    process = torchrun(3, words, cwd=tmp_path)
    (line,) = messages(process)
    assert message in line and not list(tmp_path.iterdir())


def find_rank(folder, number):
    """Return the process of a rank whose command names a folder."""
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as command, open(f"/proc/{entry}/environ", "rb") as environment:
                if str(folder).encode() in command.read().split(b"\0") and f"RANK={number}".encode() in environment.read().split(b"\0"):
                    return int(entry)
        except (OSError, ValueError):
            continue
    raise AssertionError(f"rank {number} is not running")


@pytest.mark.long
@pytest.mark.parametrize(("how", "reason"), [(signal.SIGKILL, "rank 2 has ended"), (signal.SIGSTOP, "did not answer for 20 seconds")])
@pytest.mark.parametrize("topology", ["star", "ring"])
def test_a_lost_rank_ends_the_run_in_time_and_it_resumes_to_the_same_bits(how, reason, topology, tmp_path):
    folder = tmp_path / "run"
    words = [*TRAIN, "--federation.participation", "1", "--federation.partition", "iid", "--rounds", "300", "--topology", topology]
    process = torchrun(3, [*words, "--out", str(folder), "--checkpoint.seconds", "0", "--rank-timeout", "20"])
    while not (folder / "checkpoints").is_dir():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    lost = find_rank(folder, 2)
    began = time.monotonic()
    os.kill(lost, how)
    try:
        (line,) = messages(process)
    finally:
        if how is signal.SIGSTOP:
            os.kill(lost, signal.SIGKILL) if os.path.exists(f"/proc/{lost}") else None
    assert reason in line and f"--resume {folder}" in line
    assert process.returncode != 0 and time.monotonic() - began < 120
    assert not (folder / "result.json").exists()
    resumed = torchrun(2, ["train", "--resume", str(folder), "--quiet"])
    assert messages(resumed) == [] and resumed.returncode == 0
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    assert model_of(folder) == model_of(tmp_path / "whole")
    columns = ("r2", "bytes_up", "bytes_down", "replied", "worst_node")
    resumed_rows, whole_rows = ([[row.get(name) for name in columns] for row in rows_of(each)] for each in (folder, tmp_path / "whole"))
    assert resumed_rows == whole_rows
