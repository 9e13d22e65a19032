"""sign-ht, ssfl, fed-dst and eden against their definitions: rounds computed by hand."""

from math import cos, pi

import pytest
import torch

from fedsieve.algorithms.eden import Eden
from fedsieve.algorithms.fed_dst import Client, FedDST
from fedsieve.algorithms.sign_ht import SignHT
from fedsieve.algorithms.ssfl import SSFL, Saliency
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.optimizers import StepRule
from fedsieve.core.packets import sparse_packet
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.rotation import hadamard, rotate, rotate_back
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout, Reply
from fedsieve.objectives.linear import Linear, Loss
from helpers.algorithms import make_algorithm
from helpers.runs import small_run, train_run

F, M, STEPS, RATE = 20, 4, 3, 0.05
MODEL = Linear(loss=Loss.SQUARED, num_features=F)
G = torch.Generator().manual_seed(2)
X = [torch.randn(30, F, generator=G, dtype=torch.float64) for _ in range(2)]
Y = [x @ torch.randn(F, generator=G, dtype=torch.float64) for x in X]
COUNTS = (30, 10)
"""numbers of examples that the two clients claim"""
OPTIONS = {
    "density": 0.2,
    "local_steps": STEPS,
    "learning_rate": RATE,
    "final_learning_rate_fraction": 1.0,
    "step_rule": StepRule.CONSTANT,
    "bits": 32,
    "batch_size": "all",
    "client_weighting": ClientWeighting.EXAMPLES,
}


def server_draw():
    return server_sampler(0, 0, 0, torch.float64)


def initial_weights():
    return MODEL.initial_weights(server_draw()).float().double()


def gradient(theta, client):
    return 2 * X[client].T @ (X[client] @ theta - Y[client]) / len(X[client])


def rounded(theta):
    return theta.float().double()


def top(theta, count):
    return torch.zeros_like(theta).index_fill(0, theta.abs().topk(count).indices, 1.0)


def make(cls, **options):
    return cls(**(OPTIONS | options))


def play_round(algorithm, server, clock):
    """One round of the two clients; returns broadcast, replies and the new server state."""
    packet, replies = algorithm.broadcast(server, clock, server_draw()), []
    for number in range(2):
        state = algorithm.client_init(packet, MODEL.layout, clock, torch.float64)
        client = type(state)(*(part[None] if isinstance(part, torch.Tensor) else part for part in state))
        for step in range(STEPS):
            draw = client_sampler(0, clock.round, 0, step, [number], torch.float64)
            client = algorithm.client_step(MODEL, client, Batch(X[number][None], Y[number][None]), clock, draw)
        draw = client_sampler(0, clock.round, 0, STEPS, [number], torch.float64)
        replies.append(Reply(number, algorithm.client_reply(client, clock, draw).unstack()[0], COUNTS[number]))
    return packet, replies, algorithm.aggregate(server, packet, replies, clock, server_draw())


def local_sgd(theta, client, mask=1.0):
    for _ in range(STEPS):
        theta = theta - RATE * gradient(theta, client) * mask
    return theta


# sign-ht


def test_sign_ht_sends_signs_and_keeps_the_residual_at_the_server():
    algorithm = make(SignHT, reply_entries=1.5, server_learning_rate=2.0, residual_decay=0.5)
    server = algorithm.init(MODEL.layout, initial_weights(), server_draw())
    packet, replies, after = play_round(algorithm, server, Clock(0, 10))
    theta = initial_weights()
    sent = theta * top(theta, M)
    torch.testing.assert_close(packet.field_dense("weights", torch.float64), sent)
    mean, square = torch.zeros(F, dtype=torch.float64), 0.0
    for client, weight in enumerate((0.75, 0.25)):
        update = local_sgd(sent, client) - sent
        kept = top(update, 6)
        magnitude = rounded((update.abs() * kept).sum() / 6)
        torch.testing.assert_close(replies[client].packet.field_dense("update", torch.float64), magnitude * update.sign() * kept)
        mean += weight * magnitude * update.sign() * kept
        square += weight * 6 * magnitude**2
    expected = sent + 2.0 * mean * square**0.5 / mean.norm() + 0.5 * (theta - sent)  # as long as the updates
    torch.testing.assert_close(after.weights, expected)


