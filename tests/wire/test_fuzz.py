"""Whatever bytes a reader is given, only its documented errors come back. `make fuzz` looks longer."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from fuzz_targets import TARGETS


def mutations(seed):
    """What is left of a valid input after a few cuts, changes and insertions."""
    place = st.integers(0, len(seed))
    harm = st.tuples(st.sampled_from(["cut", "change", "insert", "repeat"]), place, place, st.binary(min_size=1, max_size=8))

    def mutated(harms):
        data = seed
        for kind, a, b, new in harms:
            low, high = min(a, b), max(a, b)
            middle = {"cut": b"", "change": new, "insert": new + data[low:high], "repeat": 2 * data[low : low + 200]}[kind]
            high = min(low + len(new), len(data)) if kind == "change" else high
            data = data[:low] + middle + data[high:]
        return data

    return st.lists(harm, min_size=1, max_size=4).map(mutated)


@pytest.mark.parametrize("name", TARGETS)
def test_a_valid_input_is_read(name):
    target = TARGETS[name]
    assert all(target.accepts(seed) for seed in target.seeds) == (name != "config")  # a run that could begin is stopped there


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("default")
def test_only_documented_errors_escape(name):
    target = TARGETS[name]

    @settings(max_examples=30 if name == "config" else 300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.one_of(*(mutations(seed) for seed in target.seeds), st.binary(max_size=300)))
    def thrown(data):
        target.accepts(data)

    thrown()


VALUES = [
    "0",
    "-1",
    "3",
    "10000000000000000000000",
    "0.5",
    "nan",
    "-inf",
    "1e308",
    "true",
    '""',
    '"x"',
    '"all"',
    "[]",
    "[1]",
    "{}",
    "{a = 1}",
]
VALUES += ["1979-05-27", "07:32:00", '"\\u0000"', '"[red]"', '"9e99"']


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_value_of_any_setting_is_taken_or_refused_in_one_line(data):
    valid = TARGETS["config"].seeds[0].decode().splitlines()
    lines = [number for number, line in enumerate(valid) if "=" in line and not line.startswith(("out", "resume"))]
    for number in data.draw(st.lists(st.sampled_from(lines), min_size=1, max_size=3)):
        valid[number] = f"{valid[number].split('=')[0]}= {data.draw(st.sampled_from(VALUES))}"
    TARGETS["config"].accepts("\n".join(valid).encode())
