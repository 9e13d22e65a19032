"""Tuning on held-out rows, and the equal-bytes study."""

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


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_method_gets_as_many_configurations_and_its_own_comes_first(method):
    found = tuning.candidate_options(algorithm_class(method)(), tuning.NUM_TRIALS)
    assert found[0] == {} and len(found) == tuning.NUM_TRIALS
    assert len({json.dumps(options, sort_keys=True) for options in found}) == tuning.NUM_TRIALS


def test_what_is_typed_is_never_searched():
    found = tuning.candidate_options(
        algorithm_class("sieve")(), tuning.NUM_TRIALS, frozenset({"learning_rate", "density_schedule", "initial_density"})
    )
    assert all(options.keys() <= {"batch_size"} for options in found)


def test_where_a_schedule_begins_was_typed_there_is_one_in_every_trial():
    found = tuning.candidate_options(
        algorithm_class("fed-iter-ht")(density_schedule=DensitySchedule.CUBIC), tuning.NUM_TRIALS, frozenset({"initial_density"})
    )
    assert not any("density_schedule" in options for options in found)


@pytest.mark.parametrize(("density", "other"), [(0.05, DensitySchedule.CUBIC), (0.005, DensitySchedule.CONSTANT)])
def test_the_schedule_a_rule_chooses_is_not_tried_twice(density, other):
    found = tuning.candidate_options(algorithm_class("sieve")(density=density), tuning.NUM_TRIALS)
    assert {options["density_schedule"] for options in found if "density_schedule" in options} == {other}


@pytest.mark.parametrize("name", ["fed-iter-ht", "sieve"])
def test_stored_options_come_back_as_they_were(name):
    method = algorithm_class(name)()
    for options in tuning.candidate_options(method, tuning.NUM_TRIALS):
        assert tuning.apply_options(method, json.loads(json.dumps(options))) == tuning.apply_options(method, options)
    assert tuning.apply_options(method, {"density_schedule": "cubic"}).density_schedule is DensitySchedule.CUBIC


@pytest.mark.usefixtures("few_test_rows")
def test_train_uses_the_best_of_its_trials_and_does_not_repeat_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", *WORDS, "--tune-trials", "3", "--quiet", "--json", "--algorithm.local-steps", "3"]
    assert main(words) == 0
    (stored,) = (tmp_path / "runs" / "tuning").glob("*/chosen.json")
    told = json.loads(stored.read_text())
    scores = [entry["value"] for entry in told["tried"]]
    assert len(scores) == 3 and told["tried"][scores.index(max(scores))]["options"] == told["chosen"]
    before = (stored.parent / "rows.jsonl").read_bytes()
    assert main(words) == 0
    assert (stored.parent / "rows.jsonl").read_bytes() == before
    capsys.readouterr()
    assert main(["train", *WORDS, "--tune-trials", "0"]) == 2
    assert "--tune-trials" in capsys.readouterr().err


def row(method, seed, curve, spent):
    label = {"task": "lr", "factor": "plain", "method": method}
    curves = {"r2": curve, "bytes": spent}
    bytes_ = {"up": spent[-1] / 2, "down": spent[-1] / 2}
    shared = {"state": "done", "metric": "r2", "seconds": 1.0}
    return {**shared, "label": label, "seed": seed, "curves": curves, "bytes": bytes_, "values": {"value": curve[-1]}}


def test_methods_are_compared_at_the_bytes_of_sieve_and_the_verdict_counts_cells():
    rows = [row("sieve", s, [0.1, 0.8], [50, 100]) for s in (0, 1)]
    rows += [row("fed-iter-ht", s, [0.3, 0.9], [90, 180]) for s in (0, 1)]
    found = {entry["method"]: entry for entry in equal_bytes_report.table_entries(rows)}
    assert found["fed-iter-ht"]["at sieve's bytes"]["mean"] == pytest.approx(0.3)
    assert found["fed-iter-ht"]["less sieve"] == pytest.approx(-0.5)
    assert "in 1 of 1 cells" in equal_bytes_report.summarize(list(found.values()))
    ahead = [row("gradual", s, [0.85], [80]) for s in (0, 1)]
    assert "in 0 of 1 cells; at worst 0.0500 behind" in equal_bytes_report.summarize(equal_bytes_report.table_entries(rows + ahead))
    dense = [row(method, s, [0.95], [80]) for s in (0, 1) for method in ("fed-ht", "fed-avg", "flops")]
    assert "in 1 of 1 cells" in equal_bytes_report.summarize(equal_bytes_report.table_entries(rows + dense))


