"""FLoPS against autograd through the gates, and against the paper's own words."""

from dataclasses import replace
from math import prod

import pytest
import torch

from fedsieve.algorithms.flops import Flops
from fedsieve.core import gates
from fedsieve.core.constraint import Dual, Form
from fedsieve.core.optimizers import Optimizer
from fedsieve.core.packets import Packet, dense_packet
from fedsieve.core.random import drawer, server_drawer
from fedsieve.core.selection import Scaling, Schedule
from fedsieve.core.types import Batch, Clock, Reply
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import Federation, Run
from fedsieve.experiments.simulation import Problem
from fedsieve.experiments.training import execute
from fedsieve.objectives.linear import Linear, Loss

OBJECTIVE = Linear(loss=Loss.SQUARED, features=12)
CLOCK = Clock(0, 10)


def draw(step=0, clients=(0,)):
    return drawer(0, 0, 0, step, list(clients), torch.float64)


def server_for(flops):
    noise = server_drawer(0, 0, 0, torch.float64)
    return flops.init(OBJECTIVE.layout, OBJECTIVE.initial(noise) * 50, noise)


def batch(k=1, b=9):
    g = torch.Generator().manual_seed(6)
    return Batch(torch.randn(k, b, 12, generator=g, dtype=torch.float64), torch.randn(k, b, generator=g, dtype=torch.float64))


def test_client_gradients_are_those_of_autograd_through_the_gates():
    flops = Flops(samples=3, initial_logit_density=0.6)
    server = server_for(flops)
    rows = batch()
    packet = dense_packet({"weights": server.weights, "log_alpha": server.log_alpha}, 32, server_drawer(0, 0, 0, torch.float64))
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


