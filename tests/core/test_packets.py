import pytest
import torch

from fedsieve import wire
from fedsieve.core import packets, quantization
from fedsieve.core.quantization import Coding
from fedsieve.core.random import client_sampler


def draw(clients=1, step=0):
    return client_sampler(0, 0, 0, step, list(range(clients)), torch.float64)


def vectors(k=4, n=300):
    return torch.randn(k, n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("zero_free", [True, False])
def test_stochastic_rounding_is_unbiased_and_off_by_less_than_a_level(bits, zero_free):
    values = vectors(1, 50).expand(4000, -1)
    rounded = quantization.quantize(values, bits, draw(4000), "x", zero_free=zero_free)
    decoded = rounded.decode(torch.float64)
    level = rounded.scale.double()[:, None]
    assert ((decoded - values).abs() <= level * (1 + 1e-9)).all()
    assert ((decoded.mean(0) - values[0]).abs() < 4.5 * level[0] / 2 / 4000**0.5).all()


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_a_sparse_message_never_sends_a_kept_weight_as_zero(bits):
    values = vectors()
    support = torch.arange(0, 300, 3).expand(4, -1)
    decoded = packets.sparse_packet(support, {"theta": values}, bits, draw(4)).field_dense("theta", torch.float64)
    assert ((decoded != 0).sum(-1) == 100).all()


def test_a_dense_message_keeps_exact_zeros():
    values = vectors()
    values[:, ::2] = 0
    decoded = packets.dense_packet({"theta": values}, 8, draw(4)).field_dense("theta", torch.float64)
    assert (decoded[:, ::2] == 0).all()


def test_the_largest_value_survives_at_every_precision():
    values = torch.tensor([[1e-3, -7.0, 2.0]], dtype=torch.float64)
    for bits, error in ((32, 1e-6), (16, 1e-2), (8, 7 / 127), (4, 1.0)):
        decoded = quantization.quantize(values, bits, draw(), "x", zero_free=True).decode(torch.float64)
        assert abs(float(decoded[0, 1]) + 7.0) <= error


def test_a_packet_of_zeros_survives_rounding():
    decoded = packets.dense_packet({"theta": torch.zeros(1, 5, dtype=torch.float64)}, 8, draw()).field_dense("theta", torch.float64)
    assert (decoded == 0).all()


def test_gates_are_sent_as_255ths_and_their_ends_are_exact():
    gate = torch.tensor([[0.0, 0.3, 1.0]], dtype=torch.float64)
    sent = quantization.quantize_gates(gate, 8, draw(), "gates")
    assert sent.coding is Coding.UNIT8
    decoded = sent.decode(torch.float64)[0]
    assert decoded[0] == 0 and decoded[2] == 1 and abs(decoded[1] - 0.3) < 1 / 255


def test_an_absent_coordinate_has_the_default_value_of_its_client():
    support = torch.tensor([[1], [2]])
    packet = packets.sparse_packet(support, {"theta": vectors(2, 4)}, 32, draw(2))
    full = packet.field_dense("theta", torch.float64, torch.tensor([0.5, 0.25]))
    assert full[0, [0, 2, 3]].tolist() == [0.5] * 3
    assert full[1, [0, 1, 3]].tolist() == [0.25] * 3


def test_one_packet_of_a_stack_is_the_packet_of_that_client_alone():
    values, support = vectors(), torch.arange(0, 300, 3).expand(4, -1)
    stack = packets.sparse_packet(support, {"theta": values}, 8, client_sampler(0, 0, 0, 0, [3, 8, 11, 40], torch.float64))
    alone = packets.sparse_packet(support[:1], {"theta": values[2:3]}, 8, client_sampler(0, 0, 0, 0, [11], torch.float64))
    assert torch.equal(stack.unstack()[2].field_dense("theta", torch.float64), alone.unstack()[0].field_dense("theta", torch.float64))


def test_absent_coordinates_have_the_value_of_the_background():
    under, support, silent = torch.arange(10.0).double(), torch.tensor([[2, 7], [0, 1]]), torch.ones(2, 10, dtype=torch.bool)
    silent = silent.scatter(1, support, False)
    values = vectors(2, 2)
    for elsewhere, background in (
        (None, under.expand(2, 10)),
        (torch.tensor([3.0, 4.0]).double(), torch.tensor([[3.0], [4.0]]).double().expand(2, 10)),
    ):
        laid = packets.SparseVector(values, support, elsewhere).densify(under, 10)
        assert torch.equal(laid.gather(1, support), values)
        assert torch.equal(laid[silent], background[silent])
        assert torch.equal(
            packets.SparseVector(values[1], support[1], None if elsewhere is None else elsewhere[1]).densify(under, 10), laid[1]
        )


def test_the_distance_of_a_part_is_that_of_its_full_vector():
    support, values = torch.tensor([[1, 4, 7], [0, 4, 9]]), torch.randn(2, 3, dtype=torch.float64)
    under = torch.randn(10, dtype=torch.float64)
    for part in (
        packets.SparseVector(values, support),
        packets.SparseVector(values, support, torch.tensor([3.0, 4.0]).double()),
        packets.SparseVector(torch.randn(2, 10, dtype=torch.float64)),
    ):
        torch.testing.assert_close(part.distance_to(under, 10), (part.densify(under, 10) - under).norm(dim=1))
        torch.testing.assert_close(part.distance_to(None, 10), part.densify(None, 10).norm(dim=1))


def test_the_papers_formula_counts_four_bytes_a_value_and_no_positions():
    packet = packets.sparse_packet(torch.arange(5)[None], {"theta": vectors(1, 100), "gates": vectors(1, 100)}, 8, draw())
    assert wire.encode(packet.unstack()[0], wire.MessageId(0, 0, 0)).paper_bytes == 4 * 2 * 5
