"""The rivals study: one budget of trials for all, equal bytes, equal density, dense models as lines of their own."""

import csv
import json

import pytest

from fedsieve.algorithms import algorithm_class
from fedsieve.cli.main import main
from fedsieve.cli.train import option_types
from fedsieve.core.settings import normalize_key, parse_settings
from fedsieve.experiments.config_io import build_config
from fedsieve.experiments.resolve import resolve
from fedsieve.report.figures import equal_bytes as equal_bytes_report
from fedsieve.report.figures import rivals as report
from fedsieve.studies import rivals
from fedsieve.studies.results import DENSE_MODEL, SPARSE_MODEL
from fedsieve.studies.scale import SCALES, ScaleName

SHORT = SCALES[ScaleName.SHORT]
OPTIONS = {f"{task} {name}": {} for task in rivals.TUNING_TASKS for name in rivals.ALGORITHM_NAMES}


def test_all_cells_of_the_study_run_every_algorithm_at_the_same_density():
    conditions = rivals.rivals_study(SHORT, OPTIONS).conditions
    cells = {(condition.label["task"], condition.label["factor"]) for condition in conditions}
    assert cells == {(task, factor) for task, factors in rivals.FACTORS.items() for factor in factors}
    for cell in cells:
        part = [condition for condition in conditions if (condition.label["task"], condition.label["factor"]) == cell]
        assert [condition.label["algorithm"] for condition in part] == [*rivals.ALGORITHM_NAMES]
        assert len({resolve(condition.config_for_seed(0)).density for condition in part}) == 1
        assert len({resolve(condition.config_for_seed(0)).federation.participation for condition in part}) == 1


def test_a_learning_rate_keeps_its_ratio_to_the_default_of_a_task():
    _, tuned = rivals.default_run(SHORT, "mnist", "fed-ef")
    _, other = rivals.default_run(SHORT, "mnist-cnn", "fed-ef")
    found = rivals.transfer_options({"learning_rate": 2 * tuned.learning_rate, "bits": 4}, tuned, other)
    assert found == {"learning_rate": 2 * other.learning_rate, "bits": 4}


def row(algorithm, values, num_bytes, *, seed=0, dense=None, options=None, model=SPARSE_MODEL):
    label = {"task": "lr", "factor": "f", "algorithm": algorithm, "model": model, "options": json.dumps(options or {})}
    curves = {"r2": values, "bytes": num_bytes} | ({} if dense is None else {"dense_value": dense})
    totals = {"up": num_bytes[-1], "down": 0}
    shared = {
        "state": "done",
        "metric": "r2",
        "seconds": 1.0,
        "density": 0.05,
        "data": "generated",
        "config": {"rounds": 2, "federation": {"participation": 0.05}},
    }
    stored = {"value": values[-1], "dense_value": None if dense is None else dense[-1]}
    return {**shared, "label": label, "seed": seed, "curves": curves, "bytes": totals, "values": stored}


def test_options_are_chosen_at_the_bytes_of_sieve_and_again_for_the_dense_model():
    rows = [row("sieve", [0.5, 0.8], [50, 100]), row("sieve", [0.5, 0.9], [100, 200], options={"bits": 8})]
    rows += [
        row("stc", [0.6, 0.1], [50, 100], dense=[0.1, 0.2]),
        row("stc", [0.3, 0.3], [50, 100], dense=[0.5, 0.9], options={"bits": 4}),
        row("stc", [0.2, 0.9], [50, 300], dense=[0.3, 0.95], options={"bits": 16}),
    ]
    assert rivals.selected_options(rows) == {"lr sieve": {}, "lr stc": {"bits": 4}, f"lr stc, {DENSE_MODEL}": {"bits": 4}}


def test_a_dense_model_is_a_line_of_its_own_and_no_competitor():
    rows = [row("sieve", [0.5, 0.8], [50, 100]), row("stc", [0.3, 0.4], [40, 90], dense=[0.7, 0.9])]
    rows += [row("stc", [0.3, 0.4], [40, 90], dense=[0.7, 0.9], model=DENSE_MODEL)]
    sieve, cut, dense = report.table_entries(rows)
    assert (cut["at sieve's bytes"]["mean"], dense["at sieve's bytes"]["mean"]) == (0.4, 0.9)
    assert (sieve["density"], cut["density"], dense["density"]) == (0.05, 0.05, 1.0)
    assert sieve["target"] == pytest.approx(0.76)
    assert (sieve["bytes to target"]["mean"], cut["bytes to target"], dense["bytes to target"]["mean"]) == (100, None, 90)
    assert "in 1 of 1 cells" in equal_bytes_report.summarize([sieve, cut, dense])


@pytest.mark.long
@pytest.mark.usefixtures("few_test_rows")
def test_the_study_tunes_computes_reports_and_resumes(tmp_path):
    words = ["reproduce", "rivals", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]
    assert main(words) == 0
    assert {"table.md", "table.csv", "rivals.png", "rivals.pdf", "tuning"} <= {path.name for path in tmp_path.iterdir()}
    lines = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert {line["algorithm"] for line in lines} == {*rivals.ALGORITHM_NAMES}
    assert {line["algorithm"] for line in lines if line["model"] == DENSE_MODEL} == {*rivals.DENSE_COMPRESSORS}
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_the_leaderboard_shows_the_stored_rows():
    from tools.publish_leaderboard import CSV, PAGE, insert_table, read_rows

    rows = read_rows(CSV.read_text())
    assert rows and insert_table(PAGE.read_text(), rows) == PAGE.read_text(), "run tools/publish_leaderboard.py"


def test_the_leaderboard_names_the_data_of_each_task():
    from tools.publish_leaderboard import describe_data

    rows = [
        {"task": task, "data": text} for task, text in (("lr", "generated"), ("mc", "generated"), ("mnist", "MNIST"), ("lr", "generated"))
    ]
    assert describe_data(rows) == "lr, mc: generated; mnist: MNIST"


def test_a_published_cell_stays_until_the_study_has_it():
    from tools.publish_leaderboard import merge_cells

    def cell(task, factor, value):
        return {"task": task, "factor": factor, "value": value}

    published = [cell("lg", "density .05", "old"), cell("lr", "density .05", "old")]
    new = [cell("lg", "density .05", "new"), cell("mnist", "density .01", "new")]
    assert [(row["task"], row["value"]) for row in merge_cells(published, new)] == [("lr", "old"), ("lg", "new"), ("mnist", "new")]


def test_the_command_of_a_row_repeats_its_run():
    options = {"bits": 4, "density_schedule": "cubic", "initial_density": None, "learning_rate": 0.75}
    for name in ("lr eden", "mnist eden"):
        for condition in rivals.rivals_study(SHORT, {name: options}).conditions:
            run = resolve(condition.config_for_seed(3))
            stored = {"label": condition.label, "seed": 3, "density": run.density, "config": run.settings_dict}
            words = report.train_command(stored).removeprefix("fedsieve train --").split(" --")
            values = {normalize_key(name): value for name, value in (word.split(" ", 1) for word in words)}
            parsed = parse_settings(option_types(condition.label["task"], algorithm_class("eden")), values, "--")
            repeated = resolve(build_config(parsed))
            for part in ("algorithm", "data", "federation", "rounds", "density", "seed", "task"):
                assert getattr(repeated, part) == getattr(run, part), (condition.label, part)