def test_a_rival_takes_part_with_what_was_best_after_all_rounds_and_if_sparse_with_what_was_best_at_the_bytes_of_sieve():
    def trial(method, options, curve, spent):
        found = row(method, 100, curve, spent)
        return found | {"label": {"task": "lr", "method": method, "options": json.dumps(options)}}

    rows = [trial("sieve", {}, [0.7, 0.8], [50, 100])]
    rows += [trial("fed-iter-ht", {}, [0.7, 0.75], [50, 100]), trial("fed-iter-ht", {"batch_size": 32}, [0.3, 0.9], [90, 180])]
    rows += [trial("flops-pa", {}, [0.7, 0.75], [500, 1000]), trial("flops-pa", {"batch_size": 32}, [0.3, 0.9], [900, 1800])]
    for dense in ("fed-avg", "flops"):
        rows += [trial(dense, {}, [0.7, 0.75], [50, 1000]), trial(dense, {"batch_size": 32}, [0.3, 0.9], [50, 1800])]
    assert equal_bytes.selected_options(rows) == {
        "lr sieve": {},
        "lr fed-iter-ht": {"batch_size": 32},
        "lr fed-iter-ht, thrifty": {},
        "lr fed-iter-ht, 4 bits": {"batch_size": 32, "bits": 4},
        "lr flops-pa": {"batch_size": 32},
        "lr flops-pa, thrifty": {},
        "lr fed-avg": {"batch_size": 32},
        "lr flops": {"batch_size": 32},
    }


def test_real_data_is_part_of_the_study_in_full_and_in_short_with_what_was_chosen():
    short = SCALES[ScaleName.SHORT]
    tried = equal_bytes.tuning_study(short).conditions
    settings = {f"{cell.label['task']} {cell.label['method']}": {"batch_size": 16} for cell in tried}
    cells = equal_bytes.equal_bytes_study(short, settings).conditions
    assert {cell.label["task"] for cell in cells} == {"lr", "lg", "mc", *equal_bytes.REAL_TASK_FACTORS}
    runs = {
        (cell.label["task"], cell.label["factor"]): cell.config_for_seed(cell.seeds[0]) for cell in cells if cell.label["method"] == "sieve"
    }
    assert all(run.algorithm.batch_size == 16 for run in runs.values())
    assert runs["mnist", "density .01"].density == 0.01 and runs["mnist", "density .01"].rounds == 100
    assert runs["emnist", "density .05"].federation.clients == 1000 and runs["emnist", "density .05"].rounds == 50
    assert {len(cell.seeds) for cell in cells if cell.label["task"] in ("lr", "lg")} == {10}
    assert all(
        cell.config_for_seed(100).rounds == (100 if cell.label["task"] == "mnist" else 16)
        for cell in tried
        if cell.label["task"] in equal_bytes.REAL_TASK_FACTORS
    )


@pytest.mark.long
@pytest.mark.usefixtures("few_test_rows")
def test_the_equal_bytes_study_tunes_computes_and_reports(tmp_path):
    assert main(["reproduce", "equal-bytes", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]) == 0
    assert {"table.md", "table.csv", "equal-bytes.png", "equal-bytes.pdf"} <= {path.name for path in tmp_path.iterdir()}
    chosen = json.loads((tmp_path / "tuning" / "chosen.json").read_text())
    assert {name.split()[1] for name in chosen} >= {"sieve", "flops-pa", "fed-iter-ht"}
    assert "at equal bytes sieve is best" in (tmp_path / "table.md").read_text()
