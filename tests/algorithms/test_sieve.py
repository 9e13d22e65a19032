"""sieve: saliency gates, error feedback, replies coded by their updates, a constraint that holds in every round."""

from dataclasses import replace

import pytest
import torch

from fedsieve.algorithms.sieve import Sieve, mean_gates
from fedsieve.core import gates
from fedsieve.core.aggregation import Aggregator
from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.quantization import Coding
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.types import Batch, Clock, Reply
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.training import run_rounds
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.rounds import initial_server

MODEL = Linear(loss=Loss.SOFTMAX, num_features=30, num_outputs=4)
SIEVE = Sieve(density=0.1, local_steps=4, batch_size=8)
SEARCH, LAST_SEARCH, REFINE = Clock(2, 10), Clock(7, 10), Clock(8, 10)


def draw(step=0):
    return client_sampler(5, 0, 0, step, [0], torch.float64, "cpu")


def start_round(clock=SEARCH, sieve=SIEVE):
    """The server, its broadcast, and one client that has received it."""
    server = initial_server(sieve, MODEL, 3, torch.float64)
    packet = sieve.broadcast(server, clock, server_sampler(3, clock.round, 0, torch.float64, "cpu"))
    client = sieve.client_init(packet, MODEL.layout, clock, torch.float64)
    return server, packet, client._replace(weights=client.weights[None], log_alpha=client.log_alpha[None])


def train_client(client, clock=SEARCH, sieve=SIEVE):
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        x = torch.randn(1, 8, 30, generator=generator, dtype=torch.float64)
        client = sieve.client_step(MODEL, client, Batch(x, torch.randint(0, 4, (1, 8), generator=generator)), clock, draw(step))
    return client


def run_small(density, rounds=10, **options):
    """All rounds of a small run."""
    config = RunConfig(
        task="mc",
        algorithm_name="sieve",
        density=density,
        rounds=rounds,
        data=Synthetic(num_examples=400, num_features=100, true_density=0.1),
        federation=FederationConfig(clients=10, participation=0.4),
        algorithm=Sieve(local_steps=6, batch_size=8, **options),
    )
    return list(run_rounds(resolve(config)))


