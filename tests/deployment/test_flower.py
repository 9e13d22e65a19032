"""The exchange exchange Flower, with a grid in memory instead of processes."""

import json
import time

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsieve import wire
from fedsieve.core.random import server_sampler
from fedsieve.core.types import Clock
from fedsieve.deployment import flower, flower_messages
from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.deployment.flower import FlowerExchange, QuorumError, make_client_app
from fedsieve.deployment.flower_messages import ANNOUNCE_MESSAGE, TRAIN_MESSAGE
from fedsieve.deployment.server import deployed_model, run_server
from fedsieve.models.sparse_model import read_model, to_safetensors
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.rounds import Population, initial_server, train
from fedsieve.storage.checkpoint import SettingsChangedError
from helpers.flower import run_batched, task

CONFIG = {"clients": 3, "rounds": 2, "seed": 11, "density": 0.1, "precision": "double", "algorithm.name": "flops-pa"}
CONFIG |= {"algorithm.local-steps": 4, "algorithm.batch-size": 8, "quorum": 0.5, "retries": 1, "round-seconds": 0.5, "start-seconds": 0.5}


@pytest.fixture(autouse=True)
def task_identity(monkeypatch):
    """Flower's messages belong to a task of a run; outside Flower's runtime the test sets it."""
    for name, value in (("task_id", 1), ("run_id", 1), ("node_id", 1)):
        monkeypatch.setattr(TaskIdentity, f"_{name}", value)
    monkeypatch.setattr(flower_messages, "POLL_SECONDS", 0.001)


class InMemoryGrid(Grid):
    """A grid whose nodes reply immediately: {node id: function from message to reply, or to None for no reply}."""

    def __init__(self, nodes):
        self.nodes, self.replies, self.asked, self.count = nodes, {}, [], 0

    set_run = run = create_message = send_and_receive = None

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        identifiers = []
        for message in messages:
            self.count += 1
            assert message.metadata.ttl > 0, "Flower rejects a message without time to live"
            message.metadata.__dict__["_message_id"] = str(self.count)
            self.asked.append((message.metadata.dst_node_id, message.metadata.message_type))
            reply = self.nodes[message.metadata.dst_node_id](message)
            if reply is not None:
                self.replies[str(self.count)] = reply
            identifiers.append(str(self.count))
        return identifiers

    def pull_messages(self, identifiers):
        return [self.replies.pop(identifier) for identifier in identifiers if identifier in self.replies]


def build_deployment(**changes):
    return deployment_config(CONFIG | {name.replace("_", "-"): value for name, value in changes.items()}, task.OBJECTIVE)


def honest_node(client, **changes):
    app = make_client_app(lambda _: build_deployment(**changes).client_engine(client, *task.load_examples(client)))
    context = Context(run_id=1, node_id=1, node_config={"partition-id": client}, state=RecordDict(), run_config={})
    return lambda message: app(message, context)


def failing_node(message):
    return Message(Error(2, "<class 'OSError'>:<'no\n rows'>"), reply_to=message)


def corrupt_node(client, change):
    """A node that announces itself honestly, and replies with its honest reply changed."""
    honest = honest_node(client)

    def run(message):
        reply = honest(message)
        return reply if message.metadata.message_type == ANNOUNCE_MESSAGE else change(reply)

    return run


def build_exchange(nodes, **changes):
    deployment = build_deployment(**changes)
    return deployment, FlowerExchange(deployment, InMemoryGrid(nodes))


def run_exchange(deployment, exchange, clients=(0, 1, 2)):
    clock = Clock(1, 2)
    server = initial_server(deployment.algorithm, deployment.objective, deployment.seed, deployment.dtype)
    packet = deployment.algorithm.broadcast(server, clock, server_sampler(deployment.seed, 1, 0, deployment.dtype))
    return exchange(clock, packet, list(clients))


def honest_nodes(**changes):
    return {100 + client: honest_node(client, **changes) for client in range(3)}