def test_one_sgd_update_of_all_three_variables_is_the_papers():
    """L138: theta~ - eta sum w_k g_k; phi - eta (sum w_k g_k + lambda grad L_con); lambda + eta L_con."""
    flops = Flops(
        server=Optimizer.SGD,
        server_rate=0.1,
        gate_rate=0.2,
        dual_rate=0.3,
        constraint=Form.PAPER,
        dual=Dual.ASCENT,
        final_rate=1.0,
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
    flops = Flops(density=0.25, prune_start=0.5, scaling=Scaling.ADDITIVE, scaling_rate=0.5)
    server = server_for(flops)
    early, late = flops.close(server, Clock(4, 10)), flops.close(server, Clock(5, 10))
    assert torch.equal(early.log_alpha, server.log_alpha)
    moved = late.log_alpha - server.log_alpha
    top = flops.score(server.weights, server.log_alpha).topk(3).indices
    assert torch.allclose(moved[top], torch.tensor(0.5, dtype=torch.float64))
    assert int((moved < 0).sum()) == 9


def test_a_full_batch_is_one_exchange_an_epoch():
    assert Flops(batch="all", steps=20).exchanges == 1
    assert Flops(steps=20).exchanges == 20


def test_the_exact_dual_ends_every_round_at_the_target():
    flops = Flops(density=0.25, dual=Dual.EXACT, scaling=Scaling.OFF)
    after = flops.close(server_for(flops), Clock(0, 10))
    torch.testing.assert_close(gates.active_probability(flops.shape, after.log_alpha).mean(), torch.tensor(0.25, dtype=torch.float64))


def densities_under(dual, start=0.95, rounds=20, steps=10, density=0.05):
    """Expected and test-time density over the target, without scaling, where twice as many weights matter as may stay."""
    falling = {"schedule": Schedule.CUBIC, "start_density": 0.98, "schedule_end": 0.8}
    gated = {"scaling": Scaling.OFF, "gate_rate": 0.1, "initial_logit_density": start}
    flops = Flops(dual=dual, steps=steps, batch=16, **gated, **falling)
    data = Synthetic(rows=400, features=200, true_density=0.1)
    federation = Federation(clients=10, participation=0.4)
    run = Run(task="lr", method="flops", density=density, rounds=rounds, data=data, federation=federation, algorithm=flops)
    last = list(execute(run, Problem(run)))[-1].row
    return last["expected_density"] / density, last["test_density"] / density


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize(("dual", "start"), [(Dual.NATURAL, 0.95), (Dual.NATURAL, 0.2), (Dual.EXACT, 0.95)])
def test_the_density_holds_without_scaling_below_the_true_one_too(dual, start):
    assert densities_under(dual, start) == pytest.approx((1.0, 1.0), rel=0.05)


@pytest.mark.usefixtures("few_test_rows")
def test_a_plain_ascent_does_not_hold_the_density():
    assert densities_under(Dual.ASCENT, rounds=10)[0] > 1.5


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize(
    ("dual", "rounds", "steps"), [(Dual.EXACT, 5, 1), (Dual.EXACT, 7, 3), (Dual.NATURAL, 5, 10), (Dual.NATURAL, 10, 5)]
)
def test_gates_that_cool_in_few_rounds_do_not_outrun_the_dual(dual, rounds, steps):
    expected, open_gates = densities_under(dual, rounds=rounds, steps=steps)
    assert expected == pytest.approx(1.0, rel=0.05)
    assert open_gates == pytest.approx(1.0, rel=0.11)  # ten weights stay, or one more or fewer


def test_the_natural_multiplier_is_taken_from_log_alpha_and_does_not_weigh_on_its_gradient_too():
    flops = Flops(density=0.25, dual=Dual.NATURAL, gate_rate=0.2, bits=32)
    server, still = server_for(flops), torch.zeros(12)
    replies = [Reply(0, dense_packet({"gradient": still, "gate_gradient": still}, 32, draw()), 1)]
    packet = flops.broadcast(server, CLOCK, draw())
    ends = [flops.aggregate(server._replace(multiplier=torch.tensor(m).double()), packet, replies, CLOCK, draw()) for m in (0.0, 3.0)]
    for end, began in zip(ends, (0.0, 3.0), strict=True):
        step = (end.multiplier - began).expand(12)
        torch.testing.assert_close(server.log_alpha - end.log_alpha, step)
        assert float(step[0]) > 1


@pytest.mark.parametrize("dual", [Dual.EXACT, Dual.OFF])
def test_a_step_of_the_dual_is_refused_where_there_is_none(dual):
    with pytest.raises(ValueError, match=f"step of an ascent, and dual {dual} has none; leave 0.1 out"):
        Flops(dual=dual, dual_rate=0.1)


@pytest.mark.parametrize("dual", [Dual.NATURAL, Dual.EXACT, Dual.OFF])
def test_how_a_multiplier_weighs_on_gates_is_refused_where_none_does(dual):
    with pytest.raises(ValueError, match=f"with dual {dual} none does"):
        Flops(dual=dual, constraint=Form.PAPER)


def test_a_natural_rate_that_cannot_converge_is_refused():
    with pytest.raises(ValueError, match="must be below 2, or steps overshoot more and more; got 2"):
        Flops(dual=Dual.NATURAL, dual_rate=2.0)


def test_gates_are_cooled_a_thousandfold_after_a_falling_target_is_reached_and_never_on_a_constant_one():
    falling = Flops(dual=Dual.NATURAL, schedule=Schedule.CUBIC, schedule_end=0.5)
    assert [falling.cooling(Clock(now, 10)) for now in range(5)] == [1.0] * 5
    assert prod(falling.cooling(Clock(now, 10)) for now in range(10)) == pytest.approx(1000)
    assert prod(falling.cooling(Clock(now, 7)) for now in range(7)) == pytest.approx(1000)
    assert replace(falling, warmup=8).cooling(Clock(6, 10)) == 1.0
    assert {Flops(dual=Dual.NATURAL).cooling(Clock(now, 10)) for now in range(10)} == {1.0}


def test_a_kept_weight_is_never_zero_even_where_its_gate_is_closed():
    flops = Flops(density=0.5)
    server = server_for(flops)
    closed = server._replace(log_alpha=torch.full_like(server.log_alpha, -10.0))
    assert int((flops.theta(closed) != 0).sum()) == 6
    assert (flops.full_theta(closed) == 0).all()
