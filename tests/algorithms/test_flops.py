"""FLoPS against autograd through the gates, and against the paper's own words."""

from dataclasses import replace
from math import prod

import pytest
import torch

from fedsieve.algorithms.flops import Flops
from fedsieve.core import gates
from fedsieve.core.aggregation import Aggregator
from fedsieve.core.constraint import ConstraintScale, DualUpdate
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling
from fedsieve.core.types import Batch, Clock, Reply
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import FederationConfig
from fedsieve.objectives.linear import Linear, Loss
from helpers.runs import small_run, train_run

OBJECTIVE = Linear(loss=Loss.SQUARED, num_features=12)
CLOCK = Clock(0, 10)


def draw(step=0, clients=(0,)):
    return client_sampler(0, 0, 0, step, list(clients), torch.float64)


def server_for(flops):
    noise = server_sampler(0, 0, 0, torch.float64)
    return flops.init(OBJECTIVE.layout, OBJECTIVE.initial_weights(noise) * 50, noise)


def draw_of_server():
    return server_sampler(0, 0, 0, torch.float64)


def batch(k=1, b=9):
    g = torch.Generator().manual_seed(6)
    return Batch(torch.randn(k, b, 12, generator=g, dtype=torch.float64), torch.randn(k, b, generator=g, dtype=torch.float64))


def test_client_gradients_are_those_of_autograd_through_the_gates():
    flops = Flops(gate_samples=3, initial_gate_probability=0.6)
    server = server_for(flops)
    rows = batch()
    packet = dense_packet({"weights": server.weights, "log_alpha": server.log_alpha}, 32, server_sampler(0, 0, 0, torch.float64))
    start = flops.client_init(packet, OBJECTIVE.layout, CLOCK, torch.float64)
    client = flops.client_step(OBJECTIVE, type(start)(*(part[None] for part in start)), rows, CLOCK, draw())
    weights, log_alpha = (part.clone().requires_grad_() for part in start)
    loss = 0
    for r in range(3):
        u = draw()(f"gates {r}", 12)[0]
        s = torch.sigmoid((torch.logit(u) + log_alpha) / 0.66)
        z = torch.clamp(s * 1.2 - 0.1, 0, 1)
        loss = loss + ((rows.x[0] @ (weights * z) - rows.y[0]) ** 2).mean() / 3
    by_weights, by_gates = torch.autograd.grad(loss, (weights, log_alpha))
    torch.testing.assert_close(client.weights[0], by_weights)
    torch.testing.assert_close(client.log_alpha[0], by_gates)


def test_a_step_rule_scales_both_gradients_by_its_step_size_over_the_learning_rate():
    constant, polyak = (Flops(step_rule=rule, bits=32) for rule in (StepRule.CONSTANT, StepRule.POLYAK))
    server, rows = server_for(constant), batch()
    start = constant.client_init(constant.broadcast(server, CLOCK, draw()), OBJECTIVE.layout, CLOCK, torch.float64)
    start = type(start)(*(part[None] for part in start))
    plain, scaled = (method.client_step(OBJECTIVE, start, rows, CLOCK, draw()) for method in (constant, polyak))
    ratio = scaled.weights / plain.weights
    torch.testing.assert_close(ratio, ratio[:, :1].expand(1, 12))
    torch.testing.assert_close(scaled.log_alpha, plain.log_alpha * ratio[:, :1])
    assert not torch.allclose(ratio, torch.ones_like(ratio))


def test_a_broadcast_has_weights_and_gates_and_zero_for_an_ungated_one():
    layout = Linear(loss=Loss.SQUARED, num_features=12, intercept=True).layout
    flops = Flops(bits=32)
    server = flops.init(layout, torch.arange(13.0, dtype=torch.float64), draw_of_server())
    packet = flops.broadcast(server, CLOCK, draw_of_server())
    assert float(packet.fields["log_alpha"].decode(torch.float64)[-1]) == 0
    client = flops.client_init(packet, layout, CLOCK, torch.float64)
    torch.testing.assert_close(client.log_alpha, server.log_alpha.float().double())
    assert torch.equal(client.weights, server.weights)