@pytest.mark.parametrize("algorithm", ["flops-pa", "sign-ht", "ssfl", "fed-dst", "eden"])
def test_a_run_over_a_grid_has_the_bits_of_the_batched_engine(algorithm, tmp_path):
    changes = {"algorithm.name": algorithm}
    deployment, exchange = build_exchange(honest_nodes(**changes), run_dir=str(tmp_path / "run"), **changes)
    run_server(deployment, exchange)
    model, packets, rounds = run_batched(deployment, tmp_path / "packets.json")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["bytes_up"] for row in rows] == [done.uplink.total for done in rounds]
    assert sum(row["bytes_down"] for row in rows) == sum(3 * len(packet) // 2 for packet in packets["broadcasts"])


def interrupt_run(deployment, rounds):
    """Run a deployment that is interrupted after some rounds."""

    class InterruptedExchange(FlowerExchange):
        def __call__(self, clock, *rest):
            if clock.round == rounds:
                raise SystemExit
            return super().__call__(clock, *rest)

    with pytest.raises(SystemExit):
        run_server(deployment, InterruptedExchange(deployment, InMemoryGrid(honest_nodes())))


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, capsys):
    deployment = build_deployment(run_dir=str(tmp_path / "run"), rounds=4)
    for rounds in (0, 1, 3):
        interrupt_run(deployment, rounds)
    other_timeouts = build_deployment(run_dir=str(tmp_path / "run"), rounds=4, round_seconds=0.7, quorum=0.3)
    run_server(other_timeouts, FlowerExchange(other_timeouts, InMemoryGrid(honest_nodes())))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == run_batched(deployment, tmp_path / "packets.json")[0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert "3 of 4 rounds are done; resuming" in capsys.readouterr().out


def test_a_finished_run_is_not_changed_and_asks_no_client(tmp_path):
    deployment, exchange = build_exchange(honest_nodes(), run_dir=str(tmp_path / "run"))
    run_server(deployment, exchange)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = FlowerExchange(deployment, InMemoryGrid({}))
    run_server(deployment, again)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_run_does_not_resume_with_other_settings(tmp_path):
    interrupt_run(build_deployment(run_dir=str(tmp_path / "run")), 1)
    other = build_deployment(run_dir=str(tmp_path / "run"), density=0.2)
    with pytest.raises(SettingsChangedError, match=r"density was 0.1, is 0.2"):
        run_server(other, FlowerExchange(other, InMemoryGrid(honest_nodes())))


def test_a_round_without_enough_valid_replies_is_not_stored(tmp_path):
    deployment, exchange = build_exchange(honest_nodes(), run_dir=str(tmp_path / "run"), max_claimed_examples=65)
    with pytest.raises(QuorumError, match=r"round 1: 1 replies are valid, 2 are needed; client 1: it claims 70 examples"):
        run_server(deployment, exchange)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_the_model_of_a_deployment_is_a_sparse_model_file(tmp_path):
    deployment, exchange = build_exchange(honest_nodes(), run_dir=str(tmp_path / "run"))
    run_server(deployment, exchange)
    model = read_model(tmp_path / "run" / "model.safetensors")
    assert model.num_nonzero == 4 and model.metadata.input_shape == (40,) and model.metadata.algorithm == "flops-pa"
    x, _ = task.load_examples(0)
    assert np.allclose(model.predict(x.astype(np.float32))[:, 0], x @ model.to_dense(), atol=1e-5)


def test_nodes_announce_their_client_once_and_replies_are_in_client_order():
    deployment, exchange = build_exchange({30: honest_node(2), 10: honest_node(1), 20: honest_node(0)})
    assert exchange.wait_for_clients() == [0, 1, 2]
    for _ in range(2):
        assert [reply.client for reply in run_exchange(deployment, exchange).replies] == [0, 1, 2]
    assert sorted(message_type for _, message_type in exchange.grid.asked) == [ANNOUNCE_MESSAGE] * 3 + [TRAIN_MESSAGE] * 6


def test_a_node_that_returns_with_its_key_serves_its_client_again():
    deployment, exchange = build_exchange(honest_nodes())
    exchange.wait_for_clients()
    node = exchange.grid.nodes.pop(101)
    result = run_exchange(deployment, exchange)
    assert [reply.client for reply in result.replies] == [0, 2]
    assert result.rejected == [(1, "no node serves it")]
    exchange.grid.nodes[101] = node
    assert [reply.client for reply in run_exchange(deployment, exchange).replies] == [0, 1, 2]


@pytest.mark.parametrize("is_online", [True, False])
def test_a_second_node_that_claims_a_client_is_refused_and_the_first_is_asked(is_online):
    deployment, exchange = build_exchange(honest_nodes())
    exchange.wait_for_clients()
    first = exchange.grid.nodes.pop(101)
    exchange.grid.nodes |= {500: honest_node(1)} | ({101: first} if is_online else {})
    run_exchange(deployment, exchange)
    exchange.grid.nodes[101] = first
    assert [reply.client for reply in run_exchange(deployment, exchange).replies] == [0, 1, 2]
    assert exchange.directory.node_of(1) == 101
    assert "node 500: client 1 belongs to node 101" in exchange.directory.errors()
    assert exchange.grid.asked.count((500, TRAIN_MESSAGE)) == 0


@pytest.mark.parametrize(("name", "is_accepted"), [("client-1", False), ("client-12", False), ("client-0", True), ("Lyon", True)])
def test_a_key_that_is_registered_as_a_client_serves_only_this_client(name, is_accepted):
    _, exchange = build_exchange({100: honest_node(2), 101: honest_node(1), 102: honest_node(0)})
    exchange.grid.get_nodes = lambda: [NodeInfo(node_id=node, name=name if node == 102 else "") for node in exchange.grid.nodes]
    exchange.wait_for_clients()
    assert exchange.directory.node_of(0) == (102 if is_accepted else None)
    assert (f"it announces client 0, and its key is registered as {name}" in exchange.directory.errors()) != is_accepted


def test_a_node_for_a_client_that_does_not_exist_changes_nothing():
    hostile = {500 + i: lambda message, i=i: reply_with(client=3 + i, examples=2**62)(honest_node(2)(message)) for i in range(4)}
    _, exchange = build_exchange(hostile | honest_nodes())
    assert exchange.wait_for_clients() == [0, 1, 2]
    assert exchange.max_counted_examples == flower.MAX_CLAIM_RATIO * 70


# Nodes that do not answer


def test_a_node_that_never_replies_delays_a_round_by_the_grace_period_only():
    deployment, exchange = build_exchange(honest_nodes() | {101: corrupt_node(1, lambda _: None)}, round_seconds=600.0, grace_seconds=0.2)
    exchange.wait_for_clients()
    start = time.monotonic()
    result = run_exchange(deployment, exchange)
    assert 0.2 < time.monotonic() - start < 30
    assert [reply.client for reply in result.replies] == [0, 2]
    ((client, reason),) = result.rejected
    assert client == 1 and reason.startswith("no reply within 0.")


def test_bad_replies_do_not_count_for_the_quorum_that_ends_a_round():
    """Two hostile clients of three reply at once; the honest one is waited for, whatever the grace period."""
    calls = []

    def reply_late(grid):
        pull = grid.pull_messages

        def pull_messages(identifiers):
            calls.append(1)
            return pull(identifiers) if len(calls) > 100 or grid.asked[int(identifiers[0]) - 1] != (100, TRAIN_MESSAGE) else []

        grid.pull_messages = pull_messages

    hostile = {100 + client: corrupt_node(client, packet_with(data=b"nothing of the kind")) for client in (1, 2)}
    deployment, exchange = build_exchange(honest_nodes() | hostile, quorum=0.3, round_seconds=60.0, grace_seconds=0.0)
    exchange.wait_for_clients()
    reply_late(exchange.grid)
    assert [reply.client for reply in run_exchange(deployment, exchange).replies] == [0]


def test_the_others_have_the_time_that_all_need_at_the_pace_of_the_quorum(monkeypatch):
    clock = iter([100.0, 108.0, 127.0, 132.0])
    monkeypatch.setattr(flower.time, "monotonic", lambda: next(clock))
    deadline = flower.ReplyDeadline(600.0, min_replies=2, num_asked=5, grace_seconds=10.0)
    deadline.note_replies(1)
    deadline.note_replies(2)  # after 8 seconds
    deadline.note_replies(3)
    assert deadline.seconds == 8 * 5 / 2 + 10
    assert [deadline.has_passed(), deadline.has_passed()] == [False, True]


def test_a_node_that_does_not_announce_itself_does_not_keep_others_out():
    """It is online from the start; the others come later, and the run starts when all are there."""
    deployment, exchange = build_exchange({500: lambda _: None}, start_seconds=60.0, round_seconds=600.0, grace_seconds=0.2)
    looks = []

    def get_node_ids():
        looks.append(1)
        exchange.grid.nodes |= honest_nodes() if len(looks) == 3 else {}
        return list(exchange.grid.nodes)

    exchange.grid.get_node_ids = get_node_ids
    start = time.monotonic()
    exchange.wait_for_clients()
    assert "node 500: it has not announced" in exchange.directory.errors()
    exchange.grid.nodes[501] = lambda _: None  # another one in the run
    assert [reply.client for reply in run_exchange(deployment, exchange).replies] == [0, 1, 2]
    assert time.monotonic() - start < 30


def test_a_run_below_the_quorum_does_not_start_and_lists_missing_nodes():
    _, exchange = build_exchange({100: honest_node(0), 200: failing_node})
    with pytest.raises(QuorumError, match=r"1 of 3 clients have a node after 0.5 s, 2 are needed.*partition-id 1, 2.*'no rows'"):
        exchange.wait_for_clients()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"row": "abc"}, "lacks the shape"), ({"row": [-1]}, "lacks the shape"), ({"row": [7]}, ""), ({"client": -1}, "lacks the client")],
)
def test_a_node_with_an_invalid_announcement_does_not_stop_the_others(tmp_path, fields, reason):
    honest = honest_node(1)
    deployment, exchange = build_exchange(
        honest_nodes() | {101: lambda message: reply_with(**fields)(honest(message))}, run_dir=str(tmp_path / "run")
    )
    run_server(deployment, exchange)
    assert read_model(tmp_path / "run" / "model.safetensors").metadata.input_shape == (40,)
    assert reason in exchange.directory.errors()


