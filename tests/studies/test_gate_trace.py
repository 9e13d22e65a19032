"""What a trace records of gates and supports, against the formula written out."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedsieve.algorithms.fed_avg import FedAvg
from fedsieve.algorithms.flops import Flops, Server
from fedsieve.core.gates import GateAtTest, HardConcrete, compute_test_gates
from fedsieve.core.optimizers import initial_moments
from fedsieve.core.types import Layout
from fedsieve.runtime.metrics import soft_iou
from fedsieve.studies.gate_trace import MAX_MAP_GATES, MAX_MAP_ROUNDS, GateTrace, evenly_spaced, pairwise_overlaps

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


SIZE, NUM_UNGATED = 130, 3


def server_with(log_alpha):
    return SimpleNamespace(
        weights=torch.ones(SIZE + NUM_UNGATED),
        log_alpha=torch.cat((log_alpha, torch.full((NUM_UNGATED,), 12.0))),
        multiplier=torch.tensor(0.0),
        layout=SimpleNamespace(num_gated=SIZE),
    )


def recorded(num_rounds, algorithm, num_kept=60):
    """A trace of random gates and supports, the supports, and the test-time gates."""
    source = torch.Generator().manual_seed(1)
    trace, masks, test_gates = GateTrace(algorithm), [], []
    for _ in range(num_rounds):
        log_alpha = 2 * torch.randn(SIZE, generator=source)
        theta = torch.zeros(SIZE + NUM_UNGATED)
        theta[torch.randperm(SIZE, generator=source)[:num_kept]] = -1.0
        theta[SIZE:] = 1.0
        is_gated = isinstance(algorithm, Flops)
        trace.record(server_with(log_alpha) if is_gated else SimpleNamespace(layout=SimpleNamespace(num_gated=SIZE)), theta)
        masks.append((theta[:SIZE] != 0).float())
        test_gates.append(compute_test_gates(algorithm.shape, log_alpha) if is_gated else masks[-1])
    return trace.to_dict(), masks, test_gates


@pytest.mark.parametrize("algorithm", [Flops(), FedAvg()], ids=["gates", "masks"])
def test_the_maps_have_the_soft_iou_of_every_pair_of_rounds(algorithm):
    """L305-323: sum min / sum max of the test-time gates, or of the masks if there are no gates."""
    trace, masks, test_gates = recorded(5, algorithm)
    assert trace["kind"] == ("gates" if isinstance(algorithm, Flops) else "masks")
    assert trace["rounds"] == [1, 2, 3, 4, 5]
    for name, vectors in (("overlap", test_gates), ("mask_overlap", masks)):
        expected = [[soft_iou(a, b) for b in vectors] for a in vectors]
        np.testing.assert_allclose(trace[name], expected, atol=1.5e-3)  # three decimals of gates in half precision


@pytest.mark.parametrize("num_kept", [60, 5])
def test_some_kept_gates_and_some_others_are_stored_individually(num_kept):
    trace, masks, test_gates = recorded(3, Flops(), num_kept)
    kept, others = (np.flatnonzero(masks[-1].numpy() == value) for value in (1, 0))
    selected = [*kept[:MAX_MAP_GATES], *others[:MAX_MAP_GATES]]
    assert trace["num_kept"] == min(num_kept, MAX_MAP_GATES)
    np.testing.assert_allclose(trace["gates"], torch.stack(test_gates)[:, selected], atol=1.5e-3)


def test_a_trace_is_plain_numbers_with_three_decimals():
    trace = recorded(4, Flops())[0]
    assert json.loads(json.dumps(trace)) == trace
    assert all(round(value, 3) == value for name in ("overlap", "mask_overlap", "gates") for row in trace[name] for value in row)


def test_a_run_without_gates_stores_none():
    assert "gates" not in recorded(2, FedAvg())[0]


def test_long_runs_are_thinned_to_evenly_spaced_rounds_with_the_first_and_the_last():
    trace, _, _ = recorded(121, FedAvg(), 5)
    assert len(trace["rounds"]) == MAX_MAP_ROUNDS and trace["rounds"][0] == 1 and trace["rounds"][-1] == 121
    assert set(np.diff(trace["rounds"])) == {2, 3}
    assert evenly_spaced(1, 50) == [0] and evenly_spaced(7, 3) == [0, 3, 6] and evenly_spaced(3, 50) == [0, 1, 2]
    assert evenly_spaced(9, 1) == [0]
