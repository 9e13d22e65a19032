"""A study survives what happens to long computations."""

import json
from functools import partial

import pytest

from fedsieve.core.optimizers import StepRule
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.studies import compute, results
from fedsieve.studies.compute import Condition, Study, compute_study
from helpers.algorithms import make_algorithm

pytestmark = pytest.mark.usefixtures("few_test_rows")


def small(method, seed, **options):
    data = Synthetic(num_examples=200, num_features=30, true_density=0.1)
    algorithm = make_algorithm(method, 3, **options)
    return RunConfig(
        task="lr",
        algorithm_name=method,
        density=0.1,
        rounds=4,
        seed=seed,
        data=data,
        federation=FederationConfig(clients=8),
        algorithm=algorithm,
    )


def cell(method, *, trace=False, label=None, **options):
    return Condition(label=label or {"algorithm": method}, config_for_seed=partial(small, method, **options), seeds=(0, 1), trace=trace)


@pytest.fixture
def counted(monkeypatch):
    """How many runs were really computed."""
    calls = []
    real = compute.run_job

    def compute_one(job):
        calls.append(job.key)
        return real(job)

    monkeypatch.setattr(compute, "run_job", compute_one)
    return calls


def stripped(rows):
    timed = ("seconds",)
    return sorted(json.dumps({k: v for k, v in row.items() if k not in timed}, sort_keys=True) for row in rows)


def test_a_finished_run_is_never_computed_twice(tmp_path, counted):
    plan = Study(name="s", description="", conditions=[cell("fed-avg"), cell("flops-pa"), cell("fed-avg", label={"algorithm": "again"})])
    first = compute_study(plan, tmp_path / "s", quiet=True)
    assert len(counted) == 4 and len(first) == 6
    assert stripped(compute_study(plan, tmp_path / "s", quiet=True)) == stripped(first)
    assert len(counted) == 4
    beside = compute_study(Study(name="t", description="", conditions=[cell("fed-avg")]), tmp_path / "t", quiet=True)
    assert len(counted) == 4 and {row["study"] for row in beside} == {"t"}


def test_a_torn_last_line_is_computed_again(tmp_path, counted):
    plan = Study(name="s", description="", conditions=[cell("fed-avg"), cell("flops-pa")])
    whole = compute_study(plan, tmp_path / "s", quiet=True)
    path = tmp_path / "s" / results.ROWS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    assert len(results.all_rows(tmp_path / "s")) == 3
    assert stripped(compute_study(plan, tmp_path / "s", quiet=True)) == stripped(whole)
    assert len(counted) == 5
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_run_that_diverges_is_kept_with_its_reason_and_not_repeated(tmp_path, counted):
    wild = cell("fed-avg", step_rule=StepRule.CONSTANT, learning_rate=1e4)
    plan = Study(name="s", description="", conditions=[wild])
    rows = compute_study(plan, tmp_path / "s", quiet=True)
    assert [row["state"] for row in rows] == ["diverged"] * 2
    assert "diverged in round" in rows[0]["reason"]
    assert results.collect_values(rows, "r2") == []
    compute_study(plan, tmp_path / "s", quiet=True)
    assert len(counted) == 2


def test_a_run_that_fails_is_kept_with_its_reason_and_tried_again(tmp_path, counted, monkeypatch):
    plan = Study(name="s", description="", conditions=[cell("fed-avg")])
    with monkeypatch.context() as broken:
        broken.setattr(compute, "run_rounds", lambda *_: 1 / 0)
        rows = compute_study(plan, tmp_path / "s", quiet=True)
    assert [row["state"] for row in rows] == ["failed"] * 2
    assert "ZeroDivisionError" in rows[0]["reason"]
    rows = compute_study(plan, tmp_path / "s", quiet=True)
    assert [row["state"] for row in rows] == ["done"] * 2
    assert len(counted) == 4


def test_two_processes_give_what_one_gives(tmp_path, monkeypatch):
    monkeypatch.undo()  # the other processes have the usual test rows
    plan = Study(name="s", description="", conditions=[cell("fed-avg"), cell("flops", trace=True)])
    assert stripped(compute_study(plan, tmp_path / "one" / "s", quiet=True)) == stripped(
        compute_study(plan, tmp_path / "two" / "s", workers=2, quiet=True)
    )


def test_a_trace_has_the_overlap_of_gates_between_rounds(tmp_path):
    plan = Study(name="s", description="", conditions=[cell("flops", trace=True), cell("fed-iter-ht", trace=True)])
    for row in compute_study(plan, tmp_path / "s", quiet=True):
        trace = row["trace"]
        assert trace["kind"] == ("gates" if row["label"]["algorithm"] == "flops" else "masks")
        assert [trace["overlap"][i][i] for i in range(4)] == [1.0] * 4
        assert trace["overlap"][0][3] == trace["overlap"][3][0] <= 1


def test_a_run_without_a_trace_is_computed_again_where_one_is_asked_for(tmp_path, counted):
    compute_study(Study(name="s", description="", conditions=[cell("flops")]), tmp_path / "s", quiet=True)
    rows = compute_study(Study(name="s", description="", conditions=[cell("flops", trace=True)]), tmp_path / "s", quiet=True)
    assert len(counted) == 4 and all(row["trace"] for row in rows)


def test_differences_are_paired_by_seed(tmp_path):
    rows = [
        {"seed": seed, "state": "done", "label": {"m": m}, "values": {"r2": value}}
        for m, seed, value in (("a", 0, 1.0), ("a", 1, 2.0), ("b", 1, 1.5), ("b", 0, 0.5))
    ]
    found = results.difference_over_seeds(results.filter_rows(rows, m="a"), results.filter_rows(rows, m="b"), "r2")
    assert found == {"difference": 0.5, "interval": 0.0, "error": 0.0}
