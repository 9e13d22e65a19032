"""Replies are looked at before they count: what is malformed, not finite, too long or claims too much has no say."""

import pytest
import torch

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.core.packets import Packet, seed_packet
from fedsieve.core.quantization import Coding, QuantizedField
from fedsieve.core.reply_validation import ReplyLimits, validate_replies
from fedsieve.core.types import Clock, ExchangeResult, Reply, Traffic

SIZE = 12
METHOD = algorithm_class("fed-avg")(density=0.5)
CLOCK = Clock(0, 10)


def packet(values, support=None, field="theta", size=SIZE):
    return Packet(size, support, {field: QuantizedField(torch.as_tensor(values, dtype=torch.float32), None, Coding.FLOAT32)}, {})


SENT = packet(torch.linspace(-1, 1, SIZE))


def moved_by(step):
    return packet(torch.linspace(-1, 1, SIZE) + step)


def screen(replies, cohort=None, **limits):
    came = ExchangeResult(replies, [(99, "lost on the way")], Traffic(), Traffic())
    found = validate_replies(
        METHOD, SENT, came, list(range(len(replies))) if cohort is None else cohort, CLOCK, ReplyLimits(**limits), torch.float32
    )
    assert (99, "lost on the way") in found.rejected
    return [reply.client for reply in found.replies], dict(found.rejected)


GOOD = moved_by(0.1)
HALF = torch.arange(6)
MALFORMED = {
    "expected theta": [
        packet(torch.zeros(SIZE), field="gates"),
        Packet(SIZE, None, {}, {}),
        seed_packet(1, SIZE),
        GOOD._replace(scalars={"default_gate": torch.tensor(0.0)}),
    ],
    "parameters": [packet(torch.zeros(SIZE + 1), size=SIZE + 1)],
    "positions": [
        packet(torch.zeros(6), HALF.flip(0)),
        packet(torch.zeros(6), HALF + 7),
        packet(torch.zeros(6), HALF - 1),
        packet(torch.zeros(6), torch.zeros(6, dtype=torch.int64)),
        packet(torch.zeros(6), HALF.to(torch.int32)),
        packet(torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
    ],
    "one value for each": [
        packet(torch.zeros(5), HALF),
        packet(torch.zeros(3)),
        packet(torch.zeros(1, SIZE)),
        GOOD._replace(fields={"theta": QuantizedField(torch.zeros(SIZE, dtype=torch.int8), None, Coding.LEVELS8)}),
        GOOD._replace(fields={"theta": QuantizedField(torch.zeros(SIZE, dtype=torch.float64), None, Coding.FLOAT32)}),
    ],
}


@pytest.mark.parametrize(("reason", "bad"), [(reason, bad) for reason, packets in MALFORMED.items() for bad in packets])
def test_a_malformed_reply_is_rejected_with_the_reason_and_the_others_count(reason, bad):
    kept, rejected = screen([Reply(0, GOOD, 5), Reply(1, bad, 5), Reply(2, GOOD, 5)])
    assert kept == [0, 2]
    assert reason in rejected[1]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_rejects_the_reply(number):
    values = torch.zeros(SIZE)
    values[3] = number
    kept, rejected = screen([Reply(0, GOOD, 5), Reply(1, packet(values), 5)])
    assert kept == [0]
    assert "not finite" in rejected[1]


def test_numbers_count_up_to_the_limit_at_which_their_squares_overflow():
    assert screen([Reply(0, packet(torch.full((SIZE,), 9e17)), 1)])[0] == [0]
    assert "above 1e+18" in screen([Reply(0, packet(torch.full((SIZE,), 3e38)), 1)])[1][0]


@pytest.mark.parametrize("examples", [0, -1, 101, 2**70, float("nan")])
def test_a_claim_of_examples_outside_its_bounds_is_rejected(examples):
    kept, rejected = screen([Reply(0, GOOD, 100), Reply(1, GOOD, examples)], max_claimed_examples=100)
    assert kept == [0]
    assert "claims" in rejected[1]


def test_a_second_reply_and_one_of_a_client_that_was_not_asked_are_rejected():
    kept, rejected = screen([Reply(0, GOOD, 5), Reply(0, GOOD, 5), Reply(7, GOOD, 5)], cohort=[0, 1])
    assert kept == [0]
    assert rejected.keys() == {0, 7, 99}


def test_an_update_far_longer_than_the_median_and_the_model_is_rejected():
    replies = [Reply(client, moved_by(step), 5) for client, step in enumerate((0.1, 0.1, 0.1, 0.6, 5.0))]
    assert screen(replies, max_norm_ratio=5.0)[0] == [0, 1, 2, 3]
    assert screen(replies, max_norm_ratio=100.0)[0] == [0, 1, 2, 3, 4]
    assert screen(replies)[0] == [0, 1, 2, 3, 4]


def test_a_difference_shorter_than_the_model_passes_however_short_the_others_are():
    replies = [Reply(client, moved_by(step), 5) for client, step in enumerate((1e-6, 1e-6, 1e-6, 0.5))]
    assert screen(replies, max_norm_ratio=5.0)[0] == [0, 1, 2, 3]


def test_a_number_that_is_none_does_not_move_the_median():
    replies = [Reply(client, moved_by(step), 5) for client, step in enumerate((0.1, 0.1, 5.0, *[float("nan")] * 3))]
    assert screen(replies, max_norm_ratio=10.0)[0] == [0, 1]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_reply_that_repeats_the_broadcast_has_no_difference(method):
    """Where both directions speak of the same thing; gradients and updates are differences themselves."""
    algorithm = algorithm_class(method)(density=0.5)
    if not algorithm.all_reply_fields & {"theta", "weights"}:
        return
    from fedsieve.core.random import server_sampler
    from fedsieve.core.types import Clock, Layout

    draw, clock = server_sampler(0, 0, 0, torch.float64), Clock(0, 4)
    server = algorithm.init(Layout(SIZE, {"all": (slice(0, SIZE), (SIZE,))}), torch.randn(SIZE, dtype=torch.float64), draw)
    sent = algorithm.broadcast(server, clock, draw)
    for part in algorithm.client_deltas(sent, [Reply(0, sent, 1)], torch.float64).values():
        assert not part.any()


@pytest.mark.parametrize(
    ("name", "sound", "wrong", "reason"),
    [
        ("kept_gate", 12.0, (13.0, -1e30), "outside its limits"),
        ("default_gate", 12.0, (13.0, -1e30), "outside its limits"),
    ],
)
def test_a_gate_outside_its_limits_is_rejected(name, sound, wrong, reason):
    algorithm = algorithm_class("sieve")(density=0.5)
    usual = {"kept_gate": torch.tensor(1.0), "default_gate": torch.tensor(0.0)}

    def reply(number):
        return packet(torch.ones(SIZE), field="update")._replace(scalars=usual | {name: torch.tensor(number)})

    sent = packet(torch.ones(SIZE), field="weights")._replace(scalars=usual)
    came = ExchangeResult([Reply(i, reply(number), 1) for i, number in enumerate((sound, *wrong))], [], Traffic(), Traffic())
    found = validate_replies(algorithm, sent, came, [0, 1, 2], CLOCK, ReplyLimits(), torch.float32)
    assert [r.client for r in found.replies] == [0]
    assert all(reason in dict(found.rejected)[client] for client in (1, 2))
