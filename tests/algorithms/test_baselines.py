"""Baselines against their definitions, written out by hand for one client and full batches."""

import torch

from fedsieve.algorithms import algorithm_class
from fedsieve.core.optimizers import StepRule
from fedsieve.core.packets import sparse_packet
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Batch, Clock, Layout, Reply
from fedsieve.objectives.linear import Linear, Loss

F, M, STEPS, RATE = 20, 4, 3, 0.05
OBJECTIVE = Linear(loss=Loss.SQUARED, num_features=F)
G = torch.Generator().manual_seed(2)
X = torch.randn(30, F, generator=G, dtype=torch.float64)
Y = X @ torch.randn(F, generator=G, dtype=torch.float64)
COMMON = {
    "density": 0.2,
    "local_steps": STEPS,
    "learning_rate": RATE,
    "final_learning_rate_fraction": 1.0,
    "step_rule": StepRule.CONSTANT,
    "bits": 32,
    "batch_size": "all",
}


def play(name, rounds=3, **fields):
    """Rounds with one client that owns all rows."""
    schedule = {} if name == "gradual" else {"density_schedule": DensitySchedule.CONSTANT}
    method = algorithm_class(name)(**(COMMON | schedule | fields))
    noise = server_sampler(0, 0, 0, torch.float64)
    server = method.init(OBJECTIVE.layout, OBJECTIVE.initial_weights(noise), noise)
    for t in range(rounds):
        clock = Clock(t, rounds)
        packet = method.broadcast(server, clock, noise)
        start = method.client_init(packet, OBJECTIVE.layout, clock, torch.float64)
        client = type(start)(*(part[None] if isinstance(part, torch.Tensor) else part for part in start))
        for step in range(STEPS):
            client = method.client_step(
                OBJECTIVE, client, Batch(X[None], Y[None]), clock, client_sampler(0, t, 0, step, [0], torch.float64)
            )
        reply = method.client_reply(client, clock, client_sampler(0, t, 0, STEPS, [0], torch.float64)).unstack()[0]
        server = method.aggregate(server, packet, [Reply(0, reply, 30)], clock, noise)
    return method, server


def start():
    return OBJECTIVE.initial_weights(server_sampler(0, 0, 0, torch.float64)).float().double()


def gradient(theta):
    return 2 * X.T @ (X @ theta - Y) / len(X)


def hard(theta, m=M):
    return theta * torch.zeros_like(theta).index_fill(0, theta.abs().topk(m).indices, 1.0)


def rounded(theta):
    return theta.float().double()


def test_fed_avg_with_one_client_is_gradient_descent_cut_at_the_end():
    method, server = play("fed-avg", residual_decay=0.0)
    theta = start()
    for _ in range(3):
        for _ in range(STEPS):
            theta = theta - RATE * gradient(theta)
        theta = rounded(theta)
    torch.testing.assert_close(server.theta, theta)
    torch.testing.assert_close(method.parameters(server), hard(theta))


def test_fed_iter_ht_with_one_client_is_iterative_hard_thresholding():
    method, server = play("fed-iter-ht")
    theta = hard(start())
    for _ in range(3):
        for _ in range(STEPS):
            theta = hard(theta - RATE * gradient(theta))
        theta = rounded(theta)
    torch.testing.assert_close(method.parameters(server), theta)


def test_fed_ht_thresholds_at_the_server_only():
    method, server = play("fed-ht")
    theta = start()
    for _ in range(3):
        theta = hard(theta)
        for _ in range(STEPS):
            theta = theta - RATE * gradient(theta)
        theta = rounded(theta)
    torch.testing.assert_close(server.theta, theta)
    torch.testing.assert_close(method.parameters(server), hard(theta))


def test_fed_round_ht_thresholds_once_per_round_and_keeps_the_residual():
    _method, server = play("fed-round-ht", residual_decay=0.5)
    theta = start()
    for _ in range(3):
        sent = rounded(hard(theta))
        local = sent
        for _ in range(STEPS):
            local = local - RATE * gradient(local)
        theta = rounded(hard(local)) + 0.5 * (theta - sent)
    torch.testing.assert_close(server.theta, theta)


def test_gradual_pruning_trains_only_under_the_mask():
    _method, server = play("gradual", rounds=6, anneal_end=0.5)
    assert int((server.theta != 0).sum()) == M


def test_a_random_mask_does_not_look_at_the_data():
    method, server = play("random-mask")
    fresh = method.init(
        OBJECTIVE.layout, OBJECTIVE.initial_weights(server_sampler(0, 0, 0, torch.float64)), server_sampler(0, 0, 0, torch.float64)
    )
    assert torch.equal(method.parameters(server) != 0, fresh.theta != 0)


def test_l1_shrinks_by_a_fraction_of_the_largest_weight_outside_the_top():
    method = algorithm_class("fed-l1")(**(COMMON | {"shrinkage": 0.5}))
    theta = torch.tensor([5.0, -4.0, 3.0, 2.0, 1.0, 0.2], dtype=torch.float64)
    layout = Layout(6, {"weights": (slice(0, 6), (6,))})
    assert method.soft_threshold(theta, ((slice(0, 6), 2),), layout).tolist() == [3.5, -2.5, 1.5, 0.5, 0.0, 0.0]


def test_memory_feeds_back_what_rounding_and_selection_dropped():
    """If clients answer with what they were sent and all is remembered, nothing is lost, however coarse the message."""
    method = algorithm_class("fed-round-ht")(**(COMMON | {"residual_decay": 1.0, "bits": 4}))
    noise = server_sampler(0, 0, 0, torch.float64)
    server = method.init(OBJECTIVE.layout, OBJECTIVE.initial_weights(noise), noise)
    packet = method.broadcast(server, Clock(0, 3), noise)
    assert not torch.equal(packet.field_dense("theta", torch.float64), hard(server.theta))
    after = method.aggregate(server, packet, [Reply(0, packet, 1)], Clock(0, 3), noise)
    torch.testing.assert_close(after.theta, server.theta)


def test_a_dropped_weight_is_zero_in_fed_iter_ht_and_unchanged_elsewhere():
    noise = server_sampler(0, 0, 0, torch.float32)
    packet = sparse_packet(torch.tensor([0, 2]), {"theta": torch.tensor([5.0, 0, 3.0, 0])}, 32, noise)
    reply = Reply(0, sparse_packet(torch.tensor([1, 2]), {"theta": torch.tensor([0, 1.0, 3.0, 0])}, 32, noise), 1)
    assert algorithm_class("fed-iter-ht")().client_deltas(packet, [reply], torch.float32)["theta"].tolist() == [[-5.0, 1.0, 0.0, 0.0]]
    assert algorithm_class("fed-round-ht")().client_deltas(packet, [reply], torch.float32)["theta"].tolist() == [[0.0, 1.0, 0.0, 0.0]]
