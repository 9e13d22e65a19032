"""The wire: round trips for any packet, sizes near the entropy limit, and nothing but PacketError for anything else."""

import re
import tracemalloc
from math import lgamma, log
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve import wire
from fedsieve.core.packets import Packet, seed_packet, sparse_packet
from fedsieve.core.quantization import SCALED_CODINGS, Coding, QuantizedField, quantize_gates
from fedsieve.core.random import client_sampler
from fedsieve.wire import MessageId, PacketError, decode, encode

ADDRESS = MessageId(0xDEADBEEF, 12, 3)


def same(a: Packet, b: Packet) -> bool:
    def equal(x, y):
        return (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))

    return (
        a.size == b.size
        and a.seed == b.seed
        and equal(a.support, b.support)
        and list(a.fields) == list(b.fields)
        and all(v.coding == b.fields[k].coding and equal(v.codes, b.fields[k].codes) for k, v in a.fields.items())
        and all(equal(v.scale, b.fields[k].scale) for k, v in a.fields.items())
        and {k: float(v) for k, v in a.scalars.items()} == {k: float(v) for k, v in b.scalars.items()}
    )


def codes(coding: Coding, count: int, rng: np.random.Generator) -> QuantizedField:
    scale = torch.tensor(float(rng.random(dtype=np.float32)) + 0.1) if coding in SCALED_CODINGS else None
    ranges = {
        Coding.LEVELS8: (-127, 128),
        Coding.LEVELS4: (-7, 8),
        Coding.MIDPOINT8: (-128, 128),
        Coding.MIDPOINT4: (-8, 8),
        Coding.NORMAL2: (-2, 2),
    }
    if coding in ranges:
        return QuantizedField(torch.from_numpy(rng.integers(*ranges[coding], count).astype(np.int8)), scale, coding)
    if coding is Coding.SIGNS:
        return QuantizedField(torch.from_numpy(rng.choice(np.array([-1, 1], dtype=np.int8), count)), scale, coding)
    if coding is Coding.UNIT8:
        return QuantizedField(torch.from_numpy(rng.integers(0, 256, count).astype(np.uint8)), None, coding)
    kind = torch.float32 if coding is Coding.FLOAT32 else torch.float16
    return QuantizedField(torch.from_numpy(rng.standard_normal(count)).to(kind), None, coding)


@st.composite
def supports(draw, most=400):
    size = draw(st.integers(1, most))
    how = draw(st.sampled_from(["any", "none", "all", "first", "last", "run"]))
    if how == "any":
        chosen = draw(st.sets(st.integers(0, size - 1)))
    elif how == "run":
        begin = draw(st.integers(0, size - 1))
        chosen = set(range(begin, draw(st.integers(begin, size))))
    else:
        chosen = {"none": set(), "all": set(range(size)), "first": {0}, "last": {size - 1}}[how]
    return size, torch.tensor(sorted(chosen), dtype=torch.int64)


@st.composite
def sent_packets(draw):
    size, support = draw(supports())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dense = draw(st.booleans())
    names = draw(st.lists(st.sampled_from(wire.FIELD_NAMES), unique=True, max_size=3))
    count = size if dense else len(support)
    fields = {name: codes(draw(st.sampled_from(Coding)), count, rng) for name in names}
    scalars = {
        name: torch.tensor(float(rng.standard_normal()), dtype=torch.float32) for name in draw(st.sets(st.sampled_from(wire.SCALAR_NAMES)))
    }
    return Packet(size, None if dense else support, fields, scalars)