def test_after_the_search_sign_ht_sends_values_on_the_support_of_the_broadcast():
    algorithm = make(SignHT, server_learning_rate=1.0, residual_decay=0.0)
    server = algorithm.init(MODEL.layout, initial_weights(), server_draw())
    packet, replies, after = play_round(algorithm, server, Clock(8, 10))
    sent = initial_weights() * top(initial_weights(), M)
    assert all(torch.equal(reply.packet.support, packet.support) for reply in replies)
    mean = sum(w * rounded((local_sgd(sent, client) - sent) * top(sent, M)) for client, w in enumerate((0.75, 0.25)))
    torch.testing.assert_close(after.weights, sent + mean)


# ssfl


@pytest.mark.parametrize("saliency", Saliency)
def test_ssfl_selects_the_mask_by_saliency_once_and_then_averages_under_it(saliency):
    algorithm = make(SSFL, saliency=saliency)
    server = algorithm.init(MODEL.layout, initial_weights(), server_draw())
    packet, replies, scored = play_round(algorithm, server, Clock(0, 10))
    theta = initial_weights()
    scale = theta.abs() if saliency is Saliency.WEIGHT_TIMES_GRADIENT else 1.0
    score = sum(w * rounded(gradient(theta, client).abs() * scale) for client, w in enumerate((0.75, 0.25)))
    assert packet.support is None and all(reply.packet.support is None for reply in replies)
    torch.testing.assert_close(scored.saliency, score)
    assert torch.equal(scored.theta, theta)
    mask = top(score, M)
    packet, replies, after = play_round(algorithm, scored, Clock(1, 10))
    assert packet.support.tolist() == mask.nonzero()[:, 0].tolist()
    assert all(torch.equal(reply.packet.support, packet.support) for reply in replies)
    mean = sum(w * rounded(local_sgd(theta * mask, client, mask)) for client, w in enumerate((0.75, 0.25)))
    torch.testing.assert_close(algorithm.parameters(after), mean)
    assert torch.equal(algorithm.select_mask(after), mask > 0)


def test_all_clients_send_saliencies_to_ssfl_unless_one_cohort_is_asked():
    for scoring, first in (("all", 12), ("cohort", 6)):
        rounds = train_run(small_run("ssfl", algorithm=make_algorithm("ssfl", scoring_clients=scoring)))
        assert [len(each.result.cohort) for each in rounds] == [first, 6, 6, 6]
        assert rounds[0].metrics["bytes_up"] >= first * 40 and rounds[1].metrics["bytes_up_positions"] == 6


# fed-dst