def test_a_run_starts_without_some_nodes_if_there_is_a_quorum():
    deployment, exchange = build_exchange({100: honest_node(0), 101: honest_node(1)})
    assert exchange.wait_for_clients() == [0, 1, 2]
    assert run_exchange(deployment, exchange).rejected == [(2, "no node serves it")]


def test_nodes_that_appear_after_the_time_limit_are_not_asked(monkeypatch):
    monkeypatch.setattr(flower_messages, "POLL_SECONDS", 0.6)  # longer than start-seconds
    _, exchange = build_exchange({})
    new_ids = iter(range(1000, 2000))

    def add_node():
        exchange.grid.nodes[next(new_ids)] = failing_node
        return list(exchange.grid.nodes)

    exchange.grid.get_node_ids = add_node
    with pytest.raises(QuorumError, match="0 of 3 clients have a node"):
        exchange.wait_for_clients()
    assert exchange.grid.asked == [(1000, ANNOUNCE_MESSAGE)]


def test_a_client_without_examples_is_never_sampled():
    deployment = build_deployment()
    empty = make_client_app(lambda _: deployment.client_engine(2, np.zeros((0, 40)), np.zeros(0)))
    context = Context(run_id=1, node_id=1, node_config={"partition-id": 2}, state=RecordDict(), run_config={})
    _, exchange = build_exchange({100: honest_node(0), 101: honest_node(1), 102: lambda message: empty(message, context)})
    assert exchange.wait_for_clients() == [0, 1]


