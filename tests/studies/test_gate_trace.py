"""What a trace records of gates and supports."""

import numpy as np
import pytest
import torch

from fedsieve.algorithms.flops import Flops, Server
from fedsieve.core.gates import GateAtTest, HardConcrete, compute_test_gates
from fedsieve.core.optimizers import initial_moments
from fedsieve.core.types import Layout
from fedsieve.studies.gate_trace import GateTrace, pairwise_overlaps

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("vectors", [RNG.random((5, 30)), (RNG.random((5, 30)) < 0.3).astype(float)], ids=["gates", "masks"])
def test_overlap_is_intersection_over_union_of_every_pair(vectors):
    found = pairwise_overlaps(vectors)
    for i, one in enumerate(vectors):
        for j, other in enumerate(vectors):
            wanted = sum(min(a, b) for a, b in zip(one, other, strict=True)) / sum(max(a, b) for a, b in zip(one, other, strict=True))
            assert found[i, j] == pytest.approx(wanted)


def test_overlap_of_masks_counted_by_hand():
    overlaps = pairwise_overlaps(np.array([[1.0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]))
    assert overlaps.tolist() == [[1, pytest.approx(1 / 3), 0, 0], [pytest.approx(1 / 3), 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("test_gate", GateAtTest)
def test_a_trace_has_the_test_time_gates_of_the_algorithm(test_gate):
    log_alpha = torch.linspace(-3, 3, 8)
    moments = initial_moments(log_alpha)
    server = Server(torch.ones(8), log_alpha, torch.zeros(()), moments, moments, Layout(8, {}))
    trace = GateTrace(Flops(test_gate=test_gate))
    mask = log_alpha > 0
    trace.record(server, mask.float())
    found = trace.to_dict()
    wanted = compute_test_gates(HardConcrete(), log_alpha, test_gate)
    assert found["num_kept"] == 4
    assert found["gates"][0] == pytest.approx(torch.cat((wanted[mask], wanted[~mask])).tolist(), abs=1e-3)
