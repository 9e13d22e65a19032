"""Tuning on validation examples, and the equal-bytes study."""

import json

import pytest

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.cli.main import main
from fedsieve.core.schedules import DensitySchedule
from fedsieve.report.figures import equal_bytes as equal_bytes_report
from fedsieve.studies import equal_bytes, tuning
from fedsieve.studies.scale import SCALES, ScaleName

WORDS = [
    "--task",
    "lg",
    "--rounds",
    "3",
    "--federation.clients",
    "10",
    "--data.num-examples",
    "300",
    "--data.num-features",
    "40",
    "--density",
    "0.1",
]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_equally_many_candidates_and_its_defaults_first(name):
    candidates = tuning.candidate_options(algorithm_class(name)(), tuning.NUM_TRIALS)
    assert candidates[0] == {} and len(candidates) == tuning.NUM_TRIALS
    assert len({json.dumps(options, sort_keys=True) for options in candidates}) == tuning.NUM_TRIALS


def test_options_set_by_the_user_are_not_tuned():
    candidates = tuning.candidate_options(
        algorithm_class("sieve")(), tuning.NUM_TRIALS, frozenset({"learning_rate", "density_schedule", "initial_density"})
    )
    assert all(options.keys() <= {"batch_size", "bits", "reply_bits"} for options in candidates)


def test_an_initial_density_set_by_the_user_keeps_the_schedule_in_every_trial():
    candidates = tuning.candidate_options(
        algorithm_class("fed-iter-ht")(density_schedule=DensitySchedule.CUBIC), tuning.NUM_TRIALS, frozenset({"initial_density"})
    )
    assert not any("density_schedule" in options for options in candidates)


@pytest.mark.parametrize(("name", "other"), [("sieve", DensitySchedule.CUBIC), ("flops-pa", DensitySchedule.CONSTANT)])
def test_the_default_schedule_is_not_tried_twice(name, other):
    candidates = tuning.candidate_options(algorithm_class(name)(), tuning.NUM_TRIALS)
    assert {options["density_schedule"] for options in candidates if "density_schedule" in options} == {other}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_schedules_and_gate_noise_are_tuned_where_an_algorithm_has_them(name):
    algorithm = algorithm_class(name)()
    tried = {option for options in tuning.candidate_options(algorithm, tuning.NUM_TRIALS) for option in options}
    wanted = {"density_schedule", "initial_density", "anneal_end", "local_gate_noise"}
    assert wanted & algorithm.option_names() <= tried


SIX_TRIALS = {
    "rates": {"learning_rate", "server_learning_rate"},
    "schedule end": {"anneal_end"},
    "start density or k": {"initial_density", "reply_entries", "uplink_density", "adjust_interval"},
    "bits": {"bits", "reply_bits", "update_bits"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_six_trials_try_every_kind_of_option_that_an_algorithm_has(name):
    algorithm = algorithm_class(name)()
    candidates = tuning.candidate_options(algorithm, 6)
    for kind, options in SIX_TRIALS.items():
        has_kind = bool(options & algorithm.option_names())
        expected = 2 * has_kind if kind == "rates" else 1 if has_kind else 0
        assert sum(1 for tried in candidates if options & tried.keys()) >= expected, kind
    assert len(candidates) == 6


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("flops-pa", "anneal_end", [0.5]),
        ("flops-pa", "initial_density", [1.0]),
        ("fed-ef", "uplink_density", [0.1]),
        ("fed-dst", "adjust_interval", [5]),
        ("sign-ht", "reply_entries", [4.0]),
    ],
)
def test_six_trials_include_the_options_of_the_messages(name, option, values):
    candidates = tuning.candidate_options(algorithm_class(name)(), 6)
    assert [options[option] for options in candidates if option in options] == values


@pytest.mark.parametrize("name", ["fed-iter-ht", "sieve"])
def test_options_survive_json(name):
    algorithm = algorithm_class(name)()
    for options in tuning.candidate_options(algorithm, tuning.NUM_TRIALS):
        assert tuning.apply_options(algorithm, json.loads(json.dumps(options))) == tuning.apply_options(algorithm, options)
    assert tuning.apply_options(algorithm, {"density_schedule": "cubic"}).density_schedule is DensitySchedule.CUBIC