def test_below_the_quorum_clients_without_reply_are_asked_again():
    calls = []

    def reply_to_the_second_request(message):
        calls.append(message.metadata.message_type)
        return None if calls.count(TRAIN_MESSAGE) == 1 and calls[-1] == TRAIN_MESSAGE else honest_node(1)(message)

    deployment, exchange = build_exchange(honest_nodes() | {101: reply_to_the_second_request}, quorum=1.0)
    exchange.wait_for_clients()
    result = run_exchange(deployment, exchange)
    plain, undisturbed = build_exchange(honest_nodes())
    undisturbed.wait_for_clients()
    expected = run_exchange(plain, undisturbed)
    ((client, reason),) = result.rejected
    assert client == 1 and reason.startswith("no reply within 0.")
    for one, other in zip(result.replies, expected.replies, strict=True):
        assert wire.encode(one.packet, deployment.message_id(Clock(1, 2))) == wire.encode(other.packet, deployment.message_id(Clock(1, 2)))
    assert result.uplink == expected.uplink and result.downlink.total == expected.downlink.total * 4 // 3


def test_a_round_below_the_quorum_stops_the_run_with_the_reasons():
    deployment, exchange = build_exchange(
        {100: honest_node(0), 101: corrupt_node(1, lambda reply: None), 102: corrupt_node(2, lambda reply: None)}
    )
    exchange.wait_for_clients()
    with pytest.raises(QuorumError, match=r"round 2: 1 of 3 clients sent a valid reply in 2 tries, 2 are needed \(client 1: no reply"):
        run_exchange(deployment, exchange)


