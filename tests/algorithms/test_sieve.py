"""sieve: the gate's gradient is a saliency, two numbers speak for all gates, the residual keeps evidence, the constraint holds."""

from dataclasses import replace

import pytest
import torch

from fedsieve.algorithms.sieve import Sieve
from fedsieve.algorithms.sieve_rules import Ending, Uplink
from fedsieve.core import gates
from fedsieve.core.quantization import Coding
from fedsieve.core.types import Batch, Reply
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.runner import run_rounds
from fedsieve.experiments.simulation import Simulation
from helpers.sieve import MODEL, POLISH, SEARCH, SIEVE, begun, draw, stepped, trained


def test_the_gate_gradient_is_what_autograd_finds_with_the_gate_slope_put_at_one():
    _, _, client = begun()
    client = stepped(client, steps=2)
    x = torch.randn(1, 8, 30, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    batch = Batch(x, torch.zeros(1, 8, dtype=torch.int64))
    z = gates.sample(SIEVE.shape, client.log_alpha, draw(step=7)("gates", 120)).value.requires_grad_()
    theta = client.weights * z
    logits = theta.view(1, 4, 30) @ x.transpose(1, 2)
    torch.nn.functional.cross_entropy(logits, batch.y).backward()
    after = SIEVE.client_step(MODEL, client, batch, SEARCH, draw(step=7))
    moved = client.log_alpha - after.log_alpha
    kept = 12
    expected = SIEVE.gate_rate * z.grad / (z.grad.square().sum() / kept).sqrt()
    torch.testing.assert_close(moved, expected)


def test_a_weight_whose_gradient_keeps_its_direction_opens_its_gate():
    _, _, client = begun()
    client = client._replace(weights=torch.zeros_like(client.weights))
    x = torch.ones(1, 8, 30, dtype=torch.float64)
    for step in range(5):
        client = SIEVE.client_step(MODEL, client, Batch(x, torch.zeros(1, 8, dtype=torch.int64)), SEARCH, draw(step=step))
    moved = client.weights != 0
    assert moved.any() and (client.log_alpha[moved] >= 0).double().mean() > 0.9


def test_the_uplink_is_signs_of_many_updates_while_searching_and_numbers_of_the_support_while_polishing():
    for clock, coding, count in ((SEARCH, Coding.SIGNS, 18), (POLISH, Coding.MIDPOINT4, 12)):
        _, packet, client = begun(clock)
        reply = SIEVE.client_reply(stepped(client, clock), clock, draw(step=4))
        assert reply.fields["update"].coding is coding and reply.support.shape == (1, count)
        assert set(reply.scalars) == {"kept_gate", "default_gate", "signs"}
        if clock is POLISH:
            assert torch.equal(reply.support[0], packet.support)


def test_a_reply_says_how_many_of_the_updates_its_gates_let_count_tell_most_as_signs_and_the_server_takes_the_mean():
    server, packet, client = begun()
    update = torch.zeros(2, MODEL.layout.size, dtype=torch.float64)
    update[0, :9], update[1, :6] = 0.5, -0.3
    update[1, 6:40] = 5.0  # shut: their gates say that they do not matter
    log_alpha = torch.where(update == 5.0, -12.0, 8.0).double()
    held = client._replace(weights=packet.field_dense("weights", torch.float64) + update, log_alpha=log_alpha)
    reply = SIEVE.client_reply(held, SEARCH, draw(step=4, clients=(0, 1)))
    torch.testing.assert_close(120 * reply.scalars["signs"], torch.tensor([9.0, 6.0]))
    replies = [Reply(i, reply.unstack()[i], 4) for i in range(2)]
    after = SIEVE.aggregate(server, packet, replies, SEARCH, draw())
    assert float(120 * after.signs) == pytest.approx(7.5, rel=1e-6)


@pytest.mark.parametrize("density", [0.5, 0.2, 0.05, 0.01])
def test_once_the_support_is_found_its_gates_stand_open_and_the_constraint_holds(density):
    sieve = Sieve(density=density, local_steps=3)
    last = trained("lr", density, Synthetic(num_examples=400, num_features=200, true_density=0.05), sieve)[-1]
    log_alpha = last.result.server.log_alpha
    assert int((log_alpha >= 7).sum()) == round(density * 200)
    assert float(gates.active_probability(sieve.shape, log_alpha).mean()) == pytest.approx(density, rel=0.05)


def test_what_nobody_speaks_of_is_remembered_and_what_is_spoken_of_moves_by_the_mean():
    server, packet, client = begun()
    reply = SIEVE.client_reply(stepped(client), SEARCH, draw(step=4)).unstack()[0]
    after = SIEVE.aggregate(server, packet, [Reply(i, reply, 8) for i in range(5)], SEARCH, draw())
    sent = packet.field_dense("weights", torch.float64)
    expected = sent + 3 * reply.field_dense("update", torch.float64) + 0.97 * (server.weights - sent)
    torch.testing.assert_close(after.weights, expected)


def test_a_loss_above_that_of_no_model_at_all_makes_no_longer_step():
    """Weights gone astray have any loss; the step is that of a loss of log 4."""
    _, _, client = begun()
    x = torch.randn(1, 8, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batch, far = Batch(x, torch.zeros(1, 8, dtype=torch.int64)), client._replace(weights=50 * torch.ones_like(client.weights).cumsum(-1))
    gate = SIEVE.gate(far.log_alpha, MODEL.layout, SEARCH, draw())
    loss, gradient = MODEL.gradient(far.weights * gate, batch)
    assert loss > 4
    step = SIEVE.learning_rate * SIEVE.learning_rate_factor(SEARCH) * torch.log(torch.tensor(4.0)) / gradient.square().sum()
    after = SIEVE.client_step(MODEL, far, batch, SEARCH, draw())
    torch.testing.assert_close(far.weights - after.weights, (step * gate * gradient).double(), rtol=1e-4, atol=1e-9)


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("rate", [0.5, 25.0])
def test_rates_from_a_quarter_to_ten_times_the_usual_end_near_each_other(rate):
    data = Synthetic(num_examples=2000, num_features=100, true_density=0.05)
    best, other = (trained("lg", 0.05, data, Sieve(learning_rate=each), rounds=30)[-1].metrics["accuracy"] for each in (2.0, rate))
    assert other > best - 0.02


def test_gates_start_at_the_logit_that_was_typed():
    _, packet, client = begun(sieve=replace(SIEVE, initial_gate_probability=0.2))
    logit = torch.logit(torch.tensor(0.2))
    torch.testing.assert_close(torch.stack([packet.scalars["kept_gate"], packet.scalars["default_gate"]]), logit.expand(2))
    torch.testing.assert_close(client.log_alpha.float(), logit.expand(1, 120))


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("start", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("ending", Ending)
@pytest.mark.parametrize("density", [0.5, 0.1, 0.02])
def test_from_any_start_the_expected_density_is_the_one_asked_for_when_the_search_ends(start, ending, density):
    data = Synthetic(num_examples=400, num_features=100, true_density=0.1)
    sieve = Sieve(local_steps=6, batch_size=8, ending=ending, initial_gate_probability=start)
    rows = [step.metrics for step in trained("mc", density, data, sieve)]
    for row in rows[7:]:
        assert abs(row["expected_density"] - density) <= 0.05 * density
    assert abs(rows[-1]["test_density"] - density) <= 0.05 * density
    if start >= 0.5:
        assert rows[0]["expected_density"] > density


@pytest.mark.usefixtures("few_test_rows")
def test_weights_may_travel_instead_of_updates():
    data = Synthetic(num_examples=400, num_features=100, true_density=0.1)
    algorithm = Sieve(local_steps=6, batch_size=8, uplink=Uplink.WEIGHTS, server_learning_rate=1.0)
    federation = FederationConfig(clients=10, participation=0.4)
    run = resolve(
        RunConfig(task="lr", algorithm_name="sieve", density=0.1, rounds=20, data=data, federation=federation, algorithm=algorithm)
    )
    rows = [step.metrics for step in run_rounds(run, Simulation(run))]
    assert rows[-1]["r2"] > 0.5 > rows[0]["r2"]
    assert rows[-1]["expected_density"] == pytest.approx(0.1, rel=0.05)
