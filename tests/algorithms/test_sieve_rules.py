"""What sieve does where nobody typed it: what travels, how much of it, for how long, in what steps."""

from dataclasses import replace

import pytest
import torch

from fedsieve.algorithms.sieve import Sieve
from fedsieve.algorithms.sieve_rules import Ending, Uplink
from fedsieve.core.aggregation import Aggregator
from fedsieve.core.budgets import BudgetRule, budget_total
from fedsieve.core.private_mean import GaussianMechanism
from fedsieve.core.quantization import Coding
from fedsieve.core.random import server_sampler
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Clock, Reply
from fedsieve.data.synthetic import Synthetic
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.rounds import initial_server
from helpers.sieve import FIRST, MODEL, POLISH, SEARCH, SIEVE, begun, draw, stepped, trained


@pytest.mark.parametrize(("density", "sent"), [(0.025, 12), (0.1, 18), (0.5, 60)])
def test_signs_are_four_times_what_the_model_keeps_but_a_part_of_all_or_as_many_as_it_keeps_at_most(density, sent):
    sieve = replace(SIEVE, density=density, search=0.8)
    _, _, client = begun(sieve=sieve)
    reply = sieve.client_reply(stepped(client, sieve=sieve), SEARCH, draw(step=4))
    assert reply.support.shape == (1, sent)


@pytest.mark.parametrize(("wanted", "sent"), [(0.0, 18), (0.9, 18), (0.13, 15), (0.05, 12), (1e-9, 12)])
def test_the_server_asks_for_as_many_signs_as_told_most_between_what_the_model_keeps_and_that_bound(wanted, sent):
    _, _, client = begun(signs=wanted)
    assert SIEVE.client_reply(stepped(client), SEARCH, draw(step=4)).support.shape == (1, sent)


@pytest.mark.parametrize(
    "other",
    [
        {"privacy": GaussianMechanism(1.0, 1.0, 1.0, 2)},
        {"aggregator": Aggregator.MEDIAN},
        {"sparsity_allocation": BudgetRule.ERK},
        {"uplink": Uplink.WEIGHTS},
    ],
)
def test_where_clients_are_hidden_or_not_trusted_or_layers_differ_or_weights_travel_none_says_how_many_signs_it_would_send(other):
    sieve = replace(SIEVE, **other)
    _, packet, client = begun(sieve=sieve)
    reply = sieve.client_reply(stepped(client, sieve=sieve), SEARCH, draw(step=4))
    assert "signs" not in {*packet.scalars, *reply.scalars, *sieve.all_reply_fields}
    assert reply.support.shape == (1, 12 if "uplink" in other else 18)


@pytest.mark.usefixtures("few_test_rows")
def test_fewer_signs_are_sent_as_gates_close():
    steps = trained("mc", 0.05, Synthetic(num_examples=400, num_features=100, true_density=0.05), Sieve(), rounds=20)
    wanted, up = zip(*((float(step.result.server.signs), step.metrics["bytes_up_positions"]) for step in steps[:16]), strict=True)
    assert min(wanted[2:12]) > 0.1 > 0.05 > max(wanted[14:])
    assert max(up[15:]) < 0.5 * min(up[2:12])


@pytest.mark.parametrize(
    ("options", "searching", "polishing", "reply"),
    [
        ({}, Coding.MIDPOINT4, Coding.MIDPOINT8, Coding.MIDPOINT4),
        ({"uplink": Uplink.WEIGHTS}, Coding.MIDPOINT8, Coding.MIDPOINT8, Coding.MIDPOINT8),
        ({"density": 0.01}, Coding.MIDPOINT8, Coding.MIDPOINT8, Coding.MIDPOINT8),
        ({"bits": 16}, Coding.FLOAT16, Coding.FLOAT16, Coding.FLOAT16),
    ],
)
def test_values_are_coarse_where_updates_travel_fine_once_the_support_is_found_and_what_was_typed_otherwise(
    options, searching, polishing, reply
):
    sieve = replace(SIEVE, **options)
    server = initial_server(sieve, MODEL, 3, torch.float64)
    for clock, coding in ((SEARCH, searching), (POLISH, polishing)):
        packet = sieve.broadcast(server, clock, server_sampler(3, clock.round, 0, torch.float64, "cpu"))
        assert packet.fields["weights"].coding is coding
    _, _, client = begun(POLISH)
    assert sieve.client_reply(stepped(client, POLISH), POLISH, draw(step=4)).fields[sieve.field].coding is reply


