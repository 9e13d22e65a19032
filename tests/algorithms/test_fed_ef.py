"""Fed-EF against its definition, by hand and over whole runs."""

import pytest
import torch

from fedsieve.algorithms.fed_ef import Client, Compressor, Downlink, FedEF, residual_after_reply
from fedsieve.core.packets import dense_packet
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Clock, Layout, Reply

LAYOUT = Layout(4, {"weight": (slice(0, 4), (4,))})
CLOCK = Clock(0, 10)
DRAW, SERVER_DRAW = client_sampler(0, 0, 0, 0, [0], torch.float64), server_sampler(0, 0, 0, torch.float64)


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def reply_of(algorithm, theta, residual, sent):
    """The decoded reply of one client that moved from `sent` to `theta`, and its residual after it."""
    client = Client(theta[None], residual[None], dense_packet({"theta": sent}, 32, SERVER_DRAW), LAYOUT)
    reply = algorithm.client_reply(client, CLOCK, DRAW)
    return reply.unstack()[0], residual_after_reply(client, reply)["residual"][0]


def test_a_round_of_top_k_by_hand():
    """v = theta - sent + e = (1, -4, 2, 0.5); the top two entries are sent, the others are kept."""
    algorithm = FedEF(
        density=0.5,
        density_schedule=DensitySchedule.CONSTANT,
        bits=32,
        downlink=Downlink.DENSE,
        residual_decay=1.0,
        server_learning_rate=0.5,
    )
    sent = vector(1, 1, 0, 0)
    reply, residual = reply_of(algorithm, vector(1.5, 1, 2, -1), vector(0.5, -4, 0, 1.5), sent)
    assert reply.field_dense("update", torch.float64).tolist() == [0, -4, 2, 0]
    assert residual.tolist() == [1, 0, 0, 0.5]
    server = algorithm.init(LAYOUT, sent, SERVER_DRAW)
    packet = algorithm.broadcast(server, CLOCK, SERVER_DRAW)
    other, _ = reply_of(algorithm, vector(1, 1, 0, 8), vector(2, 0, 0, 0), sent)
    after = algorithm.aggregate(server, packet, [Reply(0, reply, 3), Reply(1, other, 1)], CLOCK, SERVER_DRAW)
    assert after.theta.tolist() == pytest.approx([1 + 0.5 * 0.25 * 2, 1 - 0.5 * 0.75 * 4, 0.5 * 0.75 * 2, 0.5 * 0.25 * 8])
    assert algorithm.parameters(after).tolist() == pytest.approx([1.25, 0, 0, 1])


def test_a_round_of_signs_by_hand():
    """The mean magnitude of v = (1, -4, 2, -1) is 2."""
    algorithm = FedEF(density=0.5, density_schedule=DensitySchedule.CONSTANT, compressor=Compressor.SIGN)
    reply, residual = reply_of(algorithm, vector(1, -4, 2, -1), vector(0, 0, 0, 0), vector(0, 0, 0, 0))
    assert reply.field_dense("update", torch.float64).tolist() == [2, -2, 2, -2]
    assert residual.tolist() == [-1, -2, 0, 1]


def test_a_sparse_broadcast_has_the_largest_weights_and_the_server_keeps_the_others():
    algorithm = FedEF(density=0.5, density_schedule=DensitySchedule.CONSTANT, bits=32, residual_decay=0.5)
    server = algorithm.init(LAYOUT, vector(1, -3, 2, 0.5), SERVER_DRAW)
    packet = algorithm.broadcast(server, CLOCK, SERVER_DRAW)
    assert packet.field_dense("theta", torch.float64).tolist() == [0, -3, 2, 0]
    reply, _ = reply_of(algorithm, vector(0, -2, 4, 0), vector(0, 0, 0, 0), vector(0, -3, 2, 0))
    assert algorithm.aggregate(server, packet, [Reply(0, reply, 1)], CLOCK, SERVER_DRAW).theta.tolist() == [0.5, -2, 4, 0.25]


@pytest.mark.parametrize("compressor", Compressor)
@pytest.mark.parametrize("bits", [32, 4])
def test_replies_and_residual_add_up_to_all_updates(compressor, bits):
    algorithm = FedEF(density=0.5, density_schedule=DensitySchedule.CONSTANT, bits=bits, compressor=compressor)
    residual, sent, total = vector(0, 0, 0, 0), vector(0, 0, 0, 0), vector(0, 0, 0, 0)
    for update in (vector(1, 2, -3, 4), vector(0.5, -1, 0, 0), vector(0, 0, 7, 0.25)):
        reply, residual = reply_of(algorithm, update, residual, vector(0, 0, 0, 0))
        sent, total = sent + reply.field_dense("update", torch.float64), total + update
        assert torch.allclose(sent + residual, total, rtol=0, atol=1e-12)


def test_a_density_outside_its_range_is_refused():
    for value in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"algorithm.uplink-density"):
            FedEF(uplink_density=value)