@pytest.mark.usefixtures("few_test_rows")
def test_train_uses_the_best_trial_and_does_not_repeat_trials(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", *WORDS, "--tune-trials", "3", "--quiet", "--json", "--algorithm.local-steps", "3"]
    assert main(words) == 0
    (stored,) = (tmp_path / "runs" / "tuning").glob("*/chosen.json")
    stored_trials = json.loads(stored.read_text())
    scores = [entry["value"] for entry in stored_trials["tried"]]
    assert len(scores) == 3 and stored_trials["tried"][scores.index(max(scores))]["options"] == stored_trials["chosen"]
    before = (stored.parent / "rows.jsonl").read_bytes()
    assert main(words) == 0
    assert (stored.parent / "rows.jsonl").read_bytes() == before
    capsys.readouterr()
    assert main(["train", *WORDS, "--tune-trials", "0"]) == 2
    assert "--tune-trials" in capsys.readouterr().err


def row(algorithm, seed, curve, cumulative_bytes):
    label = {"task": "lr", "factor": "plain", "algorithm": algorithm}
    curves = {"r2": curve, "bytes": cumulative_bytes}
    totals = {"up": cumulative_bytes[-1] / 2, "down": cumulative_bytes[-1] / 2}
    shared = {"state": "done", "metric": "r2", "seconds": 1.0}
    return {**shared, "label": label, "seed": seed, "curves": curves, "bytes": totals, "values": {"value": curve[-1]}}


def test_algorithms_are_compared_at_the_bytes_of_sieve():
    rows = [row("sieve", s, [0.1, 0.8], [50, 100]) for s in (0, 1)]
    rows += [row("fed-iter-ht", s, [0.3, 0.9], [90, 180]) for s in (0, 1)]
    entries = {entry["algorithm"]: entry for entry in equal_bytes_report.table_entries(rows)}
    assert entries["fed-iter-ht"]["at sieve's bytes"]["mean"] == pytest.approx(0.3)
    assert entries["fed-iter-ht"]["difference to sieve"] == pytest.approx(-0.5)
    assert "in 1 of 1 cells" in equal_bytes_report.summarize(list(entries.values()))
    ahead = [row("gradual", s, [0.85], [80]) for s in (0, 1)]
    assert "in 0 of 1 cells; at worst 0.0500 behind" in equal_bytes_report.summarize(equal_bytes_report.table_entries(rows + ahead))
    dense = [row(name, s, [0.95], [80]) for s in (0, 1) for name in ("fed-ht", "fed-avg", "flops")]
    assert "in 1 of 1 cells" in equal_bytes_report.summarize(equal_bytes_report.table_entries(rows + dense))


def test_sparse_algorithms_are_also_tuned_at_the_bytes_of_sieve():
    def trial(algorithm, options, curve, cumulative_bytes):
        stored = row(algorithm, 100, curve, cumulative_bytes)
        return stored | {"label": {"task": "lr", "algorithm": algorithm, "options": json.dumps(options)}}

    rows = [trial("sieve", {}, [0.7, 0.8], [50, 100])]
    rows += [trial("fed-iter-ht", {}, [0.7, 0.75], [50, 100]), trial("fed-iter-ht", {"batch_size": 32}, [0.3, 0.9], [90, 180])]
    rows += [trial("flops-pa", {}, [0.7, 0.75], [500, 1000]), trial("flops-pa", {"batch_size": 32}, [0.3, 0.9], [900, 1800])]
    for dense in ("fed-avg", "flops"):
        rows += [trial(dense, {}, [0.7, 0.75], [50, 1000]), trial(dense, {"batch_size": 32}, [0.3, 0.9], [50, 1800])]
    assert equal_bytes.selected_options(rows) == {
        "lr sieve": {},
        "lr fed-iter-ht": {"batch_size": 32},
        "lr fed-iter-ht, tuned for bytes": {},
        "lr fed-iter-ht, 4 bits": {"batch_size": 32, "bits": 4},
        "lr flops-pa": {"batch_size": 32},
        "lr flops-pa, tuned for bytes": {},
        "lr fed-avg": {"batch_size": 32},
        "lr flops": {"batch_size": 32},
    }


def test_the_study_runs_real_data_with_the_selected_options():
    short = SCALES[ScaleName.SHORT]
    trials = equal_bytes.tuning_study(short).conditions
    settings = {f"{condition.label['task']} {condition.label['algorithm']}": {"batch_size": 16} for condition in trials}
    conditions = equal_bytes.equal_bytes_study(short, settings).conditions
    assert {condition.label["task"] for condition in conditions} == {"lr", "lg", "mc", *equal_bytes.REAL_TASK_FACTORS}
    sieve = [condition for condition in conditions if condition.label["algorithm"] == "sieve"]
    runs = {(condition.label["task"], condition.label["factor"]): condition.config_for_seed(condition.seeds[0]) for condition in sieve}
    assert all(run.algorithm.batch_size == 16 for run in runs.values())
    assert runs["mnist", "density .01"].density == 0.01 and runs["mnist", "density .01"].rounds == 100
    assert runs["emnist", "density .05"].federation.clients == 1000 and runs["emnist", "density .05"].rounds == 50
    assert {len(condition.seeds) for condition in conditions if condition.label["task"] in ("lr", "lg")} == {10}
    assert all(
        condition.config_for_seed(100).rounds == (100 if condition.label["task"] == "mnist" else 16)
        for condition in trials
        if condition.label["task"] in equal_bytes.REAL_TASK_FACTORS
    )


@pytest.mark.long
@pytest.mark.usefixtures("few_test_rows")
def test_the_equal_bytes_study_tunes_computes_and_reports(tmp_path):
    assert main(["reproduce", "equal-bytes", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]) == 0
    assert {"table.md", "table.csv", "equal-bytes.png", "equal-bytes.pdf"} <= {path.name for path in tmp_path.iterdir()}
    chosen = json.loads((tmp_path / "tuning" / "chosen.json").read_text())
    assert {name.split()[1] for name in chosen} >= {"sieve", "flops-pa", "fed-iter-ht"}
    assert "at equal bytes sieve is best" in (tmp_path / "table.md").read_text()