@pytest.mark.parametrize(
    ("sieve", "rows", "clock", "rate"),
    [
        (SIEVE, 0.0, SEARCH, 2.0),
        (SIEVE, 48.0, SEARCH, 2.0),
        (SIEVE, 47.0, SEARCH, 3.0),
        (replace(SIEVE, server_learning_rate=0.5), 8.0, SEARCH, 1.5),
        (replace(SIEVE, server_learning_rate=0.5), 8.0, POLISH, 0.5),
        (replace(SIEVE, uplink=Uplink.WEIGHTS), 8.0, SEARCH, 1.0),
        (SIEVE, 8.0, POLISH, 1.0),
        (SIEVE, 48.0, Clock(9, 10), 1.0),
    ],
)
def test_the_server_goes_twice_as_far_along_signs_and_thrice_where_rows_are_few(sieve, rows, clock, rate):
    server = initial_server(sieve, MODEL, 3, torch.float64)._replace(rows=torch.tensor(rows))
    assert sieve.boldness(server, 5, clock) == rate


@pytest.mark.parametrize(("density", "sent"), [(0.005, "weights"), (0.01, "weights"), (0.011, "update"), (0.5, "update")])
def test_weights_travel_where_the_model_keeps_a_hundredth_or_less_unless_told(density, sent):
    sieve = replace(SIEVE, density=density)
    _, packet, _ = begun(sieve=SIEVE)
    assert sieve.expected_reply_fields(packet, SEARCH) >= {sent}
    assert replace(sieve, uplink=Uplink.UPDATES).expected_reply_fields(packet, SEARCH) >= {"update"}


@pytest.mark.parametrize(
    ("density", "spread", "rows", "width"),
    [
        (0.05, 0.121, 1e9, -1.0),  # spread: the density decides, here for signs
        (0.05, 0.119, 1e9, 0.3),  # narrow: weights, six times as many at first
        (0.05, 0.119, 0.0091 * 120, 0.3),
        (0.05, 0.119, 0.0089 * 120, 0.05),  # too few rows to fill so many
        (0.005, 0.01, 1e9, 0.03),
        (0.01, 0.19, 1e9, 0.0),  # signs at low densities, where weights would travel
        (0.01, 0.21, 1e9, -1.0),
        (0.05, 0.063, 1e9, 0.3),
        (0.05, 0.062, 1e9, 0.05),  # no wider than what the model keeps
        (0.6, 0.1, 1e9, 0.6),
    ],
)
def test_how_far_the_first_updates_are_spread_decides_what_travels_and_how_wide_messages_begin(density, spread, rows, width):
    assert replace(SIEVE, density=density).wanted(spread, rows, MODEL.layout) == pytest.approx(width)


def test_the_first_replies_say_over_which_part_of_all_weights_their_updates_are_spread_and_the_server_decides_once():
    sieve = replace(SIEVE, density=0.05)
    server, packet, client = begun(FIRST, sieve)
    update = torch.zeros(2, MODEL.layout.size, dtype=torch.float64)
    update[0, :12], update[1, :11] = 0.5, -0.3
    log_alpha = torch.where(update == 0.5, -12.0, 8.0).double()  # shut gates hide nothing here
    held = client._replace(weights=packet.field_dense("weights", torch.float64) + update, log_alpha=log_alpha)
    reply = sieve.client_reply(held, FIRST, draw(step=4, clients=(0, 1)))
    torch.testing.assert_close(120 * reply.scalars["spread"], torch.tensor([12.0, 11.0]))
    assert {*reply.fields, *reply.scalars} == sieve.expected_reply_fields(packet, FIRST)
    replies = [Reply(i, reply.unstack()[i], 64) for i in range(2)]
    after = sieve.aggregate(server, packet, replies, FIRST, draw())
    assert float(after.width) == pytest.approx(0.3)
    few = [said._replace(num_examples=63 + i) for i, said in enumerate(replies)]
    assert float(sieve.aggregate(server, packet, few, FIRST, draw()).width) == -1.0  # a few rows are narrow whatever they are
    wide = replies[0].packet._replace(scalars=replies[0].packet.scalars | {"spread": torch.tensor(0.5)})
    uneven = [Reply(0, wide, 1000), replies[1]._replace(num_examples=10)]
    assert float(sieve.aggregate(server, packet, uneven, FIRST, draw()).width) == -1.0  # who has more rows says more
    later = sieve.broadcast(after, SEARCH, server_sampler(3, 2, 0, torch.float64, "cpu"))
    said = later._replace(scalars={name: later.scalars[name] for name in ("kept_gate", "default_gate")})
    assert sieve.aggregate(after, later, [Reply(0, said, 40)], SEARCH, draw()).width == after.width