def test_a_reply_has_both_gradients():
    flops = Flops(bits=32)
    gradients = type(flops.client_init(flops.broadcast(server_for(flops), CLOCK, draw()), OBJECTIVE.layout, CLOCK, torch.float64))(
        torch.full((1, 12), 2.0), torch.full((1, 12), 3.0)
    )
    packet = flops.client_reply(gradients, CLOCK, draw())
    assert {*packet.fields, *packet.scalars} == flops.all_reply_fields
    assert packet.field_dense("gradient", torch.float64).unique().tolist() == [2.0]
    assert packet.field_dense("gate_gradient", torch.float64).unique().tolist() == [3.0]


def test_server_learning_rates_fall_for_weights_and_gates_alike():
    flops = Flops(server_optimizer=Optimizer.SGD, server_learning_rate=0.1, gate_rate=0.2, dual_update=DualUpdate.OFF, bits=32)
    server, ones = server_for(flops), torch.ones(12)
    replies = [Reply(0, dense_packet({"gradient": ones, "gate_gradient": ones}, 32, draw()), 1)]
    for clock in (Clock(0, 10), Clock(7, 10)):
        after = flops.aggregate(server, flops.broadcast(server, clock, draw()), replies, clock, draw())
        factor = flops.learning_rate_factor(clock)
        torch.testing.assert_close(server.weights - after.weights, torch.full((12,), 0.1 * factor, dtype=torch.float64))
        torch.testing.assert_close(server.log_alpha - after.log_alpha, torch.full((12,), 0.2 * factor, dtype=torch.float64))
    assert factor < 0.5


def test_robust_aggregation_is_of_the_gradients_themselves():
    flops = Flops(server_optimizer=Optimizer.SGD, server_learning_rate=0.1, aggregator=Aggregator.MEDIAN, bits=32)
    server, sent = server_for(flops), torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(1))
    replies = [Reply(k, dense_packet({"gradient": sent[k, 0], "gate_gradient": sent[k, 1]}, 32, draw()), 1) for k in range(3)]
    after = flops.aggregate(server, flops.broadcast(server, CLOCK, draw()), replies, CLOCK, draw())
    torch.testing.assert_close(after.weights, server.weights - 0.1 * sent[:, 0].median(0).values.double())


def test_momentum_of_weights_and_gates_is_kept_apart():
    flops = Flops(server_optimizer=Optimizer.MOMENTUM, server_learning_rate=0.1, gate_rate=0.1, dual_update=DualUpdate.OFF, bits=32)
    flops = replace(flops, final_learning_rate_fraction=1.0, server_momentum=0.5)
    begin = server = server_for(flops)
    replies = [Reply(0, dense_packet({"gradient": torch.ones(12), "gate_gradient": -2 * torch.ones(12)}, 32, draw()), 1)]
    for _ in range(2):
        server = flops.aggregate(server, flops.broadcast(server, CLOCK, draw()), replies, CLOCK, draw())
    moved, gates_moved = begin.weights - server.weights, begin.log_alpha - server.log_alpha
    torch.testing.assert_close(gates_moved, -2 * moved)
    torch.testing.assert_close(moved, torch.full_like(moved, 0.1 * (1 + 1.5)))


