"""What FLoPS and FLoPS-PA share, against closed forms: gates, the constraint, the model; with groups and with ungated coordinates."""

from dataclasses import replace

import pytest
import torch

from fedsieve.algorithms.flops import Flops
from fedsieve.algorithms.flops_pa import FlopsPA
from fedsieve.algorithms.log_alpha import initial_log_alpha, open_ungated, zero_ungated
from fedsieve.core import gates
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.gates import GateAtTest
from fedsieve.core.random import server_sampler
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Clock, Layout

CLOCK = Clock(0, 10)
PLAIN = Layout(12, {"weight": (slice(0, 12), (12,))})
UNGATED = Layout(14, {"weight": (slice(0, 12), (12,))}, num_ungated=2)
GROUPED = Layout(12, {"weight": (slice(0, 12), (12,))}, groups=torch.arange(12) // 3)


def noise():
    return server_sampler(0, 0, 0, torch.float64)


def server_for(algorithm, layout=PLAIN, seed=3):
    """A server with random weights and gates."""
    source = torch.Generator().manual_seed(seed)
    weights, log_alpha = torch.randn(2, layout.size, generator=source, dtype=torch.float64)
    server = algorithm.init(layout, weights, noise())
    return server._replace(log_alpha=algorithm.normalize_log_alpha(3 * log_alpha, layout))


@pytest.mark.parametrize("algorithm", [Flops(), FlopsPA()])
def test_a_server_starts_at_the_given_weights_with_open_gates_and_no_multiplier(algorithm):
    server = algorithm.init(UNGATED, torch.arange(14.0, dtype=torch.float64), noise())
    assert torch.equal(server.weights, torch.arange(14.0, dtype=torch.float64))
    start = initial_log_alpha(algorithm.initial_gate_probability)
    assert (server.log_alpha[:12] - start).abs().max() < 0.5 and server.log_alpha[:12].std() > 0.01
    assert (server.log_alpha[12:] == 12).all()
    assert float(server.multiplier) == 0


def test_the_mean_of_log_alpha_is_the_logit_of_rho_init_within_its_limits():
    assert initial_log_alpha(0.95) == pytest.approx(2.9444, abs=1e-4)
    assert initial_log_alpha(1 - 1e-9) == 12 and initial_log_alpha(1e-9) == -12
    for wrong in (0.0, 1.0):
        with pytest.raises(ValueError, match="initial-gate-probability"):
            initial_log_alpha(wrong)


def test_ungated_coordinates_are_open_and_are_sent_as_zero():
    log_alpha = torch.arange(28.0).reshape(2, 14)
    assert open_ungated(log_alpha, UNGATED)[:, 12:].tolist() == [[12, 12], [12, 12]]
    assert zero_ungated(log_alpha, UNGATED)[:, 12:].tolist() == [[0, 0], [0, 0]]
    for change in (open_ungated, zero_ungated):
        assert torch.equal(change(log_alpha, UNGATED)[:, :12], log_alpha[:, :12])
        assert change(log_alpha[:, :12], PLAIN).data_ptr() == log_alpha.data_ptr()


def test_a_group_has_one_gate():
    flops = Flops()
    for log_alpha in (
        flops.initial_gates(GROUPED, noise()),
        flops.normalize_log_alpha(20 * torch.randn(12, generator=torch.Generator().manual_seed(1)), GROUPED),
    ):
        assert (log_alpha.view(4, 3) == log_alpha.view(4, 3)[:, :1]).all()
        assert len(log_alpha.unique()) > 2 and log_alpha.abs().max() <= 12
    sampled = flops.sample_gates(torch.zeros(12, dtype=torch.float64), GROUPED, noise(), "gates")
    assert (sampled.value.view(4, 3) == sampled.value.view(4, 3)[:, :1]).all()


@pytest.mark.parametrize("groups", [None, GROUPED.groups])
def test_the_penalty_is_the_gradient_of_constraint_and_entropy_summed_within_groups(groups):
    flops = Flops(entropy=0.3)
    phi = server_for(flops).log_alpha.clone()
    phi = phi if groups is None else flops.normalize_log_alpha(phi, GROUPED)
    tied = phi.clone().requires_grad_() if groups is None else phi[::3].clone().requires_grad_()
    p = gates.active_probability(flops.shape, tied if groups is None else tied.repeat_interleave(3))
    entropy = -(p * p.log() + (1 - p) * (1 - p).log()).sum()
    (expected,) = torch.autograd.grad(1.7 * p.sum() - 0.3 * entropy, tied)
    found = flops.penalty_gradient(phi, torch.tensor(1.7, dtype=torch.float64), 12, groups)
    torch.testing.assert_close(found if groups is None else found[::3], expected)


@pytest.mark.parametrize("layout", [PLAIN, UNGATED])
def test_the_multiplier_ascends_on_the_gap_of_the_gated_coordinates(layout):
    flops = Flops(dual_update=DualUpdate.ASCENT, dual_rate=0.8, exchanges=4, density=0.25)
    server = server_for(flops, layout)
    gap = float(gates.active_probability(flops.shape, server.log_alpha[:12]).mean()) - 0.25
    assert gap > 0
    found = flops.ascend(torch.tensor(2.0, dtype=torch.float64), server.log_alpha, layout, CLOCK)
    assert float(found) == pytest.approx(2.0 + 0.8 / 4 * gap)


@pytest.mark.parametrize("layout", [PLAIN, UNGATED])
def test_dual_updates_without_a_penalty_make_the_constraint_tight(layout):
    mirror, bisection = (Flops(dual_update=dual, density=0.25) for dual in (DualUpdate.MIRROR, DualUpdate.BISECTION))
    server = server_for(mirror, layout)
    moved, multiplier = mirror.mirror_dual_step(server.log_alpha, server.multiplier, layout, CLOCK)
    for _ in range(9):
        moved, multiplier = mirror.mirror_dual_step(moved, multiplier, layout, CLOCK)
    solved = bisection.solve_dual(server.log_alpha, layout, CLOCK)
    for found in (moved, solved):
        assert float(gates.active_probability(mirror.shape, found[:12]).mean()) == pytest.approx(0.25, rel=1e-3)
        assert (found[12:] == 12).all()
    torch.testing.assert_close(server.log_alpha[:12] - moved[:12], multiplier.expand(12))


def test_every_dual_update_leaves_the_state_of_the_others_alone():
    server = server_for(Flops())
    for dual in DualUpdate:
        flops = Flops(dual_update=dual)
        moved, multiplier = flops.mirror_dual_step(server.log_alpha, server.multiplier, PLAIN, CLOCK)
        assert (moved is server.log_alpha and multiplier is server.multiplier) == (dual is not DualUpdate.MIRROR)
        assert (flops.solve_dual(server.log_alpha, PLAIN, CLOCK) is server.log_alpha) == (dual is not DualUpdate.BISECTION)
        assert (flops.ascend(server.multiplier, server.log_alpha, PLAIN, CLOCK) is server.multiplier) == (dual is not DualUpdate.ASCENT)


def test_cooling_spreads_over_the_exchanges_of_a_round():
    """The logits of all gates are multiplied by the factor of the round, before the shift that makes the constraint tight."""
    annealed = {"density_schedule": DensitySchedule.CUBIC, "initial_density": 0.9, "anneal_end": 0.5, "density": 0.25}
    clock = Clock(6, 10)
    bisection = Flops(dual_update=DualUpdate.BISECTION, **annealed)
    mirror = Flops(dual_update=DualUpdate.MIRROR, exchanges=3, **annealed)
    log_alpha = 0.2 * server_for(bisection).log_alpha
    solved, moved = bisection.solve_dual(log_alpha, PLAIN, clock), log_alpha
    for _ in range(3):
        moved, _ = mirror.mirror_dual_step(moved, torch.tensor(0.0, dtype=torch.float64), PLAIN, clock)
    for found in (solved, moved):
        ratio = found.diff() / log_alpha.diff()
        torch.testing.assert_close(ratio, torch.full_like(ratio, 1000 ** (1 / 5)))


@pytest.mark.parametrize("kind", GateAtTest)
@pytest.mark.parametrize("layout", [PLAIN, UNGATED])
def test_diagnostics_are_those_of_the_gated_coordinates(kind, layout):
    flops = Flops(density=0.25, test_gate=kind)
    server = server_for(flops, layout)._replace(multiplier=torch.tensor(0.7))
    found, gated = flops.diagnostics(server), server.log_alpha[:12]
    p = gates.active_probability(flops.shape, gated)
    is_open = gates.compute_test_gates(flops.shape, gated, kind) > 0
    assert 0 < int(is_open.sum()) < 12
    expected = {"expected_density": p.mean(), "test_density": is_open.double().mean(), "multiplier": 0.7, "violation": p.mean() - 0.25}
    assert {name: float(value) for name, value in found.items()} == pytest.approx({name: float(value) for name, value in expected.items()})


@pytest.mark.parametrize("kind", GateAtTest)
@pytest.mark.parametrize("algorithm", [Flops(density=0.25), FlopsPA(density=0.25)])
def test_the_model_is_the_top_m_of_weight_times_test_gate(algorithm, kind):
    algorithm = replace(algorithm, test_gate=kind)
    server = server_for(algorithm, UNGATED)
    z = gates.compute_test_gates(algorithm.shape, server.log_alpha, kind)
    theta = server.weights * z
    torch.testing.assert_close(algorithm.unprojected_parameters(server), theta)
    top = (server.weights * z.clamp_min(1e-6))[:12].abs().topk(3).indices
    model = algorithm.parameters(server)
    assert set(model[:12].nonzero()[:, 0].tolist()) == set(top.tolist())
    torch.testing.assert_close(model[top], (server.weights * z.clamp_min(1e-6))[top])
    assert torch.equal(model[12:], server.weights[12:])
    mask = algorithm.top_mask(server.weights, server.log_alpha, UNGATED, Clock(9, 10))
    assert torch.equal(mask[:12], model[:12] != 0) and mask[12:].all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": 0.0}, "algorithm.temperature must be above 0"),
        ({"gate_rate": 0.0}, "algorithm.gate-rate must be above 0"),
        ({"gate_samples": 0}, "algorithm.gate-samples must be at least 1"),
        ({"initial_gate_probability": 0.0}, "algorithm.initial-gate-probability must be above 0"),
        ({"initial_gate_probability": 1.0}, "algorithm.initial-gate-probability must be below 1"),
        ({"dual_rate": -1.0}, "algorithm.dual-rate must be at least 0"),
        ({"log_alpha_scaling_rate": -1.0}, "algorithm.log-alpha-scaling-rate must be at least 0"),
        ({"entropy": -1.0}, "algorithm.entropy must be at least 0"),
        ({"scaling_start": 1.5}, "algorithm.scaling-start"),
        ({"stretch_low": 0.0}, "algorithm.stretch-low must be below 0"),
        ({"stretch_high": 1.0}, "algorithm.stretch-high above 1"),
        ({"local_steps": 0, "exchanges": 0}, "must be at least 1"),
    ],
)
def test_gates_that_cannot_work_are_refused(options, text):
    for algorithm in (Flops, FlopsPA):
        known = {name: value for name, value in options.items() if name in algorithm.option_names()}
        with pytest.raises(ValueError, match=text):
            algorithm(**known)


def test_options_at_their_limits_are_allowed():
    Flops(dual_rate=0.0, log_alpha_scaling_rate=0.0, entropy=0.0, scaling_start=1.0, gate_samples=1, exchanges=1)
    Flops(dual_update=DualUpdate.MIRROR, dual_rate=1.99, scaling_start=0.0)


def test_gates_start_closed_below_the_probability_at_which_the_test_gate_is_zero():
    assert not Flops(initial_gate_probability=0.95).all_gates_start_closed()
    assert Flops(initial_gate_probability=0.1).all_gates_start_closed()
    # sigmoid(phi) 1.2 - .1 = 0 at phi = -2.398, where rho_init is 1/12
    assert not Flops(initial_gate_probability=0.1, test_gate=GateAtTest.NO_TEMPERATURE).all_gates_start_closed()
    assert Flops(initial_gate_probability=0.08, test_gate=GateAtTest.NO_TEMPERATURE).all_gates_start_closed()


def test_the_report_marks_where_scaling_starts():
    assert Flops(scaling_start=0.25).milestones["prune start"] == 0.25
    annealed = Flops(density_schedule=DensitySchedule.CUBIC, initial_density=0.9)
    assert len(annealed.milestones) > len(Flops().milestones)
