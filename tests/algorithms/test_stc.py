"""STC against its definition, by hand; and what a client that missed rounds receives and pays."""

import pytest
import torch

from fedsieve import wire
from fedsieve.algorithms.stc import STC, Client, add_updates, residual_after_reply
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.types import Clock, Layout, Reply
from fedsieve.experiments.config import Engine, FederationConfig, Precision
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.rounds import Population, initial_server, train
from helpers.algorithms import make_algorithm
from helpers.runs import small_run, train_run
from helpers.training import make_exchange

LAYOUT = Layout(4, {"weight": (slice(0, 4), (4,))})
CLOCK = Clock(0, 10)
DRAW, SERVER_DRAW = client_sampler(0, 0, 0, 0, [0], torch.float64), server_sampler(0, 0, 0, torch.float64)
HALF = {"density": 0.25, "uplink_density": 0.5, "downlink_density": 0.5}


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def reply_of(algorithm, theta, residual, model):
    client = Client(theta[None], residual[None], model[None])
    reply = algorithm.client_reply(client, CLOCK, DRAW)
    return reply.unstack()[0], residual_after_reply(client, reply)["residual"][0]


def test_a_round_by_hand():
    """v = (1, -4, 2, 0.5): the signs of entries 1 and 2 with the magnitude 3 are sent."""
    algorithm, model = STC(**HALF), vector(1, 1, 0, 0)
    reply, residual = reply_of(algorithm, vector(1.5, 1, 2, -1), vector(0.5, -4, 0, 1.5), model)
    assert reply.field_dense("update", torch.float64).tolist() == [0, -3, 3, 0]
    assert residual.tolist() == [1, -1, -1, 0.5]
    other, _ = reply_of(algorithm, vector(1, 1, 0, 8), vector(2, 0, 0, 0), model)
    assert other.field_dense("update", torch.float64).tolist() == [5, 0, 0, 5]
    server = algorithm.init(LAYOUT, model, SERVER_DRAW)._replace(residual=vector(0, 0, 0.5, 0.5))
    packet = algorithm.broadcast(server, CLOCK, SERVER_DRAW)
    after = algorithm.aggregate(server, packet, [Reply(0, reply, 3), Reply(1, other, 1)], CLOCK, SERVER_DRAW)
    # the plain mean is (2.5, -1.5, 1.5, 2.5), V = R + mean = (2.5, -1.5, 2, 3); its top two have the mean magnitude 2.75
    assert after.theta.tolist() == [1 + 2.75, 1, 0, 2.75]
    assert after.residual.tolist() == [-0.25, -1.5, 2, 0.25]
    assert algorithm.parameters(after).tolist() == [3.75, 0, 0, 0]
    assert torch.equal(algorithm.unprojected_parameters(after), after.theta)


def trained(num_rounds=6, **options):
    """A server after some rounds of two clients each, and the model after each round."""
    algorithm = STC(**{**HALF, **options})
    server = algorithm.init(LAYOUT, vector(0, 0, 0, 0), SERVER_DRAW)
    models = [server.theta]
    for number in range(num_rounds):
        clock = Clock(number, 10)
        packet = algorithm.broadcast(server, clock, SERVER_DRAW)
        reply, _ = reply_of(algorithm, server.theta + vector(number, 1, -2, 0.3 * number), vector(0, 0, 0, 0), server.theta)
        server = algorithm.aggregate(server, packet, [Reply(0, reply, 1)], clock, SERVER_DRAW)
        models.append(server.theta)
    return algorithm, server, models


@pytest.mark.parametrize("first_round", [-1, 0, 2, 5, 6])
def test_missed_updates_turn_an_old_model_into_the_newest(first_round):
    algorithm, server, models = trained()
    messages = algorithm.missed_updates(server, first_round, SERVER_DRAW)
    old = models[max(first_round, 0)]
    assert torch.equal(add_updates(messages[0], old), server.theta)
    assert len(messages) == (1 if first_round == 6 else 2)
    for summed in messages[1:]:
        step = float((server.theta - old).abs().max()) / 127
        assert torch.allclose(add_updates(summed, old), server.theta, rtol=0, atol=step)