def test_one_sgd_update_of_all_three_variables_is_the_papers():
    """L138: theta~ - eta sum w_k g_k; phi - eta (sum w_k g_k + lambda grad L_con); lambda + eta L_con."""
    flops = Flops(
        server_optimizer=Optimizer.SGD,
        server_learning_rate=0.1,
        gate_rate=0.2,
        dual_rate=0.3,
        constraint_scale=ConstraintScale.MEAN,
        dual_update=DualUpdate.ASCENT,
        final_learning_rate_fraction=1.0,
        bits=32,
    )
    server = server_for(flops)._replace(multiplier=torch.tensor(2.0, dtype=torch.float64))
    g = torch.Generator().manual_seed(0)
    sent = torch.randn(2, 2, 12, generator=g, dtype=torch.float32)
    replies = [
        Reply(k, Packet(12, None, dense_packet({"gradient": sent[k, 0], "gate_gradient": sent[k, 1]}, 32, draw()).fields, {}), n)
        for k, n in enumerate((1, 3))
    ]
    after = flops.aggregate(server, flops.broadcast(server, CLOCK, draw()), replies, CLOCK, draw())
    mean = 0.25 * sent[0].double() + 0.75 * sent[1].double()
    p = gates.active_probability(flops.shape, server.log_alpha)
    torch.testing.assert_close(after.weights, server.weights - 0.1 * mean[0])
    torch.testing.assert_close(after.log_alpha, server.log_alpha - 0.2 * (mean[1] + 2.0 * p * (1 - p) / 12))
    torch.testing.assert_close(after.multiplier, 2.0 + 0.3 / 40 * (p.mean() - 0.05))


def test_scaling_begins_after_prune_start_and_pushes_the_top_up():
    flops = Flops(density=0.25, scaling_start=0.5)
    server = server_for(flops)
    early, late = flops.end_round(server, Clock(4, 10)), flops.end_round(server, Clock(5, 10))
    assert torch.equal(early.log_alpha, server.log_alpha)
    assert torch.equal(replace(flops, warmup=6).end_round(server, Clock(5, 10)).log_alpha, server.log_alpha)
    moved = late.log_alpha - server.log_alpha
    top = flops.importance(server.weights, server.log_alpha).topk(3).indices
    assert torch.allclose(moved[top], (12 - server.log_alpha[top]) / 5)  # of five rounds left
    assert int((moved < 0).sum()) == 9


def test_a_full_batch_is_one_exchange_an_epoch():
    assert Flops(batch_size="all", exchanges=20).workload.exchanges == 1
    assert Flops(exchanges=20).workload.exchanges == 20


def test_the_exact_dual_ends_every_round_at_the_target():
    flops = Flops(density=0.25, dual_update=DualUpdate.BISECTION, log_alpha_scaling=LogAlphaScaling.OFF)
    after = flops.end_round(server_for(flops), Clock(0, 10))
    torch.testing.assert_close(gates.active_probability(flops.shape, after.log_alpha).mean(), torch.tensor(0.25, dtype=torch.float64))


def densities_under(dual, start=0.95, rounds=20, steps=10, density=0.05):
    """Expected and test-time density over the target, without scaling, where twice as many weights matter as may stay."""
    falling = {"density_schedule": DensitySchedule.CUBIC, "initial_density": 0.98, "anneal_end": 0.8}
    gated = {"log_alpha_scaling": LogAlphaScaling.OFF, "gate_rate": 0.1, "initial_gate_probability": start}
    flops = Flops(dual_update=dual, exchanges=steps, batch_size=16, **gated, **falling)
    data = Synthetic(num_examples=400, num_features=200, true_density=0.1)
    federation = FederationConfig(clients=10, participation=0.4)
    settings = {"density": density, "rounds": rounds, "data": data, "federation": federation, "seed": 0}
    last = train_run(small_run("flops", algorithm=flops, **settings))[-1].metrics
    return last["expected_density"] / density, last["test_density"] / density


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize(
    ("dual", "start"),
    [(DualUpdate.MIRROR, 0.2), (DualUpdate.BISECTION, 0.95), pytest.param(DualUpdate.MIRROR, 0.95, marks=pytest.mark.long)],
)
def test_the_density_holds_without_scaling_below_the_true_one_too(dual, start):
    assert densities_under(dual, start) == pytest.approx((1.0, 1.0), rel=0.05)