@pytest.mark.parametrize(
    "other",
    [
        {"privacy": GaussianMechanism(1.0, 1.0, 1.0, 2)},
        {"aggregator": Aggregator.MEDIAN},
        {"sparsity_allocation": BudgetRule.ERK},
        *({"uplink": kind} for kind in Uplink),
    ],
)
def test_where_clients_are_hidden_or_not_trusted_or_layers_differ_or_it_was_told_the_first_round_decides_nothing(other):
    sieve = replace(SIEVE, **other)
    _, packet, client = begun(FIRST, sieve)
    reply = sieve.client_reply(stepped(client, FIRST, sieve=sieve), FIRST, draw(step=4))
    assert "spread" not in {*reply.scalars, *sieve.expected_reply_fields(packet, FIRST), *sieve.all_reply_fields}


@pytest.mark.parametrize(
    ("density", "width", "clock", "field", "coding", "cut"),
    [
        (0.1, 0.3, SEARCH, "weights", Coding.MIDPOINT4, True),
        (0.1, 0.3, POLISH, "weights", Coding.MIDPOINT4, True),
        (0.1, 0.1, SEARCH, "weights", Coding.MIDPOINT8, False),
        (0.01, 0.0, SEARCH, "update", Coding.SIGNS, False),
        (0.01, 0.0, POLISH, "update", Coding.MIDPOINT4, False),
    ],
)
def test_clients_do_what_the_broadcast_says_was_decided(density, width, clock, field, coding, cut):
    sieve = replace(SIEVE, density=density)
    _, packet, client = begun(clock, sieve, width=width)
    assert float(packet.scalars["width"]) == pytest.approx(width)
    held = stepped(client, clock, sieve=sieve)
    reply = sieve.client_reply(held, clock, draw(step=4))
    assert reply.fields[field].coding is coding and {*reply.fields, *reply.scalars} == sieve.expected_reply_fields(packet, clock)
    most = budget_total(sieve.heeding(packet).message_budget(MODEL.layout, clock))
    assert (int((held.weights != 0).sum()) <= most) is cut


def test_what_was_typed_stands_whatever_is_decided():
    sieve = replace(SIEVE, density_schedule=DensitySchedule.CONSTANT, bits=16)
    found = sieve.fitted(0.3)
    assert (found.uplink, found.density_schedule, found.bits) == (Uplink.WEIGHTS, DensitySchedule.CONSTANT, 16)
    assert sieve.fitted(-1.0) is sieve
    assert replace(SIEVE, anneal_end=0.4).fitted(0.3).anneal_end == 0.4
    assert SIEVE.fitted(0.3).anneal_end == SIEVE.searched


def test_steps_of_weights_are_half_as_long_again_where_they_are_cut_to_falling_messages(monkeypatch):
    monkeypatch.setattr(Sieve, "projected", lambda _, weights, *__: weights)
    falling, constant = (
        replace(SIEVE, uplink=Uplink.WEIGHTS, density_schedule=kind) for kind in (DensitySchedule.CUBIC, DensitySchedule.CONSTANT)
    )
    _, _, client = begun()
    brisk, usual = (stepped(client, steps=1, sieve=sieve).weights - client.weights for sieve in (falling, constant))
    torch.testing.assert_close(brisk, 1.5 * usual)


def test_no_message_says_a_width_where_the_density_decides():
    _, packet, _ = begun()
    assert "width" not in packet.scalars


@pytest.mark.parametrize(
    ("options", "rows", "remembered"),
    [
        ({}, 9.0, 0.97),
        ({}, 0.0, 0.97),
        ({}, 8.0, 0.98),
        ({"uplink": Uplink.WEIGHTS}, 9.0, 0.98),
        ({"residual_decay": 0.5}, 9.0, 0.5),
        ({"residual_decay": 0.0}, 8.0, 0.0),
    ],
)
def test_where_a_round_says_little_the_server_remembers_more_unless_told(options, rows, remembered):
    sieve = replace(SIEVE, **options)
    assert sieve.remembered(initial_server(sieve, MODEL, 3, torch.float64)._replace(rows=torch.tensor(rows))) == remembered


def test_from_fewer_open_gates_than_it_is_to_keep_the_target_is_the_density_at_once():
    sieve = replace(SIEVE, density=0.5, initial_gate_probability=0.05)
    assert [sieve.open_density(Clock(number, 10)) for number in range(10)] == [0.5] * 10