def test_gates_follow_the_gradient_of_the_loss_in_the_gate():
    """Autograd with a gate of slope 1, in units of the root mean square over m weights."""
    client = train_client(start_round()[2])
    x = torch.randn(1, 8, 30, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    batch = Batch(x, torch.zeros(1, 8, dtype=torch.int64))
    z = gates.sample(SIEVE.shape, client.log_alpha, draw(7)("gates", 120)).value.requires_grad_()
    logits = (client.weights * z).view(1, 4, 30) @ x.transpose(1, 2)
    torch.nn.functional.cross_entropy(logits, batch.y).backward()
    moved = client.log_alpha - SIEVE.client_step(MODEL, client, batch, SEARCH, draw(7)).log_alpha
    torch.testing.assert_close(moved, SIEVE.gate_rate * z.grad / (z.grad.square().sum() / 12).sqrt())


def test_the_server_keeps_what_the_broadcast_left_out():
    server, packet, client = start_round()
    reply = SIEVE.client_reply(train_client(client), SEARCH, draw(4)).unstack()[0]
    sent, update = packet.field_dense("weights", torch.float64), reply.field_dense("update", torch.float64)
    residual = server.weights - sent
    after = SIEVE.aggregate(server, packet, [Reply(i, reply, 8) for i in range(3)], SEARCH, draw())
    torch.testing.assert_close(after.weights, sent + update + SIEVE.residual_decay * residual)
    refined = SIEVE.aggregate(server, packet, [Reply(0, reply, 8)], REFINE, draw())
    torch.testing.assert_close(refined.weights, sent + update + SIEVE.residual_decay * residual)


def test_while_searching_the_mean_update_is_as_long_as_the_updates():
    """Orthogonal updates of equal length: their mean is shorter by the square root of two."""
    server, packet, client = start_round()
    sent = packet.field_dense("weights", torch.float64)
    replies = []
    for i in range(2):
        moved = client._replace(weights=client.weights + 0.1 * torch.eye(120, dtype=torch.float64)[[50 + i]])
        replies.append(Reply(i, SIEVE.client_reply(moved, SEARCH, draw(4)).unstack()[0], 8))
    decoded = torch.stack([reply.packet.field_dense("update", torch.float64) for reply in replies])
    moved = SIEVE.aggregate(server, packet, replies, SEARCH, draw()).weights - sent - SIEVE.residual_decay * (server.weights - sent)
    torch.testing.assert_close(moved, decoded.mean(0) * 2**0.5)
    median = replace(SIEVE, aggregator=Aggregator.MEDIAN)
    moved = median.aggregate(server, packet, replies, SEARCH, draw()).weights - sent - SIEVE.residual_decay * (server.weights - sent)
    torch.testing.assert_close(moved, decoded.mean(0))


@pytest.mark.parametrize(("exponent", "coding"), [(0.01, Coding.SIGNS), (30.0, Coding.MIDPOINT8)])
def test_diffuse_updates_become_signs_and_concentrated_ones_numbers(exponent, coding):
    _, packet, client = start_round()
    size = torch.rand(1, 120, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sign = torch.where(torch.rand(1, 120, generator=torch.Generator().manual_seed(2)) < 0.5, -1.0, 1.0)
    client = client._replace(weights=packet.field_dense("weights", torch.float64) + sign * size**exponent)
    reply = SIEVE.client_reply(client, SEARCH, draw())
    assert reply.fields["update"].coding is coding
    assert (reply.fields["update"].codes.shape[-1] > 12) == (coding is Coding.SIGNS)


@pytest.mark.parametrize("bits", [8, 4, 1, "best"])
def test_the_projection_of_a_reply_on_its_update_is_the_update(bits):
    """With gates that are equally open, <reply, update> = |update|^2."""
    _, packet, client = start_round()
    update = torch.randn(1, 120, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    client = client._replace(weights=packet.field_dense("weights", torch.float64) + update)
    reply = replace(SIEVE, reply_bits=bits).client_reply(client, SEARCH, draw()).field_dense("update", torch.float64)
    torch.testing.assert_close((reply * update).sum(), update.square().sum(), rtol=1e-6, atol=0)


def test_an_update_behind_a_closed_gate_is_not_sent():
    _, packet, client = start_round()
    update = torch.zeros(1, 120, dtype=torch.float64)
    update[0, :5], update[0, 5:10] = 1.0, 9.0
    log_alpha = torch.where(update == 9.0, -LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
    client = client._replace(weights=packet.field_dense("weights", torch.float64) + update, log_alpha=log_alpha)
    support = SIEVE.client_reply(client, SEARCH, draw()).support[0].tolist()
    assert set(range(5)) <= set(support) and not set(range(5, 10)) & set(support)


def test_after_the_search_replies_have_the_support_of_the_broadcast():
    _, packet, client = start_round(REFINE)
    trained = train_client(client, REFINE)
    reply = SIEVE.client_reply(trained, REFINE, draw(4))
    assert torch.equal(reply.support[0], packet.support)
    assert reply.fields["update"].coding is Coding.MIDPOINT4 and packet.fields["weights"].coding is Coding.MIDPOINT8
    assert torch.equal(SIEVE.public_support(packet, REFINE), packet.support) and SIEVE.public_support(packet, SEARCH) is None


def test_mean_gates_are_the_means_on_and_off_the_mask():
    log_alpha, mask = torch.arange(120.0)[None], torch.arange(120)[None] < 20
    means = mean_gates(log_alpha, mask, MODEL.layout)
    assert means["kept_gate"].item() == pytest.approx(9.5) and means["default_gate"].item() == pytest.approx(69.5)


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("start", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("density", [0.5, 0.1, 0.02])
def test_the_constraint_holds_from_any_start(start, density):
    rows = [step.metrics for step in run_small(density, initial_gate_probability=start)]
    for row in rows[7:]:
        assert row["expected_density"] == pytest.approx(density, rel=0.01)
    assert rows[-1]["test_density"] == pytest.approx(density, rel=0.01)
    if start >= 0.5:
        assert rows[0]["expected_density"] > density


@pytest.mark.usefixtures("few_test_rows")
def test_the_expected_density_follows_its_schedule():
    sieve = Sieve(density=0.1, local_steps=6, batch_size=8)
    rows = [step.metrics["expected_density"] for step in run_small(0.1)]
    start = float(gates.active_probability(sieve.shape, torch.zeros(1))[0])
    for i in range(7):
        assert rows[i] == pytest.approx(0.1 + (start - 0.1) * (1 - ((i + 1) / 8) ** 3), rel=1e-4)


@pytest.mark.usefixtures("few_test_rows")
def test_gates_of_the_final_support_are_open_and_all_others_closed():
    server = run_small(0.1)[-1].result.server
    assert int((server.log_alpha == LOG_ALPHA_LIMIT).sum()) == 100
    assert int((server.log_alpha == -LOG_ALPHA_LIMIT).sum()) == 900


def test_gates_start_at_the_logit_of_the_option():
    _, packet, client = start_round(sieve=replace(SIEVE, initial_gate_probability=0.2))
    logit = torch.logit(torch.tensor(0.2))
    torch.testing.assert_close(torch.stack([packet.scalars["kept_gate"], packet.scalars["default_gate"]]), logit.expand(2))
    torch.testing.assert_close(client.log_alpha.float(), logit.expand(1, 120))


@pytest.mark.parametrize(
    ("option", "value"), [("reply_budget", 0.0), ("search_fraction", 1.5), ("search_fraction", 0.0), ("gate_rate", -1.0)]
)
def test_options_out_of_range_are_rejected_by_name(option, value):
    with pytest.raises(ValueError, match=f"algorithm.{option.replace('_', '-')} .*{value:g}"):
        Sieve(**{option: value})


def test_without_learned_gates_a_local_step_is_a_plain_gradient_step():
    sieve = replace(SIEVE, learn_gates=False)
    _, _, client = start_round(sieve=sieve)
    batch = Batch(torch.randn(1, 8, 30, dtype=torch.float64), torch.randint(4, (1, 8)))
    after = sieve.client_step(MODEL, client, batch, SEARCH, draw())
    gradient, step_size = sieve.gradient_and_step_size(MODEL, client.weights, batch, SEARCH)
    torch.testing.assert_close(after.weights, client.weights - step_size * gradient)
    torch.testing.assert_close(after.log_alpha, client.log_alpha)
    assert not torch.equal(SIEVE.client_step(MODEL, client, batch, SEARCH, draw()).weights, after.weights)
