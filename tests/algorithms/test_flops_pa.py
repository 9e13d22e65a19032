"""FLoPS-PA: the message of L171, both forms, and the server's averages."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from fedsieve.algorithms.flops_pa import (
    Client,
    DualLocation,
    FlopsPA,
    GateEncoding,
    GateInverse,
    GateNoise,
    clip_received_gates,
    mean_off_support,
)
from fedsieve.core import gates
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.quantization import quantize
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling
from fedsieve.core.types import Batch, Clock, Reply
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import FederationConfig
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.sparse_training import make_client_engine
from helpers.runs import small_run, train_run

OBJECTIVE = Linear(loss=Loss.SQUARED, num_features=40)
CLOCK = Clock(3, 10)
PLAIN = FlopsPA(
    density=0.1,
    bits=32,
    log_alpha_scaling=LogAlphaScaling.OFF,
    gate_encoding=GateEncoding.GATES,
    message_gate_noise=GateNoise.DETERMINISTIC,
    density_schedule=DensitySchedule.CONSTANT,
)


def noise():
    return server_sampler(0, 3, 0, torch.float64)


def state(k=3):
    g = torch.Generator().manual_seed(9)
    return torch.randn(k, 40, generator=g, dtype=torch.float64), torch.randn(k, 40, generator=g, dtype=torch.float64)


def stack_noise(k=3):
    return client_sampler(0, 3, 0, 0, list(range(k)), torch.float64)


def decode_message(method, packet):
    """theta~ and z (or log_alpha) of a message, as full vectors."""
    default = packet.scalars["default_gate"].to(torch.float64)
    return packet.field_dense("weights", torch.float64), packet.field_dense(method.gate_field, torch.float64, default)


def test_a_message_carries_the_top_m_their_gates_and_the_mean_of_the_other_gates():
    weights, log_alpha = state()
    packet = PLAIN.encode_message(weights, log_alpha, OBJECTIVE.layout, CLOCK, stack_noise())
    z = gates.compute_test_gates(PLAIN.shape, log_alpha)
    score = (weights * z.clamp_min(1e-6)).abs()
    for k in range(3):
        top = score[k].topk(4).indices.sort().values
        assert torch.equal(packet.support[k], top)
        torch.testing.assert_close(packet.fields["weights"].decode(torch.float64)[k], weights[k, top].float().double())
        torch.testing.assert_close(packet.fields["gates"].decode(torch.float64)[k], z[k, top].float().double())
        rest = torch.ones(40, dtype=torch.bool).index_fill(0, top, False)
        assert float(packet.scalars["default_gate"][k]) == pytest.approx(float(z[k, rest].mean()), rel=1e-6)


@pytest.mark.parametrize("message", GateEncoding)
def test_receiving_undoes_sending_at_the_support(message):
    method = replace(PLAIN, gate_inverse=GateInverse.EXACT, gate_encoding=message)
    weights, log_alpha = state()
    log_alpha = log_alpha.clamp(-1.5, 1.5)
    packet = method.encode_message(weights, log_alpha, OBJECTIVE.layout, CLOCK, stack_noise())
    got_weights, got = decode_message(method, packet)
    at = packet.support
    torch.testing.assert_close(got_weights.gather(-1, at), weights.gather(-1, at), rtol=1e-6, atol=0)
    torch.testing.assert_close(method.log_alpha_from(got).gather(-1, at), log_alpha.gather(-1, at), rtol=1e-5, atol=1e-6)
    assert (got_weights != 0).sum(-1).tolist() == [4, 4, 4]


@pytest.mark.parametrize("rule", StepRule)
@pytest.mark.parametrize("kind", GateNoise)
def test_a_clip_above_all_norms_changes_no_bit_of_a_step(kind, rule):
    """A step along the gradient as it is, and one with all options looked at."""
    weights, log_alpha = state()
    g = torch.Generator().manual_seed(4)
    rows, smooth = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((3, 8, 40), (3, 8))), torch.tensor([9.0, 1e3, 50.0])
    batch, client = Batch(*rows, smooth.double()), Client(weights, log_alpha, torch.tensor([0.0, 0.5, 3.0]).double(), OBJECTIVE.layout)
    plain = replace(PLAIN, local_gate_noise=kind, step_rule=rule, learning_rate=0.01)
    steps = [
        method.client_step(OBJECTIVE, client, batch, CLOCK, stack_noise()) for method in (plain, replace(plain, max_gradient_norm=1e9))
    ]
    assert torch.equal(steps[0].weights, steps[1].weights) and torch.equal(steps[0].log_alpha, steps[1].log_alpha)
    assert not torch.equal(steps[0].weights, weights)


def test_the_server_averages_theta_and_z_and_divides():
    """L183-186: theta = sum w theta_k, z = sum w z_k, theta~ = theta / z."""
    method = replace(PLAIN, residual_decay=0.0, client_weighting=ClientWeighting.EXAMPLES, dual_update=DualUpdate.OFF)
    weights, log_alpha = state(2)
    packets = method.encode_message(weights, log_alpha, OBJECTIVE.layout, CLOCK, stack_noise(2))
    replies = [Reply(k, packets.unstack()[k], n) for k, n in enumerate((1, 3))]
    server = method.init(OBJECTIVE.layout, torch.ones(40, dtype=torch.float64), noise())
    after = method.aggregate(server, method.broadcast(server, CLOCK, noise()), replies, CLOCK, noise())
    pairs = [decode_message(method, reply.packet) for reply in replies]
    theta = sum(w * (t * z.clamp_min(1e-6)) for w, (t, z) in zip((0.25, 0.75), pairs, strict=True))
    z = sum(w * z for w, (_, z) in zip((0.25, 0.75), pairs, strict=True))
    torch.testing.assert_close(after.theta, theta)
    torch.testing.assert_close(after.weights, theta / z)
    torch.testing.assert_close(after.log_alpha, method.log_alpha_from(z))


def test_the_server_keeps_the_residual_of_its_broadcast():
    method = replace(PLAIN, residual_decay=0.9, dual_update=DualUpdate.OFF)
    weights = torch.linspace(1, 40, 40, dtype=torch.float64)
    server = method.init(OBJECTIVE.layout, weights, noise())
    packet = method.broadcast(server, CLOCK, noise())
    after = method.aggregate(server, packet, [Reply(0, packet, 1)], CLOCK, noise())
    outside = torch.ones(40, dtype=torch.bool).index_fill(0, packet.support, False)
    torch.testing.assert_close(after.theta[outside], 0.9 * server.theta[outside])


def test_the_rest_gate_never_locks_the_support():
    weights, _ = state(1)
    packet = PLAIN.encode_message(weights, torch.full_like(weights, -9.0), OBJECTIVE.layout, CLOCK, stack_noise(1))
    assert float(packet.scalars["default_gate"][0]) == pytest.approx(PLAIN.min_default_gate)


def test_the_multiplier_is_broadcast_only_while_it_is_ascended():
    server = PLAIN.init(OBJECTIVE.layout, torch.ones(40, dtype=torch.float64), noise())
    for dual in (DualUpdate.ASCENT, DualUpdate.BISECTION, DualUpdate.OFF):
        sent = replace(PLAIN, dual_update=dual).broadcast(server, CLOCK, noise()).scalars
        assert ("multiplier" in sent) == (dual is DualUpdate.ASCENT)


LOCAL = replace(PLAIN, dual_location=DualLocation.CLIENT, dual_rate=6.0, gate_rate=0.5, local_steps=3, final_learning_rate_fraction=1.0)


def open_probability(phi):
    """P(z != 0) = 1 / (1 + exp(-(phi - beta' log(-gamma / zeta)))) (L126)."""
    return 1 / (1 + exp(-phi - 0.66 * log(11)))


def test_a_client_solves_its_own_constrained_problem():
    """L128, by hand: without examples, phi <- phi - eta lambda P (1 - P), and lambda <- lambda + eta_lambda (P - rho), or 0 if P < rho.

    All gates of a client are equal, so P is also the mean. The first client violates its constraint, the second satisfies it.
    """
    phi = [1.0, -6.0]
    client = Client(
        torch.zeros(2, 40, dtype=torch.float64),
        torch.tensor(phi, dtype=torch.float64)[:, None].expand(2, 40).clone(),
        torch.tensor([0.25, 0.25], dtype=torch.float64),
        OBJECTIVE.layout,
    )
    multiplier, batch = [0.25, 0.25], Batch(torch.zeros(2, 8, 40, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64))
    for _ in range(3):
        client = LOCAL.client_step(OBJECTIVE, client, batch, CLOCK, stack_noise(2))
        for k in range(2):
            p = open_probability(phi[k])
            phi[k] -= 0.5 * multiplier[k] * p * (1 - p)
            multiplier[k] = multiplier[k] + 6.0 / 3 * (p - 0.1) if p > 0.1 else 0.0
    assert client.multiplier.tolist() == pytest.approx(multiplier, rel=1e-12)
    assert client.log_alpha[:, 7].tolist() == pytest.approx(phi, rel=1e-12)
    assert multiplier[0] > 4 and multiplier[1] == 0


def test_the_server_averages_the_multipliers_of_the_clients_and_sends_the_mean():
    weights, log_alpha = state(2)
    client = Client(weights, log_alpha, torch.tensor([0.5, 2.0], dtype=torch.float64), OBJECTIVE.layout)
    packets = LOCAL.client_reply(client, CLOCK, stack_noise(2)).unstack()
    server = LOCAL.init(OBJECTIVE.layout, torch.ones(40, dtype=torch.float64), noise())
    replies = [Reply(k, packets[k], n) for k, n in enumerate((1, 3))]
    after = LOCAL.aggregate(server, LOCAL.broadcast(server, CLOCK, noise()), replies, CLOCK, noise())
    assert float(after.multiplier) == pytest.approx(0.25 * 0.5 + 0.75 * 2.0)
    start = LOCAL.client_init(LOCAL.broadcast(after, CLOCK, noise()), OBJECTIVE.layout, CLOCK, torch.float64)
    assert float(start.multiplier) == pytest.approx(1.625)


def test_a_client_keeps_its_multiplier_between_its_rounds():
    weights, log_alpha = state(2)
    client = Client(weights, log_alpha, torch.tensor([0.5, 2.0], dtype=torch.float64), OBJECTIVE.layout)
    kept = LOCAL.engine_support.memory.after_reply(client, LOCAL.client_reply(client, CLOCK, stack_noise(2)))
    assert kept["multiplier"].tolist() == [0.5, 2.0]
    assert PLAIN.engine_support.memory is None


def test_a_multiplier_of_each_client_needs_an_ascent_and_dense_examples():
    with pytest.raises(ValueError, match=r"dual-location client .* use --algorithm\.dual-update ascent"):
        replace(LOCAL, dual_rate=None, dual_update=DualUpdate.BISECTION)
    sparse = ClientData(csr_matrix(np.eye(40)), torch.zeros(40), [40], OBJECTIVE, 4)
    with pytest.raises(ValueError, match=r"algorithm\.dual-location client needs all gates in every local step, and with sparse examples"):
        make_client_engine(RunContext(algorithm=LOCAL, objective=OBJECTIVE, seed=0, fingerprint=1), sparse)


def test_an_ascent_on_every_gate_is_refused_where_messages_name_a_few():
    with pytest.raises(
        ValueError, match="mirror needs every gate, and messages of flops-pa contain only some; use bisection, or algorithm flops"
    ):
        replace(PLAIN, dual_update=DualUpdate.MIRROR)


def test_log_alpha_beyond_the_limit_of_replies_is_refused_in_messages_only():
    with pytest.raises(ValueError, match=r"algorithm.log-alpha-limit must be at most 12 if messages contain log_alpha"):
        replace(PLAIN, gate_encoding=GateEncoding.LOG_ALPHA, log_alpha_limit=13.0)
    assert replace(PLAIN, log_alpha_limit=13.0).log_alpha_limit == 13.0


def test_bisection_makes_the_constraint_on_aggregated_gates_tight():
    method = replace(PLAIN, dual_update=DualUpdate.BISECTION, gate_encoding=GateEncoding.LOG_ALPHA)
    weights, log_alpha = state(1)
    client, layout = Client(weights, log_alpha, torch.zeros(1, dtype=torch.float64), OBJECTIVE.layout), OBJECTIVE.layout
    server = method.init(layout, weights[0], noise())
    replies = [Reply(0, method.client_reply(client, CLOCK, stack_noise(1)).unstack()[0], 1)]
    after = method.aggregate(server, method.broadcast(server, CLOCK, noise()), replies, CLOCK, noise())
    assert float(gates.active_probability(method.shape, after.log_alpha).mean()) == pytest.approx(0.1, abs=1e-4)


def test_a_literal_message_at_fully_open_gates_stays_finite():
    """E1: z = 1 makes the paper's log_alpha infinite; the clamp keeps the round trip finite."""
    method = replace(PLAIN, gate_inverse=GateInverse.PAPER)
    weights, _ = state(1)
    packet = method.encode_message(weights, torch.full_like(weights, 12.0), OBJECTIVE.layout, CLOCK, stack_noise(1))
    _, gate = decode_message(method, packet)
    assert method.log_alpha_from(gate).isfinite().all()


def test_both_sides_scale_before_every_message():
    """L171, L186: clients scale log_alpha before they reply and the server after it averages, up at the top m and down elsewhere."""
    method = replace(PLAIN, log_alpha_scaling=LogAlphaScaling.LINEAR, scaling_start=0.0, gate_encoding=GateEncoding.LOG_ALPHA)
    weights, log_alpha = state(1)
    clock, layout = Clock(9, 10), OBJECTIVE.layout
    client = Client(weights, log_alpha, torch.zeros(1, dtype=torch.float64), layout)
    reply, at = (packet := method.client_reply(client, clock, stack_noise(1))).unstack()[0], packet.support
    halfway = (log_alpha.gather(-1, at) + 12) / 2  # two scalings are left in the last round
    torch.testing.assert_close(packet.fields["log_alpha"].decode(torch.float64), halfway.float().double())
    outside = torch.ones(40, dtype=torch.bool).index_fill(0, at[0], False)
    assert float(packet.scalars["default_gate"][0]) == pytest.approx(float(log_alpha[0, outside].mean() - 12) / 2, rel=1e-5)
    server = method.init(layout, weights[0], noise())
    after = method.aggregate(server, method.broadcast(server, clock, noise()), [Reply(0, reply, 1)], clock, noise())
    assert after.log_alpha.sort().values.tolist() == [-12.0] * 36 + [12.0] * 4


@pytest.mark.parametrize(("clock", "warmup", "scaled"), [((4, 10), 0, False), ((5, 10), 0, True), ((7, 10), 8, False), ((8, 10), 8, True)])
def test_log_alpha_is_scaled_in_replies_only_after_prune_start_and_warm_up(clock, warmup, scaled):
    """L155-157, L199: (1 + r) log_alpha at the top m and (1 - r) log_alpha elsewhere, not before the start of scaling."""
    literal = {"log_alpha_scaling": LogAlphaScaling.LITERAL, "log_alpha_scaling_rate": 0.1}
    method = replace(PLAIN, gate_encoding=GateEncoding.LOG_ALPHA, scaling_start=0.5, warmup=warmup, **literal)
    weights, log_alpha = state()
    packet = method.client_reply(Client(weights, log_alpha, torch.zeros(3).double(), OBJECTIVE.layout), Clock(*clock), stack_noise())
    support = torch.arange(40).expand(3, -1) if packet.support is None else packet.support
    inside = log_alpha.gather(-1, support)
    torch.testing.assert_close(packet.fields["log_alpha"].decode(torch.float64), inside * (1.1 if scaled else 1.0), rtol=1e-5, atol=1e-6)
    assert (support.shape[-1] == 40) == (clock[0] < warmup)
    if support.shape[-1] < 40:
        rest = (log_alpha.sum(-1) - inside.sum(-1)) / (40 - support.shape[-1]) * (0.9 if scaled else 1.0)
        torch.testing.assert_close(packet.scalars["default_gate"], rest.float(), rtol=1e-4, atol=1e-5)


def test_a_round_is_one_exchange_after_all_local_steps():
    """L171: one communication an epoch."""
    workload = replace(PLAIN, local_steps=7, batch_size=5).workload
    assert (workload.exchanges, workload.local_steps, workload.batch_size) == (1, 7, 5)
    assert replace(PLAIN, batch_size="all").workload.batch_size is None


@pytest.mark.parametrize(("samples", "entropy"), [(1, 0.0), (3, 0.0), (1, 0.2)])
@pytest.mark.parametrize("kind", GateNoise)
def test_a_local_step_is_that_of_sgd_on_the_local_lagrangian(kind, samples, entropy):
    """L196-198: theta~ - eta g, phi - eta_phi (g + lambda grad L_con), with gradients of autograd through the gates."""
    fixed = {"step_rule": StepRule.CONSTANT, "learning_rate": 0.05, "gate_rate": 0.2, "final_learning_rate_fraction": 1.0}
    method = replace(PLAIN, local_gate_noise=kind, gate_samples=samples, entropy=entropy, **fixed)
    weights, log_alpha = state(1)
    g = torch.Generator().manual_seed(4)
    batch = Batch(*(torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((1, 8, 40), (1, 8))))
    after = method.client_step(
        OBJECTIVE, Client(weights, log_alpha, torch.tensor([0.5]).double(), OBJECTIVE.layout), batch, CLOCK, stack_noise(1)
    )
    theta, phi = weights[0].clone().requires_grad_(), log_alpha[0].clone().requires_grad_()
    loss = 0
    for r in range(samples):
        u = stack_noise(1)(f"gates {r}", 40)[0] if kind is GateNoise.SAMPLED else torch.full((40,), 0.5, dtype=torch.float64)
        z = torch.clamp(torch.sigmoid((torch.logit(u) + phi) / 0.66) * 1.2 - 0.1, 0, 1)
        loss = loss + ((batch.x[0] @ (theta * z) - batch.y[0]) ** 2).mean() / samples
    p = gates.active_probability(method.shape, phi)
    lagrangian = loss + 0.5 * p.sum() + entropy * (p * p.log() + (1 - p) * (1 - p).log()).sum()
    by_theta, by_phi = torch.autograd.grad(lagrangian, (theta, phi))
    torch.testing.assert_close(after.weights[0], weights[0] - 0.05 * by_theta)
    torch.testing.assert_close(after.log_alpha[0], log_alpha[0] - 0.2 * by_phi)


@pytest.mark.parametrize("size", [40, 100])
def test_the_default_gate_is_the_mean_over_all_coordinates_that_a_message_leaves_out(size):
    """A vector restricted to seen features ends with the value of all unseen ones."""
    values = state(2)[0]
    support = torch.tensor([[0, 5, 9], [1, 2, 38]])
    whole = torch.cat((values, values[:, -1:].expand(-1, size - 40)), dim=1)
    outside = torch.ones(2, size, dtype=torch.bool).scatter_(1, support, False)
    expected = torch.stack([row[mask].mean() for row, mask in zip(whole, outside, strict=True)])
    torch.testing.assert_close(mean_off_support(values, support, size), expected)
    assert mean_off_support(values, torch.arange(40).expand(2, -1), 40).tolist() == [0, 0]


WITH_INTERCEPT = Linear(loss=Loss.SQUARED, num_features=40, intercept=True).layout


@pytest.mark.parametrize("encoding", GateEncoding)
def test_an_intercept_is_in_every_message_with_an_open_gate(encoding):
    method = replace(PLAIN, gate_encoding=encoding)
    server = method.init(WITH_INTERCEPT, torch.linspace(2, 1, 41, dtype=torch.float64), noise())
    packet = method.broadcast(server, CLOCK, noise())
    assert packet.support.tolist() == [0, 1, 2, 3, 40]
    sent = packet.fields[method.gate_field].decode(torch.float64)[-1]
    assert float(sent) == (1.0 if encoding is GateEncoding.GATES else 0.0)
    client = method.client_init(packet, WITH_INTERCEPT, CLOCK, torch.float64)
    assert float(client.log_alpha[-1]) == 12
    after = method.aggregate(server, packet, [Reply(0, packet, 1)], CLOCK, noise())
    assert float(after.log_alpha[-1]) == 12
    torch.testing.assert_close(after.weights[-1], server.weights[-1], rtol=1e-6, atol=0)


def test_received_gates_are_not_below_the_margin_and_ungated_ones_are_one():
    found = clip_received_gates(torch.tensor([0.0, 0.5] * 20 + [0.3]), WITH_INTERCEPT)
    assert found[:2].tolist() == pytest.approx([1e-6, 0.5]) and float(found[-1]) == 1.0


@pytest.mark.parametrize("inverse", GateInverse)
def test_log_alpha_of_a_received_gate_is_the_inverse_within_the_limits(inverse):
    method = replace(PLAIN, gate_inverse=inverse)
    gate = torch.tensor([1e-9, 0.2, 0.5, 0.9, 1 - 1e-9], dtype=torch.float64)
    invert = gates.paper_inverse if inverse is GateInverse.PAPER else gates.exact_inverse
    torch.testing.assert_close(method.log_alpha_from(gate), invert(method.shape, gate).clamp(-12, 12))
    assert torch.equal(replace(method, gate_encoding=GateEncoding.LOG_ALPHA).log_alpha_from(gate), gate)


@pytest.mark.parametrize("encoding", GateEncoding)
def test_theta_of_a_new_server_is_its_weights_times_their_gates(encoding):
    """With gates in messages theta = theta~ z; with log_alpha in messages theta~ itself is averaged."""
    method = replace(PLAIN, gate_encoding=encoding)
    server = method.init(OBJECTIVE.layout, torch.linspace(1, 2, 40, dtype=torch.float64), noise())
    z = gates.compute_test_gates(method.shape, server.log_alpha)
    torch.testing.assert_close(server.theta, server.weights * (z if encoding is GateEncoding.GATES else 1.0))


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.MOMENTUM])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_server_steps_from_what_it_sent_towards_the_mean_and_adds_the_residual(optimizer, decay):
    method = replace(
        PLAIN, residual_decay=decay, server_optimizer=optimizer, server_learning_rate=0.5, gate_encoding=GateEncoding.LOG_ALPHA
    )
    server = method.init(OBJECTIVE.layout, torch.linspace(1, 40, 40, dtype=torch.float64), noise())
    packet = method.broadcast(server, CLOCK, noise())
    reply = packet._replace(fields=packet.fields | {"weights": packet.fields["weights"]._replace(codes=torch.ones(4))})
    after = method.aggregate(server, packet, [Reply(0, reply, 1)], CLOCK, noise())
    sent = packet.restrict(server.theta)
    mean = packet.restrict(torch.ones_like(server.theta))
    torch.testing.assert_close(after.theta, sent + 0.5 * (mean - sent) + decay * (server.theta - sent))
    assert torch.equal(after.weights, after.theta)


def test_a_reply_has_the_fields_it_announces():
    weights, log_alpha = state()
    client = Client(weights, log_alpha, torch.zeros(3).double(), OBJECTIVE.layout)
    for encoding in GateEncoding:
        method = replace(PLAIN, gate_encoding=encoding)
        packet = method.client_reply(client, CLOCK, stack_noise())
        assert {*packet.fields, *packet.scalars} == method.all_reply_fields


@pytest.mark.parametrize("dual", [DualUpdate.ASCENT, DualUpdate.OFF])
def test_a_client_starts_from_the_multiplier_of_the_broadcast(dual):
    method = replace(PLAIN, dual_update=dual)
    server = method.init(OBJECTIVE.layout, torch.ones(40, dtype=torch.float64), noise())._replace(multiplier=torch.tensor(0.75).double())
    client = method.client_init(method.broadcast(server, CLOCK, noise()), OBJECTIVE.layout, CLOCK, torch.float64)
    assert float(client.multiplier) == (0.75 if dual is DualUpdate.ASCENT else 0.0)


def test_message_gates_are_sampled_or_medians_as_set():
    weights, log_alpha = state(1)
    client = Client(weights, log_alpha, torch.zeros(1).double(), OBJECTIVE.layout)
    for kind in GateNoise:
        packet = replace(PLAIN, message_gate_noise=kind).client_reply(client, CLOCK, stack_noise(1))
        u = stack_noise(1)("message gates", 40) if kind is GateNoise.SAMPLED else torch.full((1, 40), 0.5, dtype=torch.float64)
        z = gates.sample(PLAIN.shape, log_alpha, u).value.gather(-1, packet.support)
        torch.testing.assert_close(packet.fields["gates"].decode(torch.float64), z.float().double())


def test_weights_in_no_message_are_equal_only_if_messages_contain_log_alpha():
    assert replace(PLAIN, gate_encoding=GateEncoding.LOG_ALPHA).engine_support.unseen_weights_are_equal
    assert not PLAIN.engine_support.unseen_weights_are_equal
    assert PLAIN.engine_support.fused_step is not None
    assert replace(PLAIN, gate_samples=2).engine_support.fused_step is None
    assert replace(PLAIN, entropy=0.1).engine_support.fused_step is None


@pytest.mark.parametrize("kind", GateNoise)
def test_a_step_in_place_is_the_local_step(kind):
    method = replace(PLAIN, local_gate_noise=kind, step_rule=StepRule.CONSTANT, learning_rate=0.05)
    weights, log_alpha = state(1)
    client = Client(weights, log_alpha, torch.tensor([0.5]).double(), OBJECTIVE.layout)
    g = torch.Generator().manual_seed(4)
    rows = Batch(*(torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((1, 8, 40), (1, 8))))
    expected = method.client_step(OBJECTIVE, client, rows, CLOCK, stack_noise(1))
    changed = client._replace(weights=weights.clone(), log_alpha=log_alpha.clone())
    assert method.engine_support.fused_step(OBJECTIVE, changed, torch.arange(40), rows, CLOCK, stack_noise(1))
    torch.testing.assert_close(changed.weights, expected.weights)
    torch.testing.assert_close(changed.log_alpha, expected.log_alpha)


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize(
    "recipe",
    [
        {
            "gate_encoding": GateEncoding.GATES,
            "message_gate_noise": GateNoise.SAMPLED,
            "gate_inverse": GateInverse.PAPER,
        }
        | {
            "log_alpha_scaling": LogAlphaScaling.LITERAL,
            "log_alpha_scaling_rate": 0.1,
            "initial_gate_probability": 0.5,
            "learning_rate": 1.0,
        },
        {
            "gate_encoding": GateEncoding.GATES,
            "message_gate_noise": GateNoise.DETERMINISTIC,
            "local_gate_noise": GateNoise.DETERMINISTIC,
            "gate_inverse": GateInverse.EXACT,
            "min_default_gate": 0.3,
            "gate_rate": 0.05,
        },
        {},
    ],
    ids=["A", "B", "default"],
)
def test_every_recipe_recovers_a_sparse_truth(recipe):
    """Decision E9: on an easy regression all recipes that run find every true weight."""
    data = Synthetic(num_examples=2000, num_features=100, true_density=0.05)
    settings = {"rounds": 15, "density": 0.05, "seed": 1, "data": data, "federation": FederationConfig(clients=20, participation=0.25)}
    last = train_run(small_run("flops-pa", algorithm=FlopsPA(**recipe), **settings))[-1].metrics
    assert last["tdr"] == 1.0
    assert last["r2"] > 0.93


@pytest.mark.parametrize(("bits", "log_alpha_bits"), [(32, 32), (16, 16), (8, 4), (4, 4)])
def test_log_alpha_has_four_bits_if_values_are_levels(bits, log_alpha_bits):
    method = replace(PLAIN, bits=bits, gate_encoding=GateEncoding.LOG_ALPHA)
    weights, log_alpha = state()
    packet = method.encode_message(weights, log_alpha, OBJECTIVE.layout, CLOCK, stack_noise())
    reference = quantize(log_alpha.gather(-1, packet.support), log_alpha_bits, stack_noise(), "log_alpha", zero_free=False)
    assert packet.fields["log_alpha"].coding is reference.coding
    assert torch.equal(packet.fields["log_alpha"].codes, reference.codes)
