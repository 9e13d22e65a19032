"""How sieve's gates move where rows are few, and when its search is over before its time."""

from dataclasses import replace

import pytest
import torch

from fedsieve.algorithms.sieve import Sieve
from fedsieve.algorithms.sieve_rules import Uplink
from fedsieve.core.aggregation import Aggregator
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.quantization import Coding
from fedsieve.core.random import server_sampler
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Clock, Reply
from fedsieve.data.synthetic import Synthetic
from fedsieve.runtime.rounds import initial_server
from helpers.sieve import MODEL, POLISH, SEARCH, SIEVE, begun, draw, stepped, trained


@pytest.mark.parametrize(
    ("options", "rows", "clock", "pace"),
    [
        ({}, 8.0, SEARCH, 0.5),
        ({}, 9.0, SEARCH, None),
        ({}, 0.0, SEARCH, None),
        ({}, 8.0, POLISH, None),
        ({"uplink": Uplink.WEIGHTS}, 8.0, SEARCH, None),
        ({"sparsity_allocation": BudgetRule.ERK}, 8.0, SEARCH, None),
    ],
)
def test_where_rows_are_few_a_broadcast_asks_for_half_the_steps_of_gates(options, rows, clock, pace):
    sieve = replace(SIEVE, **options)
    server = initial_server(sieve, MODEL, 3, torch.float64)._replace(rows=torch.tensor(rows))
    assert sieve.broadcast(server, clock, server_sampler(3, 0, 0, torch.float64, "cpu")).scalars.get("pace") == pace


def test_gates_then_move_half_as_far():
    _, _, client = begun()
    asked = client._replace(packet=client.packet._replace(scalars=client.packet.scalars | {"pace": torch.tensor(0.5)}))
    usual, careful = (stepped(each, steps=1).log_alpha - client.log_alpha for each in (client, asked))
    assert (usual != 0).any()
    torch.testing.assert_close(careful, usual / 2)


@pytest.mark.parametrize(
    ("options", "rows", "changed", "found"),
    [
        ({}, 9.0, 4.0, True),
        ({}, 9.0, 5.0, False),
        ({}, 8.0, 4.0, False),
        ({}, 0.0, 4.0, False),
        ({"search": 0.8}, 9.0, 4.0, False),
        ({"uplink": Uplink.WEIGHTS}, 9.0, 4.0, False),
        ({"aggregator": Aggregator.MEDIAN}, 9.0, 4.0, False),
    ],
)
def test_a_support_that_stood_still_for_a_fifth_of_the_rounds_is_found_unless_rows_are_few_or_the_search_was_typed(
    options, rows, changed, found
):
    sieve = replace(SIEVE, **options)
    server = initial_server(sieve, MODEL, 3, torch.float64)._replace(rows=torch.tensor(rows), changed=torch.tensor(changed))
    assert sieve.found(server, Clock(15, 50)) is found
    assert sieve.found(server, Clock(40, 50))


def test_fewer_than_five_rounds_without_a_change_are_chance():
    server = initial_server(SIEVE, MODEL, 3, torch.float64)._replace(rows=torch.tensor(9.0), changed=torch.tensor(1.0))
    assert [SIEVE.found(server, Clock(number, 10)) for number in (5, 6, 7)] == [False, False, True]


def after_a_round(sieve, weights, aggregations=1, clock=SEARCH):
    """The server after replies to a broadcast, when it holds these weights for its mask; it last changed in the round before."""
    server, packet, client = begun(clock, sieve)
    reply = sieve.client_reply(stepped(client, clock, sieve=sieve), clock, draw(step=4)).unstack()[0]
    server = server._replace(weights=weights(packet.support_mask(torch.float64)), changed=torch.tensor(1.0, dtype=torch.float64))
    for _ in range(aggregations):
        server = sieve.aggregate(server, packet, [Reply(i, reply, 8) for i in range(5)], clock, draw())
    return server


def test_the_server_knows_the_round_that_last_changed_its_support():
    kept, moved = (lambda mask: 9.0 * mask), (lambda mask: 9.0 * mask.flip(0))
    assert after_a_round(SIEVE, kept).changed == 1
    assert after_a_round(SIEVE, kept, aggregations=3).changed == 1
    assert after_a_round(SIEVE, moved).changed == 2


@pytest.mark.parametrize("wide", [{"density_schedule": DensitySchedule.CUBIC, "initial_density": 0.3}, {"warmup": 5}])
def test_a_support_that_is_wider_than_the_model_is_not_found(wide):
    assert after_a_round(replace(SIEVE, **wide), lambda mask: 9.0 * mask).changed == 2


LATE = Clock(7, 10)
"""Still in the search, for all the clock says."""


def test_gates_of_the_support_that_stand_open_tell_clients_that_it_is_found():
    server, _, _ = begun()
    chosen = SIEVE.top_mask(server.weights, server.log_alpha, MODEL.layout, 0.1)
    server = server._replace(log_alpha=torch.where(chosen, 8.0, -6.0).double(), rows=torch.tensor(9.0))
    noise = server_sampler(3, 0, 0, torch.float64, "cpu")
    packet = SIEVE.broadcast(server._replace(changed=torch.tensor(2.0)), LATE, noise)
    assert packet.scalars["kept_gate"] < 8
    packet = SIEVE.broadcast(server._replace(changed=torch.tensor(1.0)), LATE, noise)
    assert packet.scalars["kept_gate"] == 8
    assert packet.fields["weights"].coding is Coding.MIDPOINT8
    client = SIEVE.client_init(packet, MODEL.layout, LATE, torch.float64)
    client = stepped(type(client)(client.weights[None], client.log_alpha[None], *client[2:]), LATE)
    reply = SIEVE.client_reply(client, LATE, draw(step=4))
    assert reply.support[0].tolist() == packet.support.tolist()
    assert reply.fields["update"].coding is Coding.MIDPOINT4
    assert SIEVE.public_support(packet, LATE).tolist() == packet.support.tolist()


def test_no_start_of_the_gates_says_that_the_support_is_found():
    _, packet, _ = begun(sieve=replace(SIEVE, initial_gate_probability=1 - 1e-9))
    assert 7.9 < packet.scalars["kept_gate"] < 8


@pytest.mark.usefixtures("few_test_rows")
def test_on_an_easy_task_the_search_ends_early_and_the_constraint_holds_from_there_on():
    rows = [
        step.metrics for step in trained("lr", 0.1, Synthetic(num_examples=2000, num_features=50, true_density=0.1), Sieve(), rounds=40)
    ]
    end = next(number for number, row in enumerate(rows) if row["expected_density"] < 0.5)
    assert 8 <= end < 24
    assert all(abs(row["expected_density"] - 0.1) < 0.005 for row in rows[end:])
    assert max(row["bytes_up_positions"] for row in rows[end + 1 :]) == 4  # one byte a reply: where the broadcast has them
    assert rows[-1]["tdr"] == 1