def without(name):
    def change(reply):
        del reply.content[name]
        return reply

    return change


def packet_with(**fields):
    def change(reply):
        array = reply.content["packet"]["packet"]
        plain = {"dtype": array.dtype, "shape": array.shape, "stype": array.stype, "data": array.data} | fields
        reply.content["packet"] = ArrayRecord({"packet": Array(**plain)})
        return reply

    return change


def reply_with(**fields):
    def change(reply):
        reply.content["reply"] = ConfigRecord({**reply.content["reply"], **fields})
        return reply

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("packet"), "no packet"),
        (without("reply"), "lacks the client"),
        (packet_with(stype="numpy.ndarray"), "no packet"),
        (packet_with(dtype="float32"), "no packet"),
        (packet_with(data=b""), "no packet"),
        (packet_with(data=bytes(10**6)), "oversized"),
        (reply_with(examples=-1), "number of examples"),
        (reply_with(examples=1.5), "number of examples"),
        (reply_with(examples=True), "number of examples"),
        (reply_with(client=2), "its node replied for client 2"),
        (failing_node, "it failed: <class 'OSError'>:<'no rows'>"),
        (lambda reply: Message(Error(5, "Node Unavailable - in Flower's words"), reply_to=reply), "its node is offline"),
    ],
)
def test_an_invalid_reply_is_rejected_and_the_others_are_accepted(change, reason):
    deployment, exchange = build_exchange(honest_nodes() | {101: corrupt_node(1, change)})
    exchange.wait_for_clients()
    result = run_exchange(deployment, exchange)
    assert [reply.client for reply in result.replies] == [0, 2]
    ((client, message),) = result.rejected
    assert client == 1 and reason in message


@pytest.mark.parametrize("data", [b"nothing of the kind", bytes(10**6)])
def test_bytes_of_rejected_replies_are_counted(data):
    deployment, exchange = build_exchange(honest_nodes())
    exchange.wait_for_clients()
    honest = run_exchange(deployment, exchange, [0, 2]).uplink.total
    exchange.grid.nodes[101] = corrupt_node(1, packet_with(data=data))
    result = run_exchange(deployment, exchange)
    assert result.uplink.total == honest + len(data)
    assert (
        result.uplink.header + result.uplink.positions + result.uplink.scalars + result.uplink.weights + result.uplink.gates
        == result.uplink.total
    )


def test_a_node_without_partition_id_is_refused():
    app = make_client_app(lambda _: build_deployment().client_engine(0, *task.load_examples(0)))
    for config in ({}, {"partition-id": "0"}):
        context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
        with pytest.raises(ValueError, match="partition-id"):
            app(Message(RecordDict(), 1, ANNOUNCE_MESSAGE), context)