@pytest.mark.parametrize(("logit", "opens"), [(0.05, 0.2039), (0.5, 0.8296), (0.95, 0.9893)])
def test_the_gates_target_falls_from_where_they_start_along_a_cube_to_the_density_when_the_search_ends(logit, opens):
    sieve = replace(SIEVE, initial_gate_probability=logit)
    for number, left in ((3, 1 - 0.5**3), (7, 0.0), (9, 0.0)):
        assert sieve.open_density(Clock(number, 10)) == pytest.approx(0.1 + (opens - 0.1) * left, abs=1e-4)


@pytest.mark.parametrize(
    ("typed", "noisy"), [({}, False), ({"uplink": Uplink.WEIGHTS}, True), ({"density": 0.011}, True), ({"ending": Ending.FROZEN}, True)]
)
def test_gates_are_open_while_searching_where_weights_travel_by_rule_and_only_there(typed, noisy):
    sieve, log_alpha = replace(SIEVE, **{"density": 0.01, **typed}), torch.zeros(1, MODEL.layout.size, dtype=torch.float64)
    assert bool((sieve.gate(log_alpha, MODEL.layout, SEARCH, draw()) != 1).any()) is noisy


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ({}, [6, 3, 2, 1, 1, 1]),
        ({"density_schedule": DensitySchedule.CONSTANT}, [1] * 6),
        ({"uplink": Uplink.WEIGHTS}, [1] * 6),
        ({"uplink": Uplink.UPDATES}, [1] * 6),
        ({"density": 0.02}, [2] * 6),
        ({"density": 0.02, "density_schedule": DensitySchedule.CUBIC}, [12, 7, 4, 2, 2, 2]),
    ],
)
def test_messages_fall_where_weights_travel_by_rule_unless_told_and_local_steps_stay_whole(typed, kept):
    sieve, layout = replace(SIEVE, **{"density": 0.01, **typed}), Linear(loss=Loss.SQUARED, num_features=100, num_outputs=1).layout
    assert [budget_total(sieve.message_budget(layout, Clock(number, 10))) for number in range(6)] == kept
    assert not sieve.cuts


def carried(sieve, rows=8.0):
    """How many of 120 weights the broadcast of each of ten rounds carries, after rounds of so many rows; one of all names no positions."""
    server = initial_server(sieve, MODEL, 3, torch.float64)._replace(rows=torch.tensor(rows))
    packets = [sieve.broadcast(server, Clock(number, 10), server_sampler(3, number, 0, torch.float64, "cpu")) for number in range(10)]
    return [packet.fields["weights"].codes.numel() for packet in packets]


def test_where_rows_are_few_half_as_many_weights_again_are_on_trial_and_fewer_each_round_until_the_search_ends():
    assert carried(SIEVE) == [18, 17, 16, 15, 15, 14, 13, 12, 12, 12]
    assert carried(replace(SIEVE, density=0.8)) == [120, 96, 96, 96, 96, 96, 96, 96, 96, 96]
    assert carried(replace(SIEVE, density=0.8, search=0.8)) == [120, 120, 120, 120, 120, 114, 108, 102, 96, 96]


@pytest.mark.parametrize(("density", "search", "rounds"), [(0.005, None, 8), (0.1, None, 8), (0.2, None, 4), (0.4, None, 2), (0.4, 0.7, 7)])
def test_fewer_rounds_are_searched_the_more_is_kept_unless_told(density, search, rounds):
    sieve = replace(SIEVE, density=density, search=search)
    assert [sieve.searching(Clock(number, 10)) for number in range(10)] == [True] * rounds + [False] * (10 - rounds)


@pytest.mark.parametrize(("sieve", "rows"), [(SIEVE, 10.0), (SIEVE, 0.0), (replace(SIEVE, uplink=Uplink.WEIGHTS), 8.0)])
def test_with_rows_enough_or_unknown_or_where_weights_travel_nothing_is_on_trial(sieve, rows):
    assert set(carried(sieve, rows)) == {12}


def test_under_a_falling_schedule_messages_are_the_schedules():
    falling = replace(SIEVE, density_schedule=DensitySchedule.CUBIC, initial_density=0.3)
    assert carried(falling) == [budget_total(falling.message_budget(MODEL.layout, Clock(number, 10))) for number in range(10)]


@pytest.mark.parametrize(("private", "rows"), [(None, 12), (GaussianMechanism(1.0, 1.0, 1.0, 2), 0)])
def test_the_server_knows_the_mean_of_the_rows_its_rounds_had_unless_clients_are_hidden(private, rows):
    server, packet, client = begun()
    told = replace(SIEVE, uplink=Uplink.UPDATES)
    reply = told.client_reply(stepped(client), SEARCH, draw(step=4)).unstack()[0]
    for number, counts in enumerate(((3, 5), (7, 9))):
        replies = [Reply(i, reply, count) for i, count in enumerate(counts)]
        noise = server_sampler(3, number, 0, torch.float64, "cpu")
        server = replace(told, privacy=private).aggregate(server, packet, replies, Clock(number, 10), noise)
    assert server.rows == rows


