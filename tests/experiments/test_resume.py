"""A run that broke off goes on to the same bits, however it ended."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedsieve.cli.main import main
from fedsieve.experiments import runner as folders
from fedsieve.storage import run_directory

pytestmark = pytest.mark.usefixtures("few_test_rows")
TEST_ROWS = 200
KILLS = Path(__file__).parents[1] / "helpers" / "crashes.py"
SMALL = [
    "--data.num-examples",
    "200",
    "--data.num-features",
    "30",
    "--data.true-density",
    "0.1",
    "--density",
    "0.1",
    "--federation.clients",
    "8",
]
QUICK = [*SMALL, "--federation.participation", "0.5", "--rounds", "6", "--algorithm.local-steps", "3", "--quiet"]


def train(*words):
    return main(["train", *words])


def breaking_off(rounds, *words, error=KeyboardInterrupt):
    """The exit code of a run that breaks off after some rounds, by whatever is raised there."""
    real = folders.run_rounds

    def breaks(*arguments):
        for step in real(*arguments):
            if step.metrics["round"] > rounds:
                raise error
            yield step

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folders, "run_rounds", breaks)
        return train(*QUICK, *words)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A whole run, and one that broke off after three rounds with a checkpoint after each."""
    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedsieve.data.synthetic.NUM_TEST_EXAMPLES", TEST_ROWS)
        assert train(*QUICK, "--out", str(home / "whole")) == 0
        assert breaking_off(3, "--checkpoint.seconds", "0", "--out", str(home / "half")) == 130
    return home


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def half(made, tmp_path):
    """The run that broke off, to do with as one likes."""
    return shutil.copytree(made / "half", tmp_path / "half")


