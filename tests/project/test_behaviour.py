"""A change of structure changes no result: every algorithm computes what tests/project/behaviour.json recorded."""

import json

import pytest

from tools import record_behaviour
from tools.record_behaviour import ENGINES

RECORD = json.loads(record_behaviour.RECORD.read_text())
SAME_CPU = RECORD["cpu"] == record_behaviour.describe_cpu()


@pytest.fixture(autouse=True)
def restore_test_size(few_test_rows):
    """The recorder shrinks the test sets of generated tasks; monkeypatch gives them back."""


@pytest.mark.parametrize("engine", [pytest.param(engine, marks=[pytest.mark.long] * (engine == "loop")) for engine in ENGINES])
@pytest.mark.parametrize("case", RECORD["double"])
def test_a_run_in_double_precision_repeats_the_record(case, engine):
    recorded, found = RECORD["double"][case], record_behaviour.record_run(*case.split(), engine)
    assert found["bytes_up"] == recorded["bytes_up"]
    assert found["bytes_down"] == recorded["bytes_down"]
    assert found["indices"] == recorded["indices"]
    assert found["values"] == pytest.approx(recorded["values"], rel=0, abs=1e-9)
    if SAME_CPU:
        assert found["sha256"] == recorded["sha256"]


@pytest.mark.skipif(not SAME_CPU, reason="single precision repeats bit for bit only on the type of CPU that recorded it")
@pytest.mark.parametrize("case", RECORD["single"])
def test_a_run_in_single_precision_repeats_the_record(case):
    assert record_behaviour.record_run(*case.split(), "batched", single_precision=True)["sha256"] == RECORD["single"][case]
