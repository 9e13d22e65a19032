"""The topologies study: what it asks of a star it asks of every graph, and its table states when a node reaches the target."""

import pytest

from fedsieve.cli.main import main
from fedsieve.report.figures.topologies import cost_to_target, log_log_slope, target_value
from fedsieve.studies.scale import SCALES, ScaleName
from fedsieve.studies.topologies import TOPOLOGIES, topologies_study


def test_all_topologies_share_data_rounds_and_algorithms():
    cells = topologies_study(SCALES[ScaleName.SHORT]).conditions
    same = [cell for cell in cells if cell.label["algorithm"] == "sieve" and cell.label["task"] == "lr"]
    runs = {cell.label["topology"]: cell.config_for_seed(0) for cell in same}
    assert runs.keys() == TOPOLOGIES.keys()
    assert len({(run.rounds, run.data, run.federation) for run in runs.values()}) == 1


def run_row(topology, values, final, algorithm="sieve"):
    label = {"task": "lr", "algorithm": algorithm, "topology": topology}
    curves = {"round": [1, 2, 3], "bytes": [10, 20, 30], "r2": values, "mean_node": values}
    shared = {"seed": 0, "state": "done", "metric": "r2", "config": {"federation": {"clients": 5}}}
    return {**shared, "label": label, "curves": curves, "values": {"value": final}}


def test_the_target_is_reached_in_the_first_measured_round_that_is_near_the_star():
    star, ring = run_row("star", [0.1, 0.8, 0.9], 0.9), run_row("ring", [None, 0.891, 0.9], 0.9)
    target = target_value([star, ring], ring)
    assert target == pytest.approx(0.89)
    assert cost_to_target(ring, target) == (2, 4.0)
    assert cost_to_target(run_row("ring", [0.1, 0.2, None], 0.2), target) is None
    assert target_value([star, ring], run_row("ring", [0.1, 0.2, 0.3], 0.3, "fed-avg")) == target, "one target for all algorithms"


def test_a_power_law_has_its_exponent_as_slope():
    assert log_log_slope([0.1, 0.2, 0.4], [100.0, 50.0, 25.0]) == pytest.approx(-1)


def test_the_study_computes_and_reports(tmp_path):
    assert main(["reproduce", "topologies", "--scale", "smoke", "--out", str(tmp_path), "--quiet"]) == 0
    assert {"table.md", "topologies-lr.png", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    assert "worst node" in (tmp_path / "table.md").read_text()