@pytest.mark.parametrize("engine", [LoopEngine, BatchedEngine])
def test_bytes_down_are_the_shortest_of_list_sum_and_model_for_every_client(engine):
    """Recomputed from the definition: what each client of a cohort missed since the round in which it last took part."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(80, 60, generator=generator, dtype=torch.float64)
    objective, counts = Linear(loss=Loss.SQUARED, num_features=60), [10] * 8
    algorithm = STC(density=0.1, uplink_density=0.1, downlink_density=0.1, local_steps=3, batch_size=5)
    exchange = make_exchange(algorithm, objective, x, x[:, 0], counts, engine=engine, dtype=torch.float64)
    server = initial_server(algorithm, objective, 1, torch.float64)
    kinds, last_round = set(), {}
    for done in train(algorithm, server, Population(8, range(8)), 0.25, exchange, 40, 1, dtype=torch.float64):
        message_id, total = wire.MessageId(1, done.round, 0), 0
        for client in done.cohort if done.round else []:
            draw = server_sampler(1, done.round, 0, torch.float64)
            missed = algorithm.missed_updates(server, last_round.get(client, -1), draw)
            packets = [*missed, algorithm.broadcast(server, Clock(done.round, 40), draw)]
            lengths = [wire.encode(packet, message_id).length for packet in packets]
            kinds.add(lengths.index(min(lengths)))
            total += min(lengths)
        assert done.downlink.total == total or done.round == 0
        last_round |= dict.fromkeys(done.cohort, done.round)
        server = done.server
    assert kinds == {0, 1}  # the whole model is longer than its sum of 8 bits per weight


@pytest.mark.usefixtures("few_test_rows")
def test_clients_that_know_no_start_receive_the_whole_model_once(tmp_path):
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    objective = Linear(loss=Loss.SQUARED, num_features=30)
    algorithm = STC(density=0.1, uplink_density=0.1, downlink_density=0.1, local_steps=3, batch_size=5)
    exchange = make_exchange(algorithm, objective, x, x[:, 0], [10] * 4, dtype=torch.float64)
    server = initial_server(algorithm, objective, 1, torch.float64)
    population = Population(4, range(4))
    rounds = list(train(algorithm, server, population, 0.5, exchange, 8, 1, dtype=torch.float64, start_from_seed=False))
    seen = set()
    for done in rounds:
        new = set(done.cohort) - seen
        assert done.downlink.weights >= 4 * 30 * len(new)
        assert new or done.downlink.weights < 4 * 30
        seen |= new


@pytest.mark.usefixtures("few_test_rows")
def test_an_absent_client_pays_for_what_it_missed():
    """With fewer clients in a round each of them misses more updates, and its messages are longer."""
    down = {}
    for participation in (1.0, 0.25):
        algorithm = make_algorithm("stc", uplink_density=0.1, downlink_density=0.1)
        federation = FederationConfig(clients=12, participation=participation)
        steps = train_run(small_run("stc", algorithm=algorithm, rounds=12, federation=federation))
        down[participation] = sum(s.metrics["bytes_down_payload"] for s in steps[1:]) / sum(len(s.result.replied) for s in steps[1:])
    assert down[0.25] > 1.5 * down[1.0]


@pytest.mark.usefixtures("few_test_rows")
def test_a_client_keeps_its_own_copy_of_the_model():
    """After lists it has the server's bits; a sum of 8 bits per value is rounded."""
    steps = train_run(
        small_run(
            "stc",
            algorithm=make_algorithm("stc", bits=32, uplink_density=0.1, downlink_density=0.1),
            precision=Precision.DOUBLE,
            engine=Engine.LOOP,
            rounds=8,
        )
    )
    for before, after in zip(steps, steps[1:], strict=False):
        for client in after.result.replied:
            model = after.result.memories[client].vectors["model"]
            assert torch.allclose(model, before.result.server.theta, rtol=0, atol=1e-6)


def test_a_density_outside_its_range_is_refused():
    for name in ("uplink_density", "downlink_density"):
        for value in (0.0, 1.5):
            with pytest.raises(ValueError, match=f"algorithm.{name.replace('_', '-')}"):
                STC(**{name: value})