@pytest.mark.usefixtures("few_test_rows")
def test_a_plain_ascent_does_not_hold_the_density():
    assert densities_under(DualUpdate.ASCENT, rounds=10)[0] > 1.5


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize(
    ("dual", "rounds", "steps"),
    [(DualUpdate.BISECTION, 5, 1), (DualUpdate.BISECTION, 7, 3), (DualUpdate.MIRROR, 5, 10), (DualUpdate.MIRROR, 10, 5)],
)
def test_gates_that_cool_in_few_rounds_do_not_outrun_the_dual(dual, rounds, steps):
    expected, open_gates = densities_under(dual, rounds=rounds, steps=steps)
    assert expected == pytest.approx(1.0, rel=0.05)
    assert open_gates == pytest.approx(1.0, rel=0.11)  # ten weights stay, or one more or fewer


def test_the_natural_multiplier_shifts_log_alpha_and_adds_no_gradient():
    flops = Flops(density=0.25, dual_update=DualUpdate.MIRROR, gate_rate=0.2, bits=32)
    server, still = server_for(flops), torch.zeros(12)
    replies = [Reply(0, dense_packet({"gradient": still, "gate_gradient": still}, 32, draw()), 1)]
    packet = flops.broadcast(server, CLOCK, draw())
    ends = [flops.aggregate(server._replace(multiplier=torch.tensor(m).double()), packet, replies, CLOCK, draw()) for m in (0.0, 3.0)]
    for end, began in zip(ends, (0.0, 3.0), strict=True):
        step = (end.multiplier - began).expand(12)
        torch.testing.assert_close(server.log_alpha - end.log_alpha, step)
        assert float(step[0]) > 1


@pytest.mark.parametrize("dual", [DualUpdate.BISECTION, DualUpdate.OFF])
def test_a_step_of_the_dual_is_refused_where_there_is_none(dual):
    with pytest.raises(ValueError, match=f"learning rate of an ascent, and algorithm.dual-update {dual} has none; leave out 0.1"):
        Flops(dual_update=dual, dual_rate=0.1)


@pytest.mark.parametrize("dual", [DualUpdate.MIRROR, DualUpdate.BISECTION, DualUpdate.OFF])
def test_the_scale_of_the_constraint_is_refused_without_a_multiplier(dual):
    with pytest.raises(ValueError, match=f"dual-update {dual} uses none"):
        Flops(dual_update=dual, constraint_scale=ConstraintScale.MEAN)


def test_a_natural_rate_that_cannot_converge_is_refused():
    with pytest.raises(ValueError, match=r"must be below 2 for algorithm.dual-update mirror, or its steps diverge; got 2"):
        Flops(dual_update=DualUpdate.MIRROR, dual_rate=2.0)


def test_gates_are_cooled_only_after_a_falling_target_is_reached():
    falling = Flops(dual_update=DualUpdate.MIRROR, density_schedule=DensitySchedule.CUBIC, anneal_end=0.5)
    assert [falling.cooling_factor(Clock(now, 10)) for now in range(5)] == [1.0] * 5
    assert prod(falling.cooling_factor(Clock(now, 10)) for now in range(10)) == pytest.approx(1000)
    assert prod(falling.cooling_factor(Clock(now, 7)) for now in range(7)) == pytest.approx(1000)
    assert replace(falling, warmup=8).cooling_factor(Clock(6, 10)) == 1.0
    assert {Flops(dual_update=DualUpdate.MIRROR).cooling_factor(Clock(now, 10)) for now in range(10)} == {1.0}


def test_a_kept_weight_is_never_zero_even_where_its_gate_is_closed():
    flops = Flops(density=0.5)
    server = server_for(flops)
    closed = server._replace(log_alpha=torch.full_like(server.log_alpha, -10.0))
    assert int((flops.parameters(closed) != 0).sum()) == 6
    assert (flops.unprojected_parameters(closed) == 0).all()