def left(folder):
    """All that a run leaves but clocks."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in run_directory.read_metrics(folder)]
    with np.load(folder / "supports.npz") as trace:
        arrays = {name: trace[name].tolist() for name in trace.files}
    result = {k: v for k, v in json.loads((folder / "result.json").read_text()).items() if k not in ("run", "seconds", "report")}
    newest = sorted(path.name for path in (folder / "checkpoints").iterdir())[-1]
    return (folder / "model.safetensors").read_bytes(), newest, rows, arrays, result


def everything(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "batched"],
        ["--engine", "loop"],
        ["--algorithm", "fed-avg"],
        ["--federation.server-examples", "20"],
        ["--failures.dropout", "0.4", "--failures.malicious-fraction", "0.3", "--federation.aggregator", "median"],
        ["--privacy.clip", "1", "--privacy.noise-multiplier", "1", "--secret-file", "secret"],
    ],
)
def test_an_interrupted_run_resumes_to_the_same_bits(words, tmp_path, capsys):
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    (tmp_path / "secret").chmod(0o600)
    assert train(*QUICK, *words, "--out", "whole") == 0
    assert breaking_off(3, *words, "--out", "half") == 130
    assert "go on with: fedsieve train --resume half" in capsys.readouterr().err
    assert train("--resume", "half", *(words[-2:] if "--secret-file" in words else ())) == 0
    assert "3 of 6 rounds are done, resuming" in capsys.readouterr().err
    assert left(tmp_path / "half") == left(tmp_path / "whole")
    assert [row["round"] for row in run_directory.read_metrics(tmp_path / "half")] == [1, 2, 3, 4, 5, 6]
    seconds = [row["seconds"] for row in run_directory.read_metrics(tmp_path / "half")]
    assert seconds == sorted(seconds)


def test_a_run_without_any_checkpoint_begins_again(made, tmp_path):
    assert breaking_off(3, "--checkpoint.rounds", "0", "--out", "half") == 130
    assert not (tmp_path / "half" / "checkpoints").exists()
    assert train("--resume", "half", "--quiet") == 0
    assert left(tmp_path / "half") == left(made / "whole")


def test_a_finished_run_is_left_as_it_is(made, tmp_path, capsys):
    shutil.copytree(made / "whole", tmp_path / "done")
    before = everything(tmp_path / "done")
    capsys.readouterr()
    assert train("--resume", "done", "--json") == 0
    said = capsys.readouterr()
    assert "finished, all 6 rounds; nothing is changed" in said.err
    assert json.loads(said.out.splitlines()[-1])["rounds"] == 6
    assert everything(tmp_path / "done") == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--density", "0.2"], "density was 0.1, is 0.2"),
        (["--seed", "4"], "seed was 0, is 4"),
        (
            ["--algorithm.local-steps", "5", "--federation.alpha", "2"],
            "algorithm.local-steps was 3, is 5; federation.alpha was 0.5, is 2.0",
        ),
        (["--algorithm", "fed-avg"], "algorithm was sieve, is fed-avg"),
        (["--task", "mc"], "task was lr, is mc"),
        (["--init-weights", "somewhere"], "init-weights was None, is somewhere"),
        (["--rounds", "4"], "rounds can only be raised: the run in half has 6; got --rounds 4"),
        (["--out", "other"], "leave out --out"),
        (["--tune-trials", "2"], "leave out --out and --tune-trials"),
        (["--checkpoint.rounds", "-1"], "checkpoint.rounds must be at least 0; got -1"),
        (["--checkpoint.seconds", "nan"], "checkpoint.seconds must be at least 0; got nan"),
    ],
)
def test_a_resumed_run_keeps_its_settings(words, text, half, capsys):
    before = everything(half)
    assert train("--resume", "half", *words) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1
    assert everything(half) == before


def test_the_settings_file_a_run_began_with_may_be_named_again(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("seed = 3\n[algorithm]\nlearning-rate = 1.5\n[checkpoint]\nseconds = 0.0\n")
    assert breaking_off(2, "--config", "mine.toml", "--out", "half") == 130
    assert train("--resume", "half", "--config", "mine.toml", "--quiet") == 0
    (tmp_path / "mine.toml").write_text("seed = 4\n")
    assert train("--resume", "half", "--config", "mine.toml", "--quiet") == 2
    assert "seed was 3, is 4" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["whole", "half"])
def test_more_rounds_continue_from_the_last_round(name, made, tmp_path):
    shutil.copytree(made / name, tmp_path / "half")
    before = run_directory.read_metrics(tmp_path / "half")
    assert train("--resume", "half", "--rounds", "9", "--quiet") == 0
    rows = run_directory.read_metrics(tmp_path / "half")
    assert [row["round"] for row in rows] == list(range(1, 10)) and rows[: len(before)] == before
    assert tomllib.loads((tmp_path / "half" / "config.toml").read_text())["rounds"] == 9
    assert json.loads((tmp_path / "half" / "result.json").read_text())["rounds"] == 9
    assert json.loads((tmp_path / "half" / "result.json").read_text())["nonzero"] == 3


def test_a_comparison_that_broke_off_goes_on_with_the_same_command(tmp_path, monkeypatch, capsys):
    words = ["compare", "--algorithms", "fed-avg,sieve", *QUICK, "--seeds"]
    assert main([*words, "0", "--out", "whole"]) == 0
    real = folders.run_rounds

    def breaks(run, *arguments):
        for step in real(run, *arguments):
            if run.algorithm_name == "sieve" and step.metrics["round"] > 3:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(folders, "run_rounds", breaks)
    assert main([*words, "0", "--out", "half"]) == 130
    assert "go on with: the same command" in capsys.readouterr().err
    monkeypatch.setattr(folders, "run_rounds", real)
    finished = everything(tmp_path / "half" / "fed-avg-seed0")
    for other, text in (
        (["1"], "a comparison of other runs: fed-avg-seed0, sieve-seed0"),
        (["0", "--federation.alpha", "2"], "alpha was 0.5, is 2.0"),
    ):
        assert main([*words, *other, "--out", "half"]) == 2
        assert text in capsys.readouterr().err
    assert main([*words, "0", "--out", "half"]) == 0
    assert everything(tmp_path / "half" / "fed-avg-seed0") == finished
    assert left(tmp_path / "half" / "sieve-seed0") == left(tmp_path / "whole" / "sieve-seed0")
    whole, half = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "half"))
    assert half | {"run": ""} == whole | {"run": ""}
    assert main([*words, "0", "--out", "half"]) == 2
    assert "already holds a run" in capsys.readouterr().err


def newest(folder):
    return sorted((folder / "checkpoints").iterdir())[-1]


@pytest.mark.parametrize("harm", [b"", b"nonsense", None])
def test_a_damaged_checkpoint_is_said_and_the_older_one_used(harm, made, half, capsys):
    path = newest(half)
    path.write_bytes(path.read_bytes()[:-1] if harm is None else harm)
    assert train("--resume", "half", "--quiet") == 0
    assert f"skipped checkpoint half/checkpoints/{path.name}: damaged" in capsys.readouterr().err
    assert left(half) == left(made / "whole")


def test_without_a_whole_checkpoint_nothing_is_overwritten(half, capsys):
    for path in (half / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    before = everything(half)
    assert train("--resume", "half") == 1
    said = capsys.readouterr().err
    assert "no checkpoint can be read" in said and said.count("\n") == 1
    assert everything(half) == before


@pytest.mark.parametrize(
    ("name", "harm", "text"),
    [
        ("metrics.jsonl", lambda content: content.replace(b'"round": 2', b'"round": 7'), "metrics.jsonl is damaged in line 2"),
        ("metrics.jsonl", lambda content: content[:40], "metrics.jsonl is damaged: it has 0 rounds"),
        ("supports.bin", lambda content: content[:300], "supports.bin is damaged"),
        ("config.toml", lambda content: content + b"?", "config.toml of a run, is not TOML"),
        ("config.toml", lambda content: None, "cannot be read: No such file"),
        ("run_info.json", lambda content: b"{", "run_info.json is damaged"),
        ("run_info.json", lambda content: content.replace(b'"count": 8', b'"count": 9'), "its clients differ"),
    ],
)
def test_other_damaged_files_are_named_and_nothing_is_overwritten(name, harm, text, half, capsys):
    path = half / name
    content = harm(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    before = everything(half)
    assert train("--resume", "half", "--quiet") == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1
    assert everything(half) == before


def test_a_half_written_line_is_computed_again(made, half):
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "r2"')
    assert train("--resume", "half", "--quiet") == 0
    assert left(half) == left(made / "whole")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_more_is_said_in_one_line(code, made, tmp_path, capsys):
    assert breaking_off(3, "--out", "half", error=OSError(code, os.strerror(code))) == 1
    said = capsys.readouterr().err
    assert f"cannot write into half: {os.strerror(code)}; fix this, then continue with: fedsieve train --resume half" in said
    assert said.count("\n") == 1
    assert train("--resume", "half", "--quiet") == 0
    assert left(tmp_path / "half") == left(made / "whole")


def test_two_processes_never_train_in_one_folder(half, capsys):
    before = everything(half)
    with run_directory.lock(half):
        assert train("--resume", "half") == 2
    assert "another process is training in half" in capsys.readouterr().err
    assert everything(half) == before


def test_other_versions_are_worth_a_note(half, capsys):
    path = half / "run_info.json"
    about = json.loads(path.read_text())
    about["environment"]["torch"] = "1.0"
    path.write_text(json.dumps(about))
    assert train("--resume", "half", "--quiet") == 0
    assert "the run began with torch 1.0, now" in capsys.readouterr().err


def test_checkpoints_are_as_far_apart_as_asked(tmp_path):
    for name, words, kept in (("n", ["--checkpoint.rounds", "4"], [4, 6]), ("s", ["--checkpoint.seconds", "1e9"], [1, 6])):
        assert train(*QUICK, *words, "--out", name) == 0
        assert [int(path.name[:6]) for path in sorted((tmp_path / name / "checkpoints").iterdir())] == kept


def survived(how, count, place):
    done = subprocess.run([sys.executable, "-W", "error", KILLS, how, str(count), place], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_run_survives_kill_9_at_random_points(tmp_path):
    assert survived("random", 20, tmp_path)["kills"] >= 20


def test_a_run_survives_a_strike_at_every_system_call_of_its_writes(tmp_path):
    counts = survived("calls", 1, tmp_path)
    assert counts["calls"] > 20
    assert counts["kill"] == counts["calls"] and counts["kill_during_write"] == counts["writes"] > 4
    assert counts["fail_write"] >= counts["calls"] - 2  # one that removes what is not there may fail unseen


@pytest.mark.long
def test_a_run_survives_200_kills(tmp_path):
    assert survived("random", 200, tmp_path)["kills"] >= 200


@pytest.mark.long
def test_three_rounds_survive_a_strike_at_every_system_call(tmp_path):
    counts = survived("calls", 3, tmp_path)
    assert counts["kill"] == counts["calls"] and counts["kill_during_write"] == counts["writes"]


@pytest.mark.parametrize("rounds_before", [2, 6])
def test_an_interrupted_run_with_a_refit_resumes_to_the_same_bits(rounds_before, tmp_path):
    assert train(*QUICK, "--refit", "--out", "whole") == 0
    if rounds_before == 6:  # all rounds are stored, and the model is not
        shutil.copytree("whole", "half")
        for name in ("model.safetensors", "result.json"):
            (tmp_path / "half" / name).unlink()
    else:
        assert breaking_off(rounds_before, "--refit", "--checkpoint.seconds", "0", "--out", "half") == 130
    assert train("--resume", "half", "--quiet") == 0
    assert (tmp_path / "half" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
