"""Messages of a hostile client: numbers that overflow, packets that need much memory, counts that are lies."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.reply_validation import ReplyLimits, validate_replies
from fedsieve.core.types import Clock, ExchangeResult, Traffic
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import initial_state
from fedsieve.runtime.rounds import train
from fedsieve.storage import checkpoint
from fedsieve.wire import positions
from helpers.runs import small_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
HUGE = 3.4e38


# Numbers that are finite until they are decoded


def poisoned(packet: Packet) -> Packet:
    """The reply with the largest scale that is finite, and the largest codes."""
    fields = {}
    for name, values in packet.fields.items():
        if values.scale is None:
            fields[name] = values._replace(codes=torch.full_like(values.codes, HUGE)) if values.codes.is_floating_point() else values
        else:
            fields[name] = values._replace(scale=torch.full_like(values.scale, HUGE), codes=torch.full_like(values.codes, 127))
    return packet._replace(fields=fields)


@pytest.mark.parametrize("name", ["fed-sgd", "flops", "fed-avg", "sieve"])
@pytest.mark.parametrize("bits", [32, 8])
def test_one_reply_that_overflows_when_it_is_decoded_is_rejected(name, bits):
    run = small_run(name)
    if bits in run.algorithm.allowed_bits:
        run = small_run(name, algorithm=replace(run.algorithm, bits=bits))
    simulation = Simulation(run)
    honest = simulation.make_exchange(simulation.client_data, run.seed)

    def exchange(clock, packet, clients):
        result = honest(clock, packet, clients)
        replies = [reply._replace(packet=poisoned(reply.packet)) if i == 0 else reply for i, reply in enumerate(result.replies)]
        return result._replace(replies=replies)

    state = initial_state(run, simulation).server
    for result in train(run.algorithm, state, simulation.population, 0.5, exchange, 2, run.seed, limits=simulation.reply_limits):
        assert any("a value is not finite, or above" in reason for _, reason in result.rejected)
        assert result.replied
        assert checkpoint.find_non_finite(result.server) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2e18, -HUGE])
def test_every_value_that_is_not_finite_or_overflows_is_rejected(value):
    run = small_run("fed-avg")
    size = run.objective.layout.size
    sent = Packet(size, None, {"theta": QuantizedField(torch.zeros(size), None, Coding.FLOAT32)}, {})
    codes = torch.zeros(size)
    codes[3] = value
    reply = Packet(size, None, {"theta": QuantizedField(codes, None, Coding.FLOAT32)}, {})
    came = ExchangeResult([wire_reply(reply)], [], Traffic(), Traffic())
    found = validate_replies(run.algorithm, sent, came, [0], Clock(0, 2), ReplyLimits(), torch.float32)
    assert not found.replies and "not finite" in found.rejected[0][1]


def wire_reply(packet):
    from fedsieve.core.types import Reply

    return Reply(0, packet, 5)


# Checkpoints


def test_a_state_that_is_not_finite_is_not_checkpointed(tmp_path):
    run = small_run("sieve")
    state = initial_state(run, Simulation(run)).server
    checkpoint.save(tmp_path, 1, state, {})
    before = sorted(path.name for path in tmp_path.iterdir())
    for field in ("weights", "log_alpha", "multiplier"):
        bad = state._replace(**{field: torch.full_like(getattr(state, field), float("nan"))})
        with pytest.raises(checkpoint.CheckpointError, match=f"its {field} is not finite"):
            checkpoint.save(tmp_path, 2, bad, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_poisoned_checkpoint_is_passed_over_for_the_last_finite_one(tmp_path, monkeypatch):
    run = small_run("sieve")
    state = initial_state(run, Simulation(run)).server
    checkpoint.save(tmp_path, 1, state, {})
    monkeypatch.setattr(checkpoint, "find_non_finite", lambda _: None)  # as an older version wrote it
    checkpoint.save(tmp_path, 2, state._replace(weights=torch.full_like(state.weights, float("nan"))), {})
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and latest.rounds_done == 1
    assert "its weights is not finite" in latest.damage_reports[0]


# Memory


def crafted_subset(parameter: int, count: int, num_bytes: int) -> bytes:
    """Positions with any Rice parameter: the first bits are ones, the rest zeros."""
    bits = np.zeros(8 * num_bytes, np.uint8)
    bits[:count] = 1
    return bytes((parameter,)) + np.packbits(bits).tobytes()


def decode_peak(data: bytes, count: int, size: int) -> tuple[int, int]:
    """Return the peak of memory while positions are decoded, and the bytes of the result (0 if they are refused)."""
    tracemalloc.start()
    try:
        result = positions.read_subset(positions.Reader(data), count, size).nbytes
    except wire.PacketError:
        result = 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, result


@pytest.mark.parametrize("parameter", [0, 1, 2, 4, 8, 16, 24, 31, 32, 254])
@pytest.mark.parametrize("count", [1_000, 100_000, 450_000])
def test_no_rice_parameter_takes_much_memory_beyond_the_result(parameter, count):
    size = 1_000_000
    data = crafted_subset(parameter, count, max(count * (min(parameter, 31) + 1) // 8 + 1, 20_000))
    peak, result = decode_peak(data, count, size)
    assert peak <= 8 * len(data) + result + (1 << 20)


@pytest.mark.parametrize("count", [10, 1_000, 30_000, 200_000, 500_000, 999_999])
def test_honest_positions_are_decoded_with_little_memory(count):
    size = 1_000_000
    support = np.sort(np.random.default_rng(0).choice(size, count, replace=False))
    data = positions._plan_subset(support, size)[1]()
    peak, result = decode_peak(data, count, size)
    assert result == support.nbytes
    assert peak <= 8 * len(data) + result + (1 << 20)


def test_a_parameter_far_from_the_typical_gap_is_refused():
    data = crafted_subset(31, 100_000, 400_000)
    with pytest.raises(wire.PacketError, match="Rice parameter 31 is not near the typical gap"):
        positions.read_subset(positions.Reader(data), 100_000, 1_000_000)