@given(sent_packets(), st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_every_packet_is_decoded_as_it_was_encoded(packet, against, data):
    reference = None
    if against:
        reference = torch.tensor(sorted(data.draw(st.sets(st.integers(0, packet.size - 1)))), dtype=torch.int64)
    encoded = encode(packet, ADDRESS, reference)
    message = encoded.to_bytes()
    assert len(message) == encoded.length
    assert same(decode(message, ADDRESS, packet.size, reference), packet)


def test_a_seed_packet_is_decoded_as_it_was_encoded():
    packet = seed_packet(2**63 + 5, 1000)
    assert same(decode(encode(packet, ADDRESS).to_bytes(), ADDRESS, 1000), packet)


def entropy_bytes(n, m):
    return (lgamma(n + 1) - lgamma(m + 1) - lgamma(n - m + 1)) / log(2) / 8


def pa_packet(n, m, seed=0):
    rng = np.random.default_rng(seed)
    support = torch.from_numpy(np.sort(rng.choice(n, m, replace=False)))
    draw = client_sampler(0, 0, 0, 0, [0], torch.float32)
    values = torch.from_numpy(rng.standard_normal((1, n), dtype=np.float32))
    packet = sparse_packet(support[None], {"weights": values}, 8, draw)
    gates = quantize_gates(torch.from_numpy(rng.random((1, m), dtype=np.float32)), 8, draw, "gates")
    return Packet(n, packet.support, {**packet.fields, "gates": gates}, {"default_gate": torch.tensor([0.3])}).unstack()[0]


@pytest.mark.parametrize(
    ("n", "m", "positions", "whole"),
    [(7_840, 392, 290, 1_125), (44_426, 2_221, 1_620, 6_110), (48_608, 243, 285, 815), (1_606_024, 8_030, 9_200, 25_320)],
)
def test_a_flops_pa_packet_costs_less_than_the_papers_figure_for_fed_iter_ht(n, m, positions, whole):
    encoded = [encode(pa_packet(n, m, seed), ADDRESS) for seed in range(5)]
    assert max(len(e.positions) for e in encoded) <= positions
    assert max(e.length for e in encoded) <= whole < 4 * m
    assert np.mean([len(e.positions) for e in encoded]) < 1.035 * entropy_bytes(n, m) + 2


def test_positions_against_a_broadcast_support_cost_less_than_a_bit_each():
    n, m = 44_426, 2_221
    rng = np.random.default_rng(1)
    reference = np.sort(rng.choice(n, m, replace=False))
    kept = rng.choice(reference, m - 111, replace=False)
    added = rng.choice(np.setdiff1d(np.arange(n), reference), 111, replace=False)
    support = torch.from_numpy(np.sort(np.concatenate((kept, added))))
    packet = Packet(n, support, {}, {})
    encoded = encode(packet, ADDRESS, torch.from_numpy(reference))
    assert 8 * len(encoded.positions) / m <= 1.0
    assert same(decode(encoded.to_bytes(), ADDRESS, n, torch.from_numpy(reference)), packet)


def test_an_unchanged_support_costs_nothing_to_repeat():
    support = torch.arange(0, 1000, 20)
    assert len(encode(Packet(1000, support, {}, {}), ADDRESS, support).positions) <= 1


def test_the_smallest_form_is_chosen():
    half = torch.arange(0, 1000, 2)
    assert len(encode(Packet(1000, half, {}, {}), ADDRESS).positions) <= 126  # a bitmap
    few = torch.tensor([3, 999])
    assert len(encode(Packet(1000, few, {}, {}), ADDRESS).positions) <= 4  # Rice gaps


MESSAGE = encode(pa_packet(500, 40), ADDRESS).to_bytes()


@pytest.mark.parametrize("length", range(len(MESSAGE)))
def test_a_truncated_packet_is_refused(length):
    with pytest.raises(PacketError):
        decode(MESSAGE[:length], ADDRESS, 500)


@pytest.mark.parametrize(
    ("address", "size", "text"),
    [
        (ADDRESS._replace(fingerprint=1), 500, "another model"),
        (ADDRESS._replace(round=13), 500, "for round 12, exchange 3; expected 13, 3"),
        (ADDRESS._replace(exchange=0), 500, "expected 12, 0"),
        (ADDRESS, 501, "for 500 parameters; this model has 501"),
    ],
)
def test_a_packet_for_another_model_or_round_is_refused(address, size, text):
    with pytest.raises(PacketError, match=text):
        decode(MESSAGE, address, size)


def sealed(body: bytes) -> bytes:
    from zlib import crc32

    return body + crc32(body).to_bytes(4, "little")


def test_another_version_is_refused():
    with pytest.raises(PacketError, match="version 9"):
        decode(sealed(MESSAGE[:2] + b"\x09" + MESSAGE[3:-4]), ADDRESS, 500)


@given(st.data())
@settings(max_examples=2000, deadline=None)
def test_altered_bytes_under_a_valid_checksum_give_a_packet_or_a_packet_error(data):
    """The checksum is only the first line: whoever forges it still cannot get another exception or an unbounded array."""
    body = bytearray(MESSAGE[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(2, len(body) - 1))
        body[where] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(3, len(body)))
    extra = data.draw(st.binary(max_size=6))
    reference = torch.arange(0, 500, 12) if data.draw(st.booleans()) else None
    try:
        packet = decode(sealed(bytes(body[:cut]) + extra), ADDRESS, 500, reference)
    except PacketError:
        return
    if packet.support is not None:
        assert (packet.support.diff() > 0).all() and (len(packet.support) == 0 or (0 <= packet.support[0] and packet.support[-1] < 500))


def malformed(rng: np.random.Generator, other: bytes) -> bytes:
    """A truncated, bit-flipped, spliced or random string, half of them under a valid checksum."""
    body = bytearray(MESSAGE[:-4])
    how = rng.integers(4)
    if how == 0:
        body = body[: rng.integers(len(body))]
    elif how == 1:
        for where in rng.integers(0, len(body), rng.integers(1, 4)):
            body[where] ^= 1 << int(rng.integers(8))
    elif how == 2:
        body = body[: rng.integers(len(body))] + other[rng.integers(len(other)) : -4]
    else:
        body = bytearray(MESSAGE[:2] + rng.bytes(int(rng.integers(1, 120))))
    return sealed(bytes(body)) if rng.random() < 0.5 else bytes(body) + MESSAGE[-4:]


def refuse_malformed(count: int) -> tuple[int, int]:
    """How many strings were refused, and the most memory a decoder took, in bytes."""
    rng = np.random.default_rng(count)
    reference = torch.arange(0, 500, 12)
    other = encode(Packet(500, torch.arange(3, 499, 12), {}, {}), ADDRESS, reference).to_bytes()
    refused = most = 0
    for i in range(count):
        message = malformed(rng, other)
        traced = i % 200 == 0  # tracing every one would take hours
        if traced:
            tracemalloc.start()
        try:
            decode(message, ADDRESS, 500, reference)
        except PacketError:
            refused += 1
        if traced:
            most = max(most, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    return refused, most


def test_malformed_strings_are_refused_in_bounded_memory():
    refused, most = refuse_malformed(10_000)
    assert refused > 9_000  # what is left differs from the message only in its values
    assert most < 1 << 20


@pytest.mark.long
def test_a_million_malformed_strings_are_refused_in_bounded_memory():
    refused, most = refuse_malformed(1_000_000)
    assert refused > 900_000
    assert most < 1 << 20


def test_a_packet_cannot_ask_for_more_memory_than_its_bytes_pay_for():
    """A short message that announces the largest size and count this model allows."""
    n = 100_000_000
    body = MESSAGE[:8] + b"".join(map(wire.encode_varint, (12, 3, n, n // 2))) + b"\x10\x30" + b"\x00" * 40
    tracemalloc.start()
    with pytest.raises(PacketError):
        decode(sealed(body), ADDRESS, n)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(PacketError):
        decode(data, ADDRESS, 500)


def test_values_that_are_not_numbers_are_refused():
    for bad in (float("nan"), float("inf")):
        packet = Packet(3, None, {"theta": QuantizedField(torch.tensor([1.0, bad, 2.0]), None, Coding.FLOAT32)}, {})
        with pytest.raises(PacketError, match="not finite"):
            decode(encode(packet, ADDRESS).to_bytes(), ADDRESS, 3)


def ternary_list(num_vectors, count=4, size=500, seed=0):
    rng = np.random.default_rng(seed)
    support = torch.from_numpy(np.stack([np.sort(rng.choice(size, count, replace=False)) for _ in range(num_vectors)]))
    signs = torch.from_numpy(rng.choice(np.array([-1, 1], dtype=np.int8), (num_vectors, count)))
    return Packet(size, support, {"update": QuantizedField(signs, torch.rand(num_vectors) + 0.1, Coding.SIGNS)}, {})


@pytest.mark.parametrize(("num_vectors", "count", "size"), [(1, 4, 500), (7, 30, 500), (3, 9, 9), (200, 1, 2)])
def test_a_list_of_vectors_is_decoded_as_it_was_encoded(num_vectors, count, size):
    packet = ternary_list(num_vectors, count, size)
    message = encode(packet, ADDRESS)
    assert same(decode(message.to_bytes(), ADDRESS, size, accept_lists=True), packet)
    alone = wire.encode_stack(packet, num_vectors, ADDRESS)
    assert message.payload == sum(one.payload for one in alone) and message.paper_bytes == 4 * num_vectors * count


def test_an_empty_list_is_decoded_as_it_was_encoded():
    packet = Packet(
        500,
        torch.zeros((0, 4), dtype=torch.int64),
        {"update": QuantizedField(torch.zeros((0, 4), dtype=torch.int8), torch.zeros(0), Coding.SIGNS)},
        {},
    )
    assert same(decode(encode(packet, ADDRESS).to_bytes(), ADDRESS, 500, accept_lists=True), packet)


def test_a_reply_that_is_a_list_is_refused():
    with pytest.raises(PacketError, match="unknown kind 4"):
        decode(encode(ternary_list(2), ADDRESS).to_bytes(), ADDRESS, 500)


def test_a_list_cannot_ask_for_more_memory_than_its_bytes_pay_for():
    n = 1_000_000
    header = MESSAGE[:3] + bytes([wire.KIND_LIST]) + MESSAGE[4:8]
    body = header + b"".join(map(wire.encode_varint, (12, 3, n, n, 30))) + b"\x10\x67" + bytes(40)
    tracemalloc.start()
    with pytest.raises(PacketError, match="30 vectors of 1000000 signs do not fit"):
        decode(sealed(body), ADDRESS, n, accept_lists=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


@given(st.data())
@settings(max_examples=1000, deadline=None)
def test_an_altered_list_gives_a_list_or_a_packet_error(data):
    body = bytearray(encode(ternary_list(5), ADDRESS).to_bytes()[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(2, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        packet = decode(sealed(bytes(body[: data.draw(st.integers(3, len(body)))])), ADDRESS, 500, accept_lists=True)
    except PacketError:
        return
    if packet.support is not None and packet.support.numel():
        assert (packet.support.diff() > 0).all() and packet.support.min() >= 0 and packet.support.max() < 500


def vectors():
    """The messages printed in docs/wire-format.md, in their order."""
    text = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    return [bytes.fromhex(line) for line in re.findall(r"^ {6}([0-9a-f]+)$", text, flags=re.MULTILINE)]


def test_the_specifications_test_vectors_are_what_is_written_and_read():
    twenty = torch.arange(0, 1000, 20)
    moved = torch.tensor(sorted(set(range(0, 1000, 20)) - {40} | {50}))
    written = [
        (seed_packet(42, 1000), None),
        (Packet(4, None, {"theta": QuantizedField(torch.tensor([0.5, -1, 0, 2]), None, Coding.FLOAT32)}, {}), None),
        (
            Packet(
                100,
                torch.tensor([3, 17, 40, 41, 99]),
                {
                    "weights": QuantizedField(torch.tensor([1, -2, 3, -128, 127], dtype=torch.int8), torch.tensor(0.25), Coding.MIDPOINT8),
                    "gates": QuantizedField(torch.tensor([0, 1, 128, 254, 255], dtype=torch.uint8), None, Coding.UNIT8),
                },
                {"default_gate": torch.tensor(0.5)},
            ),
            None,
        ),
        (
            Packet(
                1000, moved, {"theta": QuantizedField(torch.full((50,), -8, dtype=torch.int8), torch.tensor(1.0), Coding.MIDPOINT4)}, {}
            ),
            twenty,
        ),
        (
            Packet(
                10,
                torch.tensor([[1, 4], [0, 9]]),
                {"update": QuantizedField(torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8), torch.tensor([0.5, 2.0]), Coding.SIGNS)},
                {},
            ),
            None,
        ),
    ]
    assert len(vectors()) == len(written)
    for message, (packet, reference) in zip(vectors(), written, strict=True):
        assert encode(packet, ADDRESS, reference).to_bytes() == message
        assert same(decode(message, ADDRESS, packet.size, reference, accept_lists=True), packet)
    assert [message[3] for message in vectors()] == [wire.KIND_SEED, wire.KIND_DENSE, wire.KIND_SUBSET, wire.KIND_DIFF, wire.KIND_LIST]
