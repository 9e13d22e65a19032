"""The command line as a user meets it: what it writes, what it says, and how it refuses."""

import json
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsieve.cli.main import main
from fedsieve.cli.options import parse_words
from fedsieve.storage.run_directory import read_metrics

pytestmark = pytest.mark.usefixtures("few_test_rows")


def flags(*lists):
    """Several lists of flags and values as one, later ones winning: the parser refuses a flag given twice."""
    chosen, strays = {}, []
    for words in lists:
        pairs = iter(words)
        for word in pairs:
            if word.startswith("--"):
                chosen[word] = next(pairs)
            else:
                strays.append(word)
    return [part for pair in chosen.items() for part in pair] + strays


SMALL = [
    "--data.num-examples",
    "300",
    "--data.num-features",
    "40",
    "--data.true-density",
    "0.1",
    "--density",
    "0.1",
    "--federation.clients",
    "10",
]
QUICK = [*SMALL, "--federation.participation", "0.3", "--rounds", "3", "--algorithm.local-steps", "4"]
PROMISED = [
    "run",
    "task",
    "algorithm",
    "seed",
    "rounds",
    "metric",
    "value",
    "r2",
    "mse",
    "accuracy",
    "ce",
    "bce",
    "micro_f1",
    "tdr",
    "tdr_features",
    "recall",
    "size",
    "nonzero",
    "density",
    "expected_density",
    "bytes_up",
    "bytes_down",
    "bytes_up_payload",
    "bytes_down_payload",
    "bytes_up_paper_formula",
    "bytes_down_paper_formula",
    "seconds",
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(capsys, *words):
    assert main(["train", "--json", "--quiet", *flags(QUICK, words)]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_json_has_everything_promised_on_the_last_line(capsys):
    result = trained(capsys)
    assert set(PROMISED) <= set(result)
    assert result["nonzero"] == 4 and result["size"] == 40 and result["density"] == 0.1
    assert result["metric"] == "r2" and result["value"] == result["r2"]
    assert result["accuracy"] is None and result["micro_f1"] is None
    assert 0 < result["expected_density"] <= 1


def test_a_run_folder_holds_what_reproduces_and_explains_the_run(capsys, tmp_path):
    result = trained(capsys, "--out", "here")
    folder = tmp_path / "here"
    rows = read_metrics(folder)
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert sum(row["bytes_up"] for row in rows) == result["bytes_up"]
    model = load_file(folder / "model.safetensors")
    assert len(model["index"]) == len(model["value"]) == 4 and (model["value"] != 0).all()
    trace = np.load(folder / "supports.npz")
    assert trace["supports"].shape == (3, 4)
    assert (trace["gate_histogram"].sum(1) == 40).all()
    assert np.array_equal(trace["supports"][-1], model["index"])


def test_bytes_may_be_sampled_and_the_result_says_so(capsys):
    real, sampled = trained(capsys, "--algorithm", "fed-avg"), trained(capsys, "--algorithm", "fed-avg", "--byte-counting", "sampled")
    assert (real["bytes_counted"], sampled["bytes_counted"]) == ("exact", "sampled")
    assert sampled["bytes_up"] == real["bytes_up"]  # dense messages all weigh the same
    sparse = [trained(capsys, "--byte-counting", how)["bytes_up"] for how in ("exact", "sampled")]
    assert abs(sparse[1] - sparse[0]) < 0.1 * sparse[0]


def test_the_resolved_configuration_gives_the_same_model_again(capsys, tmp_path):
    for method in ("flops-pa", "fed-l1"):
        one = trained(
            capsys, "--algorithm", method, "--out", f"{method}-one", "--algorithm.bits", "16", "--federation.client-weighting", "sqrt"
        )
        config = str(tmp_path / f"{method}-one" / "config.toml")
        assert main(["train", "--config", config, "--json", "--quiet", "--out", f"{method}-two"]) == 0
        again = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert again["value"] == one["value"] and again["bytes_up"] == one["bytes_up"]
        models = [(tmp_path / f"{method}-{name}" / "model.safetensors").read_bytes() for name in ("one", "two")]
        assert models[0] == models[1]
        configs = [tomllib.loads((tmp_path / f"{method}-{name}" / "config.toml").read_text()) for name in ("one", "two")]
        assert configs[0] == configs[1]


def test_flags_win_over_the_settings_file(capsys, tmp_path):
    (tmp_path / "s.toml").write_text('seed = 5\ndensity = 0.2\n[data]\nnum-examples = 200\n[algorithm]\nname = "fed-avg"\n')
    assert main(["train", "--config", "s.toml", "--json", "--quiet", *QUICK, "--seed", "6"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seed"] == 6 and result["algorithm"] == "fed-avg"


def test_the_table_says_what_was_kept_found_and_sent(capsys):
    assert main(["train", *QUICK]) == 0
    said = capsys.readouterr()
    assert "exactly 4 of 40" in said.out
    assert "best possible" in said.out
    assert "instead of" in said.out
    assert "round 3 of 3" in said.err


@pytest.mark.parametrize("rounds", ["1", "40"])
def test_the_table_says_when_messages_are_longer_than_the_examples(rounds, capsys, tmp_path):
    rng = np.random.default_rng(0)
    np.savetxt(tmp_path / "rows.csv", rng.normal(size=(60, 5)), delimiter=",", header="a,b,c,d,y", comments="")
    words = ["--task", "file", "--data.path", str(tmp_path / "rows.csv"), "--federation.clients", "4", "--algorithm.local-steps", "2"]
    assert main(["train", *words, "--density", "0.5", "--rounds", rounds]) == 0
    out = capsys.readouterr().out
    assert ("fewer bytes than the messages" in out) == (rounds == "40"), out


def test_a_second_run_never_overwrites_the_first(capsys, tmp_path):
    one, two = trained(capsys), trained(capsys)
    assert one["run"] != two["run"]
    assert trained(capsys, "--out", "mine")
    before = (tmp_path / "mine" / "metrics.jsonl").read_bytes()
    assert main(["train", "--quiet", *QUICK, "--out", "mine"]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert (tmp_path / "mine" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--density", "0"], "density must be above 0"),
        (["--density", "1.5"], "density must be above 0 and at most 1"),
        (["--density", "0.001"], "keeps none; use at least 0.025"),
        (["--federation.clients", "500"], "more than data.num-examples 300"),
        (["--federation.participation", "0.01"], "picks nobody; use at least 0.1"),
        (["--federation.participation", "2"], "above 0 and at most 1"),
        (["--task", "nope"], "--task takes lr, lg, mc"),
        (["--algorithm", "fed-avgg"], "got fed-avgg; did you mean fed-avg?"),
        (["--densty", "0.1"], "--densty is unknown; did you mean --density?"),
        (["--clients", "5"], "--clients is unknown; did you mean --federation.clients?"),
        (["--data.num-example", "10"], "did you mean --data.num-examples?"),
        (["--algorithm.shrinkage", "1"], "--algorithm.shrinkage is unknown; there are --algorithm.batch-size"),
        (["--algorithm.density", "0.3"], "--algorithm.density is unknown"),
        (["--sed.x", "1"], "--sed.x is unknown; the sections are data, federation"),
        (["--algorithm.bits", "7"], "--algorithm.bits takes 32, 16, 8, 4; got 7"),
        (["--federation.partition", "lable"], "did you mean label?"),
        (["--density", "much"], "--density takes a number; got much"),
        (["--density", ""], "--density takes a number; got no value"),
        (["--centralized", "perhaps"], "--centralized takes true or false; got perhaps"),
        (["--seed", "99999999999999999999999"], "below 2^63"),
        (["--init-weights", "nowhere.safetensors"], "cannot be read as safetensors"),
        (["--federation.alpha", "inf"], "finite"),
        (["--algorithm.density-schedule", "cubic", "--algorithm.anneal-start", "0.9", "--algorithm.anneal-end", "0.1"], "must be before"),
        (["--algorithm.initial-density", "0.3"], "without --algorithm.density-schedule cubic; add that, or leave it out"),
        (["--federation.clients", "2.7"], "takes a whole number; got 2.7"),
        (["--seed", "1.5"], "takes a whole number; got 1.5"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--rounds", "many"], "takes a whole number; got many"),
        (["--federation.partition", "label"], "task lr has none"),
        (["--device", "nowhere"], "is not available"),
        (["--config", "missing.toml"], "cannot be read"),
        (["stray"], "stray is no option"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(words, text, capsys, tmp_path):
    assert main(["train", "--quiet", *flags(QUICK, words)]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1 and "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("denisty = 0.1", "did you mean --density?"),
        ("[data]\nnum-exampels = 5", "did you mean --data.num-examples?"),
        ("rounds = 'many'", "takes a whole number; got many"),
        ("[algorithm]\nlocal-steps = 'x'", "takes a whole number; got x"),
        ("[federation]\nclients = 2.5", "takes a whole number; got 2.5"),
        ("[algorithm]\nnonsense = 1", "--algorithm.nonsense is unknown; there are"),
        ("data = 3", "--data is unknown; there are --data.num-examples"),
        ("task = [1]", "got [1]"),
        ("[seed]\nx = 1", "--seed.x is unknown; the sections are data"),
        ("this is not toml", "is not TOML"),
        ("[algorithm]\nname = 5", "--algorithm takes sieve, "),
        ("json = 'yes'", "--json takes true or false; got yes"),
    ],
)
def test_a_wrong_settings_file_is_one_line_and_exit_code_two(settings, text, capsys, tmp_path):
    (tmp_path / "wrong.toml").write_text(settings)
    assert main(["train", "--quiet", "--config", "wrong.toml"]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rounds"], "--rounds takes a whole number; got no value"),
        (["--out", "--quiet"], "--out takes a path; got no value"),
        (["--seed", "1", "--seed=2"], "--seed is given twice"),
        (["--algorithm", "flops", "--algorithm.name", "sieve"], "--algorithm.name is given twice"),
        (["--centralized", "--no-centralized"], "--centralized is given twice"),
        (["--no-density"], "--density takes a number; got false"),
        (["--quiet", "extra"], "--quiet takes true or false; got extra"),
        (["--out", "train", "--rounds", "0"], "rounds must be at least 1"),
        (["--resume", "nowhere"], "which needs the config.toml of a run, cannot be read"),
        (["--task", "digits", "--data.true-density", "1"], "--data.true-density is unknown"),
    ],
)
def test_a_missing_double_or_stray_value_is_one_line_and_exit_code_two(words, text, capsys):
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1


def test_all_ways_to_write_an_option_are_the_same():
    expected = {"seed": "3", "data.num_examples": "-5", "quiet": "", "centralized": "false", "federation.center_features": "false"}
    words = ["--seed=3", "--data.num_examples", "-5", "--quiet", "--no-centralized", "--federation.no-center-features"]
    assert parse_words(words) == expected
    assert parse_words(["--algorithm", "flops"]) == parse_words(["--algorithm.name=flops"]) == {"algorithm": "flops"}


@pytest.mark.parametrize("step_rule", ["constant"])
def test_divergence_is_reported_and_finished_rounds_are_kept(step_rule, capsys, tmp_path):
    words = [
        "--algorithm.step-rule",
        step_rule,
        "--algorithm.learning-rate",
        "0.3",
        "--rounds",
        "60",
        "--algorithm",
        "fed-avg",
        "--out",
        "lost",
    ]
    assert main(["train", "--quiet", *flags(QUICK, words)]) == 1
    said = capsys.readouterr().err
    assert "diverged in round" in said and "lower the rate" in said and said.count("\n") == 1
    assert (tmp_path / "lost" / "config.toml").exists()
    assert not (tmp_path / "lost" / "model.safetensors").exists()


def test_a_read_only_folder_is_refused(capsys, tmp_path):
    (tmp_path / "a-file").write_text("kept")
    assert main(["train", "--quiet", *QUICK, "--out", "a-file/run"]) == 2
    assert "cannot write a run into a-file/run" in capsys.readouterr().err
    assert (tmp_path / "a-file").read_text() == "kept"


def test_an_interrupted_run_exits_130_and_keeps_its_rounds(capsys, tmp_path, monkeypatch):
    from fedsieve.experiments import runner

    real = runner.run_rounds

    def interrupted(*arguments):
        for i, step in enumerate(real(*arguments)):
            if i == 2:
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(runner, "run_rounds", interrupted)
    assert main(["train", "--quiet", *QUICK, "--out", "half"]) == 130
    assert len(read_metrics(tmp_path / "half")) == 2


def test_compare_shows_means_and_paired_differences_at_equal_rounds_and_bytes(capsys):
    words = ["--algorithms", "fed-iter-ht,fed-avg,flops", "--seeds", "1,2", "--rounds", "3", *SMALL, "--federation.participation", "0.3"]
    assert main(["compare", *words, "--algorithm.local-steps", "4", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seeds"] == [1, 2] and result["base"] == "fed-iter-ht"
    cheap, dense = result["algorithms"]["fed-iter-ht"], result["algorithms"]["fed-avg"]
    assert cheap["equal_bytes"]["values"] == cheap["equal_rounds"]["values"]
    assert dense["bytes_up"] > cheap["bytes_up"]
    assert dense["equal_bytes"]["values"] != dense["equal_rounds"]["values"]
    a, b = dense["equal_rounds"]["values"], cheap["equal_rounds"]["values"]
    assert dense["equal_rounds"]["difference"] == pytest.approx(np.mean(np.subtract(a, b)))


def test_compare_prints_one_table_for_rounds_and_one_for_bytes(capsys):
    words = [
        "--algorithms",
        "fed-iter-ht,fed-avg",
        "--seeds",
        "1,2",
        "--rounds",
        "2",
        *SMALL,
        "--federation.participation",
        "0.3",
        "--algorithm.local-steps",
        "4",
    ]
    assert main(["compare", *words]) == 0
    said = capsys.readouterr().out
    assert "after all rounds" in said and "what the cheapest needs" in said and "+-" in said
    assert "data: generated: 300 training and 200 test examples" in said.splitlines()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--algorithms", "fed-avg,nope"], "got nope"),
        (["--algorithms", "fed-avg,fed-avg"], "twice"),
        (["--seeds", "1,x"], "whole numbers"),
        (["--seeds", "1,1"], "each once"),
        (["--seed", "1"], "--seed is unknown; did you mean --seeds?"),
        (["--algorithm", "sieve"], "did you mean --algorithms?"),
        (["--resume", "nowhere"], "--resume is unknown"),
    ],
)
def test_compare_refuses_what_it_cannot_compare(words, text, capsys):
    assert main(["compare", *SMALL, *words]) == 2
    assert text in capsys.readouterr().err


def test_a_confidence_interval_is_the_t_interval():
    from scipy import stats

    from fedsieve.experiments.compare import paired_difference

    values, base = [0.9, 0.95, 0.93, 0.99], [0.8, 0.9, 0.91, 0.92]
    found = paired_difference(values, base)
    low, high = stats.ttest_rel(values, base).confidence_interval()
    assert found["difference"] - found["interval"] == pytest.approx(low)
    assert found["difference"] + found["interval"] == pytest.approx(high)


def listed_options(capsys, *words):
    assert main(["train", *words]) == 0
    return set(re.findall(r"^│ \*?\s*(--[a-z.-]+)", capsys.readouterr().out, flags=re.MULTILINE))


@pytest.mark.parametrize("task", ["lr", "file", "mnist"])
def test_help_shows_at_most_thirty_options(task, capsys):
    assert 25 <= len(listed_options(capsys, "--task", task, "--help")) <= 30


def test_help_all_shows_the_options_that_help_leaves_out(capsys):
    common, every = listed_options(capsys, "--help"), listed_options(capsys, "--help-all")
    assert common < every and {"--privacy.noise-multiplier", "--checkpoint.rounds"} <= every - common


def test_training_loads_no_library_that_it_does_not_need(tmp_path):
    """Their imports would take as long as half of torch's."""
    words = ["train", "--rounds", "1", "--data.num-examples", "300", "--data.num-features", "40", "--out", str(tmp_path / "run"), "--quiet"]
    unneeded = {"matplotlib", "sklearn", "pandas", "scipy.special", "rich.progress"}
    code = f"import sys; from fedsieve.cli.main import main; sys.exit(main({words}) or ', '.join({unneeded} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