def test_fed_dst_prunes_by_magnitude_regrows_by_gradient_and_averages_over_holders():
    algorithm = make(FedDST, adjust_fraction=0.5, adjust_interval=1, adjust_end=1.0)
    server = algorithm.init(MODEL.layout, initial_weights(), server_draw())
    mask, clock = server.mask, Clock(0, 10)
    assert mask.sum() == M
    _packet, replies, after = play_round(algorithm, server, clock)
    total, share = torch.zeros(F, dtype=torch.float64), torch.zeros(F, dtype=torch.float64)
    for client, weight in enumerate((0.75, 0.25)):
        theta, steps = initial_weights() * mask, torch.zeros(F, dtype=torch.float64)
        for _ in range(STEPS):
            step = RATE * gradient(theta, client)
            theta, steps = theta - step * mask, steps + step
        kept, grown = top(theta, M // 2), top(steps * (1 - mask), M // 2)
        limit = float((theta * mask).square().sum() / M) ** 0.5
        local = rounded(theta * kept - steps.clamp(-limit, limit) * grown)
        torch.testing.assert_close(replies[client].packet.field_dense("theta", torch.float64), local)
        assert len(replies[client].packet.support) == M
        total, share = total + weight * local, share + weight * (kept + grown)
    mean = torch.where(share > 0, total / share, 0.0)
    torch.testing.assert_close(after.theta, mean * top(mean, M))
    assert after.mask.sum() == M


def test_a_regrown_weight_of_fed_dst_is_no_larger_than_kept_weights_usually_are():
    algorithm = make(FedDST, adjust_fraction=0.5, adjust_interval=1)
    mask = torch.zeros(1, F, dtype=torch.float64)
    mask[0, :M] = 1.0
    theta = torch.arange(1.0, F + 1, dtype=torch.float64)[None] * mask
    usual = float(theta[0, :M].square().mean().sqrt())
    steps = torch.full_like(theta, 0.01)
    steps[0, -1], steps[0, -2] = 1e6, -1e6
    start = algorithm.regrown_weights(Client(theta, mask, steps, MODEL.layout))
    assert start[0, -2:].tolist() == pytest.approx([usual, -usual]) and start[0, M].item() == -0.01


def test_fed_dst_adjusts_the_mask_every_few_rounds_by_a_fraction_that_decays():
    algorithm = make(FedDST, adjust_fraction=0.5, adjust_interval=3, adjust_end=0.5)
    fractions = [algorithm.current_adjust_fraction(Clock(number, 24)) for number in range(24)]
    expected = [0.25 * (1 + cos(pi * number / 12)) if number in (2, 5, 8, 11) else 0.0 for number in range(24)]
    assert fractions == pytest.approx(expected)


def test_fed_dst_leaves_the_mask_alone_between_two_changes():
    algorithm = make(FedDST, adjust_interval=3)
    server = algorithm.init(MODEL.layout, initial_weights(), server_draw())
    packet, replies, after = play_round(algorithm, server, Clock(0, 30))
    assert all(torch.equal(reply.packet.support, packet.support) for reply in replies)
    assert torch.equal(after.mask, server.mask)


def test_fed_dst_keeps_the_budget_of_every_layer():
    layout = Layout(30, {"first": (slice(0, 20), (4, 5)), "second": (slice(20, 30), (2, 5))})
    algorithm = make(FedDST, density=0.4, sparsity_allocation=BudgetRule.UNIFORM, adjust_fraction=0.5)
    theta = torch.arange(1.0, 31.0, dtype=torch.float64)[None]
    mask = torch.zeros(1, 30, dtype=torch.bool)
    mask[:, :8], mask[:, 20:24] = True, True
    adjusted = algorithm.adjust_mask(theta, theta, mask, layout, 0.5)
    assert adjusted.nonzero()[:, 1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 22, 23, 28, 29]


def test_a_weight_that_every_client_dropped_leaves_the_model_of_fed_dst():
    algorithm = make(FedDST, adjust_interval=1)
    server = algorithm.init(MODEL.layout, initial_weights(), server_draw())
    clock = Clock(0, 10)
    packet = algorithm.broadcast(server, clock, server_draw())
    theta = initial_weights()
    support = (server.mask == 0).nonzero()[:M, 0]
    reply = Reply(0, sparse_packet(support, {"theta": theta}, 32, server_draw()), 1)
    after = algorithm.aggregate(server, packet, [reply], clock, server_draw())
    assert after.theta.nonzero()[:, 0].tolist() == support.tolist()


# eden


@pytest.mark.parametrize("size", [1, 2, 3, 20, 64, 100])
def test_a_rotation_is_orthogonal_and_has_an_inverse(size):
    vectors = torch.randn(3, size, generator=G, dtype=torch.float64)
    seeds = torch.tensor([0.1, 0.2, -3.0])
    rotated = rotate(vectors, seeds)
    torch.testing.assert_close(rotated.norm(dim=-1), vectors.norm(dim=-1))
    torch.testing.assert_close(rotate_back(rotated, seeds), vectors)
    torch.testing.assert_close(rotate(vectors[1:2], seeds[1:2]), rotated[1:2], rtol=0, atol=0)


def test_the_hadamard_transform_is_the_product_with_its_matrix():
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    vectors = torch.randn(2, 16, generator=G, dtype=torch.float64)
    torch.testing.assert_close(hadamard(vectors), vectors @ matrix / 4)


@pytest.mark.parametrize(("bits", "centroids"), [(1, (-1.0, 1.0)), (2, (-1.5104176, -0.45278, 0.45278, 1.5104176))])
def test_eden_sends_the_nearest_centroids_of_the_rotated_update(bits, centroids):
    algorithm = make(Eden, update_bits=bits)
    server = algorithm.init(MODEL.layout, initial_weights(), server_draw())
    packet, replies, after = play_round(algorithm, server, Clock(0, 10))
    sent, mean = initial_weights(), torch.zeros(F, dtype=torch.float64)
    torch.testing.assert_close(packet.field_dense("weights", torch.float64), sent)
    for client, weight in enumerate((0.75, 0.25)):
        update = local_sgd(sent, client) - sent
        seed = replies[client].packet.scalars["rotation"][None]
        x = rotate(update[None], seed)[0]
        levels = torch.tensor(centroids, dtype=torch.float64)
        nearest = levels[(x[:, None] / x.square().mean().sqrt() - levels).abs().argmin(1)]
        decoded = rotate_back((nearest * rounded((x @ x) / (nearest @ x)))[None], seed)[0]
        torch.testing.assert_close(algorithm.decode_dense(replies[client].packet, torch.float64)["update"], decoded)
        torch.testing.assert_close(decoded @ update, update @ update, rtol=1e-6, atol=0)
        mean += weight * decoded
    torch.testing.assert_close(after.weights, sent + mean)
    assert replies[0].packet.scalars["rotation"] != replies[1].packet.scalars["rotation"]


@pytest.mark.parametrize(("bits", "most"), [(1, 0.6), (2, 0.14)])
def test_eden_is_unbiased_with_the_error_of_its_paper(bits, most):
    """The squared error is pi/2 - 1 = .571 of the update with one bit, and .133 with two (Vargaftik et al. 2022)."""
    algorithm = Eden(update_bits=bits)
    update = torch.randn(1, 1000, generator=torch.Generator().manual_seed(4), dtype=torch.float64).pow(3)
    server = algorithm.init(Layout(1000, {"w": (slice(0, 1000), (1000,))}), torch.zeros(1000, dtype=torch.float64), server_draw())
    packet = algorithm.broadcast(server, Clock(0, 10), server_draw())
    client = algorithm.client_init(packet, server.layout, Clock(0, 10), torch.float64)
    client = client._replace(weights=client.weights + update.expand(200, -1))
    draw = client_sampler(0, 0, 0, 0, range(200), torch.float64)
    decoded = algorithm.decode_dense(algorithm.client_reply(client, Clock(0, 10), draw), torch.float64)["update"]
    energy = update.square().sum()
    assert 0.9 * most < (decoded - update).square().sum(-1).mean() / energy < most
    assert (decoded.mean(0) - update).square().sum() / energy < 1.5 * most / 200


def test_the_broadcast_of_eden_is_dense_or_becomes_sparse():
    server = Eden().init(MODEL.layout, initial_weights(), server_draw())
    annealed = make(Eden, density_schedule=DensitySchedule.CUBIC)
    sizes = [annealed.broadcast(server, Clock(number, 10), server_draw()).fields["weights"].codes.shape[-1] for number in (0, 2, 5)]
    assert sizes[0] == F and sizes[0] > sizes[1] > sizes[2] == M
    assert make(Eden).broadcast(server, Clock(9, 10), server_draw()).support is None


@pytest.mark.parametrize(
    ("cls", "options", "text"),
    [
        (SignHT, {"reply_entries": 0.0}, "algorithm.reply-entries must be above 0"),
        (SignHT, {"search_fraction": 1.5}, "algorithm.search-fraction is a fraction"),
        (FedDST, {"adjust_fraction": 2.0}, "algorithm.adjust-fraction is a fraction"),
        (FedDST, {"adjust_interval": 0}, "algorithm.adjust-interval must be at least 1"),
        (Eden, {"warmup": 3}, "algorithm.warmup has no effect on Eden"),
    ],
)
def test_options_that_cannot_work_are_refused(cls, options, text):
    with pytest.raises(ValueError, match=text):
        cls(**options)