def test_flower_overhead_is_the_message_size_without_the_packet():
    deployment, exchange = build_exchange(honest_nodes())
    exchange.wait_for_clients()
    before = exchange.flower_overhead_down
    result = run_exchange(deployment, exchange)
    content = RecordDict(
        {"packet": flower_messages.to_array_record(b"x" * (result.downlink.total // 3)), "clock": ConfigRecord(Clock(1, 2)._asdict())}
    )
    whole = flower_messages.serialized_size(Message(content, 100, TRAIN_MESSAGE, ttl=0.2, group_id="2"))
    assert abs(exchange.flower_overhead_down - before - 3 * (whole - result.downlink.total // 3)) < 3 * 40


# Clients that keep something between their rounds


def remembering_nodes(method, lost=()):
    """Honest nodes with a context of their own; `lost` is {client: round after which its node loses its context}."""

    def node(client):
        app = make_client_app(lambda _: remembering_deployment(method).client_engine(client, *task.load_examples(client)))
        contexts = [Context(run_id=1, node_id=1, node_config={"partition-id": client}, state=RecordDict(), run_config={})]

        def run(message):
            reply = app(message, contexts[0])
            clock = message.content.config_records.get("clock", {})
            if client in lost and clock.get("round") == lost[client]:
                contexts[0] = Context(run_id=2, node_id=1, node_config={"partition-id": client}, state=RecordDict(), run_config={})
            return reply

        return run

    return {100 + client: node(client) for client in range(3)}


def remembering_deployment(method, **changes):
    return build_deployment(**{"algorithm.name": method, "rounds": 8, "participation": 0.67, **changes})


def run_remembering(method, folder, nodes=None, **changes):
    deployment = remembering_deployment(method, run_dir=str(folder), **changes)
    exchange = FlowerExchange(deployment, InMemoryGrid(nodes or remembering_nodes(method)))
    run_server(deployment, exchange)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (folder / "model.safetensors").read_bytes(), rows, exchange


def simulate_remembering(method, rounds=8):
    """The same run on the batched engine."""
    deployment = remembering_deployment(method, rounds=rounds)
    examples = [task.load_examples(client) for client in range(3)]
    x, y = (torch.from_numpy(np.concatenate(arrays)).to(deployment.dtype) for arrays in zip(*examples, strict=True))
    data = ClientData(x, y, [len(y) for _, y in examples], deployment.objective, deployment.algorithm.workload.batch_size)
    server = initial_server(deployment.algorithm, deployment.objective, deployment.seed, deployment.dtype)
    population, engine = Population(3, range(3)), BatchedEngine(context=deployment, data=data)
    steps = list(train(deployment.algorithm, server, population, 0.67, engine, rounds, deployment.seed, dtype=deployment.dtype))
    parameters = deployment.algorithm.parameters(steps[-1].server)
    return to_safetensors(deployed_model(deployment, parameters, (40,))), steps


@pytest.mark.parametrize("method", ["fed-ef", "stc"])
def test_nodes_keep_their_memories_in_their_context(method, tmp_path):
    """Two of three clients take part in a round; model and bytes are those of the batched engine."""
    model, rows, _ = run_remembering(method, tmp_path)
    expected, steps = simulate_remembering(method)
    assert model == expected
    assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [(step.uplink.total, step.downlink.total) for step in steps]
    assert len({tuple(row["cohort"]) for row in rows}) > 1


@pytest.mark.parametrize("method", ["fed-ef", "stc"])
def test_a_server_that_resumes_finds_the_memories_of_its_nodes(method, tmp_path):
    """The interrupted round has been computed by the nodes, and is computed again from the memory before it."""
    nodes, deployment = remembering_nodes(method), remembering_deployment(method, run_dir=str(tmp_path))

    class InterruptedExchange(FlowerExchange):
        def __call__(self, clock, *rest):
            result = super().__call__(clock, *rest)
            if clock.round == 4:
                raise SystemExit
            return result

    with pytest.raises(SystemExit):
        run_server(deployment, InterruptedExchange(deployment, InMemoryGrid(nodes)))
    assert run_remembering(method, tmp_path, nodes)[0] == simulate_remembering(method)[0]


@pytest.mark.parametrize("method", ["fed-ef", "stc"])
def test_a_client_that_is_asked_again_gives_the_same_reply(method, tmp_path):
    nodes, calls = remembering_nodes(method), []

    def lose_every_third_reply(message):
        reply = honest(message)
        calls.append(message.metadata.message_type)
        return None if calls.count(TRAIN_MESSAGE) % 3 == 2 and calls[-1] == TRAIN_MESSAGE else reply

    honest, nodes[101] = nodes[101], lose_every_third_reply
    model, rows, _ = run_remembering(method, tmp_path, nodes, quorum=1.0, retries=3, round_seconds=0.05)
    assert any(row["rejected"] for row in rows)
    assert model == simulate_remembering(method)[0]


@pytest.mark.parametrize("method", ["fed-ef", "stc"])
def test_a_node_that_lost_its_memory_starts_without_and_the_run_goes_on(method, tmp_path):
    _, rows, exchange = run_remembering(method, tmp_path, remembering_nodes(method, lost={1: 3}))
    after = [row for row in rows if row["round"] > 4 and 1 in row["cohort"]]
    assert [client for client, _ in after[0]["rejected"]] == [1] and "lost the memory" in after[0]["rejected"][0][1]
    assert all(row["rejected"] == [] for row in after[1:]) and len(after) > 1
    assert exchange.directory.has_memory(1, max(row["round"] for row in after) - 1)


@pytest.mark.parametrize("rounds", ["many", [-1], [1.5], [True], [3] * 1000])
def test_a_node_that_states_wrong_memories_harms_only_itself(rounds, tmp_path):
    nodes = remembering_nodes("stc")
    honest, nodes[101] = nodes[101], lambda message: reply_with(memory=rounds)(honest(message))
    run_remembering("stc", tmp_path, nodes)
    assert read_model(tmp_path / "model.safetensors").num_nonzero == 4
