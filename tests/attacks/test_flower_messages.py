"""Hostile messages over Flower: counts that are lies, and malformed broadcasts to a client."""

import random
from functools import cache
from zlib import crc32

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsieve import wire
from fedsieve.algorithms import ALGORITHMS
from fedsieve.core.random import server_sampler
from fedsieve.core.types import Clock
from fedsieve.deployment import flower_messages
from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.deployment.flower import FlowerExchange, make_client_app
from fedsieve.runtime.rounds import initial_broadcast, initial_server
from helpers.flower import task

CONFIG = {"clients": 5, "rounds": 2, "density": 0.1, "algorithm.name": "flops-pa", "algorithm.local-steps": 2, "algorithm.batch-size": 8}
CONFIG |= {"quorum": 0.5, "retries": 0, "round-seconds": 0.5, "start-seconds": 0.5}
NUM_MALFORMED = 1000
NUM_FORGED = 50
DEPLOYMENT = deployment_config(CONFIG, task.OBJECTIVE)


@pytest.fixture(autouse=True)
def task_identity(monkeypatch):
    for name, value in (("task_id", 1), ("run_id", 1), ("node_id", 1)):
        monkeypatch.setattr(TaskIdentity, f"_{name}", value)
    monkeypatch.setattr(flower_messages, "POLL_SECONDS", 0.001)


def announcement(client, num_examples):
    return ConfigRecord({"client": client, "examples": num_examples, "row": [40]})


class AnnouncingGrid:
    """A grid whose nodes announce these numbers of examples."""

    get_nodes = Grid.get_nodes

    def __init__(self, counts):
        self.counts, self.replies = counts, {}

    def get_node_ids(self):
        return [100 + client for client in self.counts]

    def push_messages(self, messages):
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            client = message.metadata.dst_node_id - 100
            self.replies[str(number)] = Message(RecordDict({"reply": announcement(client, self.counts[client])}), reply_to=message)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, identifiers):
        return [self.replies.pop(identifier) for identifier in identifiers]


def claim(exchange, client, num_examples):
    """The n_k that the server uses for a reply with this claim."""
    message = Message(RecordDict(), 100 + client, flower_messages.TRAIN_MESSAGE)
    return exchange._num_examples(client, Message(RecordDict({"reply": announcement(client, num_examples)}), reply_to=message))


def test_a_client_that_claims_2_to_the_62_examples_counts_as_ten_median_clients():
    exchange = FlowerExchange(DEPLOYMENT, AnnouncingGrid({0: 60, 1: 70, 2: 2**62, 3: 80, 4: 90}))
    exchange.wait_for_clients()
    assert [claim(exchange, client, count) for client, count in exchange.directory.num_examples.items()] == [60, 70, 800, 80, 90]


def test_a_claim_is_fixed_when_the_client_announces_it():
    grid = AnnouncingGrid({0: 60, 1: 70, 2: 75, 3: 80, 4: 90})
    exchange = FlowerExchange(DEPLOYMENT, grid)
    exchange.wait_for_clients()
    with pytest.raises(wire.PacketError, match="it claims 71 examples, and announced 70"):
        claim(exchange, 1, 71)
    exchange.directory._nodes.pop(1)  # its node returns, and announces more
    grid.counts[1] = 500
    exchange.directory.wait_for([1], 1, 0.05)
    assert exchange.directory.num_examples[1] == 70
    assert "announced 70 examples before, and 500 now" in exchange.directory.errors()


def test_a_limit_of_the_user_replaces_the_default():
    limited = deployment_config(CONFIG | {"max-claimed-examples": 5000}, task.OBJECTIVE)
    exchange = FlowerExchange(limited, AnnouncingGrid({0: 60, 1: 70, 2: 4000, 3: 80, 4: 90}))
    exchange.wait_for_clients()
    assert claim(exchange, 2, 4000) == 4000


# Malformed broadcasts


@cache
def honest_broadcast():
    clock = Clock(0, 2)
    packet = initial_broadcast(DEPLOYMENT.algorithm, DEPLOYMENT.objective, 0, clock, DEPLOYMENT.dtype)
    return clock, wire.encode(packet, DEPLOYMENT.message_id(clock)).to_bytes()