@pytest.mark.parametrize("ending", Ending)
def test_what_is_on_trial_in_the_last_round_of_the_search_does_not_count_when_it_ends(ending):
    sieve, last = replace(SIEVE, ending=ending), Clock(4, 6)
    server, packet, client = begun(last)
    server = server._replace(rows=torch.tensor(8.0, dtype=torch.float64))
    reply = SIEVE.client_reply(stepped(client, last), last, draw(step=4)).unstack()[0]
    after = sieve.aggregate(server, packet, [Reply(i, reply, 1) for i in range(5)], last, draw())
    assert sieve.sent(after, last) > 0.1
    assert float(sieve.diagnostics(after)["expected_density"]) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("sieve", "beside"),
    [
        (SIEVE, True),
        (replace(SIEVE, ending=Ending.FROZEN), False),
        (replace(SIEVE, uplink=Uplink.WEIGHTS), False),
        (replace(SIEVE, density=0.2, search=0.8), False),
    ],
)
def test_while_the_support_is_polished_other_weights_of_a_client_move_too_and_stay_with_it(sieve, beside):
    shut = torch.tensor([8.0, -12.0], dtype=torch.float64)
    _, packet, client = begun(POLISH)
    kept = packet.support_mask(torch.float64) > 0
    client = client._replace(log_alpha=torch.where(kept, *shut)[None])
    after = stepped(client, POLISH, steps=2, sieve=sieve)
    assert bool((after.weights[0, ~kept] != 0).all()) is beside
    assert (after.weights[0, kept] != client.weights[0, kept]).all()
    assert torch.equal(sieve.client_reply(after, POLISH, draw(step=4)).support[0], packet.support)


@pytest.mark.parametrize("clock", [SEARCH, POLISH])
def test_where_weights_travel_under_a_falling_schedule_a_reply_is_all_that_a_client_holds(clock):
    falling = replace(SIEVE, uplink=Uplink.WEIGHTS, density_schedule=DensitySchedule.CUBIC, initial_density=0.3, bits=32)
    server = initial_server(falling, MODEL, 3, torch.float64)
    packet = falling.broadcast(server, clock, server_sampler(3, clock.round, 0, torch.float64, "cpu"))
    client = falling.client_init(packet, MODEL.layout, clock, torch.float64)
    client = type(client)(*(part[None] if isinstance(part, torch.Tensor) else part for part in client))
    kept = budget_total(falling.message_budget(MODEL.layout, clock))
    for steps in (1, 2, 4):
        held = stepped(client, clock, steps, falling)
        assert int((held.weights != 0).sum()) <= kept
    if clock is SEARCH:
        reply = falling.client_reply(held, clock, draw(step=4))
        torch.testing.assert_close(reply.field_dense("weights", torch.float64), held.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sieve", [replace(SIEVE, uplink=Uplink.WEIGHTS), replace(SIEVE, density_schedule=DensitySchedule.CUBIC)])
def test_else_a_client_holds_more_than_it_sends_while_it_looks(sieve):
    _, _, client = begun()
    held = stepped(client, sieve=sieve)
    assert int((held.weights != 0).sum()) > budget_total(sieve.message_budget(MODEL.layout, SEARCH))


@pytest.mark.parametrize(("clock", "shorter"), [(SEARCH, 5**0.5), (POLISH, 1.0)])
def test_the_signs_of_fewer_than_five_replies_are_followed_in_shorter_steps(clock, shorter):
    """The mean of as many equal replies is the same; only its noise, in general, is not. Polished weights are numbers, followed in full."""
    server, packet, client = begun(clock)
    reply = SIEVE.client_reply(stepped(client, clock), clock, draw(step=4)).unstack()[0]
    sent, kept = packet.field_dense("weights", torch.float64), server.weights - packet.field_dense("weights", torch.float64)

    def moved(count):
        replies = [Reply(i, reply, 8) for i in range(count)]
        return replace(SIEVE, residual_decay=0.9).aggregate(server, packet, replies, clock, draw()).weights - sent - 0.9 * kept

    assert moved(5).abs().max() > 0
    torch.testing.assert_close(moved(5), shorter * moved(1))
    torch.testing.assert_close(moved(8), moved(5))
