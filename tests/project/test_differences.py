"""docs/differences.md lists exactly the options in which the recommended recipe and the paper's differ, with both values."""

from pathlib import Path

import pytest


@pytest.fixture
def tool(monkeypatch):
    """The tool that measures the differences and writes the page."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return __import__("measure_differences")


def test_the_stored_differences_are_those_of_both_recipes(tool):
    for algorithm in tool.ALGORITHMS:
        stored = [row for row in tool.read_rows() if row["algorithm"] == algorithm]
        assert [row["option"] for row in stored if row["task"] == "lr"] == tool.differing_options(algorithm)
        for row in stored:
            found = tool.shown_values(algorithm, row["option"], row["task"])
            assert {name: row[name] for name in found} == found, "run tools/measure_differences.py"


def test_the_page_shows_the_stored_differences(tool):
    page = tool.PAGE.read_text()
    assert tool.insert_table(page, tool.read_rows()) == page, "run tools/measure_differences.py"


def test_a_difference_is_measured_alone_or_with_the_options_that_it_needs(tool):
    (changed, base) = tool.measured_runs("flops-pa", "algorithm.bits", "lr")
    assert (changed, base) == ({"algorithm.bits": 32}, {})
    (changed, base) = tool.measured_runs("flops-pa", "algorithm.step-rule", "mc")
    assert changed.keys() == {"algorithm.step-rule", "algorithm.learning-rate"} and base == {}
    (changed, base) = tool.measured_runs("flops-pa", "algorithm.log-alpha-limit", "mc")
    assert base == {"algorithm.gate-encoding": "gates"} and changed == base | {"algorithm.log-alpha-limit": float("inf")}
    for algorithm in tool.ALGORITHMS:
        for option in tool.differing_options(algorithm):
            assert tool.DIFFERENCES[option].paper and tool.DIFFERENCES[option].reason


def test_the_worth_of_an_option_is_its_mean_change_over_the_seeds(tool):
    rows = [{"algorithm": "flops", "task": task, "seed 100": "0.0100", "seed 101": "-0.0300"} for task in ("lr", "lg")]
    rows.append({"algorithm": "flops", "task": "mc", "seed 100": "diverged", "seed 101": "0.1000"})
    assert tool.format_worth(rows) == "FLoPS -.010, -.010, diverged"