def malformed_content(chance):
    """The records of a broadcast with one or several changes."""
    clock, data = honest_broadcast()
    fields = dict(clock._asdict())
    for name in list(fields):
        if chance.random() < 0.4:
            fields[name] = chance.choice([0, -1, 1, 2**62, 10**9, 1.5, True, "x", b"", [1, 2]])
        if chance.random() < 0.1:
            del fields[name]
    changed = bytearray(data)
    for _ in range(chance.choice([0, 0, 1, 3])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    data = bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.2 else changed)
    array = Array(
        dtype=chance.choice(["uint8", "float32"]), shape=(len(data),), stype=chance.choice([flower_messages.PACKET_TYPE, "x"]), data=data
    )
    content = {"packet": ArrayRecord({chance.choice(["packet", "packet", "other"]): array}), "clock": ConfigRecord(fields)}
    if chance.random() < 0.2:
        del content[chance.choice(list(content))]
    if chance.random() < 0.1:
        content["clock"] = ArrayRecord({})
    return content


def test_malformed_broadcasts_are_refused_and_crash_no_client():
    engine = DEPLOYMENT.client_engine(0, *task.load_examples(0))
    app = make_client_app(lambda _: engine)
    context = Context(run_id=1, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    chance = random.Random(0)
    num_refused = 0
    for _ in range(NUM_MALFORMED):
        try:
            app(Message(RecordDict(malformed_content(chance)), 1, flower_messages.TRAIN_MESSAGE), context)
        except wire.PacketError:
            num_refused += 1
    assert num_refused > 0.8 * NUM_MALFORMED


def deployment_of(algorithm):
    return deployment_config({"clients": 5, "rounds": 4, "density": 0.1, "algorithm.name": algorithm}, task.OBJECTIVE)


@cache
def messages_of_all_algorithms():
    """Broadcasts and replies of every algorithm in several rounds, with their clocks."""
    found = []
    for algorithm in ALGORITHMS:
        deployment = deployment_of(algorithm)
        server = initial_server(deployment.algorithm, deployment.objective, 0, deployment.dtype)
        engine = deployment.client_engine(0, *task.load_examples(0))
        for clock in (Clock(0, 4), Clock(1, 4), Clock(3, 4)):
            packet = deployment.algorithm.broadcast(server, clock, server_sampler(0, clock.round, 0, deployment.dtype))
            message_id, size = deployment.message_id(clock), deployment.objective.layout.size
            reply, _ = engine.run_client(clock, wire.encode(packet, message_id).to_bytes(), 0)
            found += [(clock, packet), (clock, wire.decode(reply.to_bytes(), message_id, size, packet.support))]
    return found


def change_bytes(data, chance):
    """The packet with a few bytes changed, inserted or deleted, and the checksum that belongs to it."""
    changed = bytearray(data[: -wire.CHECKSUM_BYTES])
    for _ in range(chance.choice([0, 0, 1, 2, 4])):
        place, width = chance.randrange(len(changed)), chance.choice([0, 1, 1, 4])
        changed[place : place + width] = chance.randbytes(chance.choice([0, 1, 1, 4]))
    return bytes(changed) + crc32(changed).to_bytes(wire.CHECKSUM_BYTES, "little")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_of_other_algorithms_and_changed_ones_with_a_checksum_crash_no_client(algorithm):
    deployment = deployment_of(algorithm)
    engine, chance = deployment.client_engine(0, *task.load_examples(0)), random.Random(algorithm)
    app = make_client_app(lambda _: engine)
    num_refused = 0
    for clock, packet in [chance.choice(messages_of_all_algorithms()) for _ in range(NUM_FORGED)]:
        data = change_bytes(wire.encode(packet, deployment.message_id(clock)).to_bytes(), chance)
        fields = clock._asdict() | ({"memory": chance.choice([0, 1, -1, "x", 2**40])} if chance.random() < 0.2 else {})
        fields |= {chance.choice(Clock._fields): chance.choice([0, 1, 2, 3, 5])} if chance.random() < 0.2 else {}
        context = Context(run_id=1, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
        content = {"packet": flower_messages.to_array_record(data), "clock": ConfigRecord(fields)}
        try:
            app(Message(RecordDict(content), 1, flower_messages.TRAIN_MESSAGE), context)
        except wire.PacketError:
            num_refused += 1
    assert 0.2 * NUM_FORGED < num_refused < NUM_FORGED
