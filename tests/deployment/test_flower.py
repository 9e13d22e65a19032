"""The exchange over a grid that is a dictionary: every law of it in milliseconds, without a process."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedsieve import wire
from fedsieve.core.random import server_sampler
from fedsieve.core.types import Clock
from fedsieve.deployment import flower
from fedsieve.deployment.config import deployment_config
from fedsieve.deployment.flower import FlowerExchange, QuorumError, make_client_app
from fedsieve.deployment.server import run_server
from fedsieve.models.sparse_model import read_model
from fedsieve.runtime.rounds import initial_server
from fedsieve.storage.checkpoint import SettingsChangedError
from helpers.flower import batched, task

CONFIG = {"clients": 3, "rounds": 2, "seed": 11, "density": 0.1, "precision": "double", "algorithm.name": "flops-pa"}
CONFIG |= {"algorithm.local-steps": 4, "algorithm.batch-size": 8, "quorum": 0.5, "retries": 1, "round-seconds": 0.5, "start-seconds": 0.5}


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """A message belongs to a task of a run; outside a runtime somebody must say which."""
    for name, value in (("task_id", 1), ("run_id", 1), ("node_id", 1)):
        monkeypatch.setattr(TaskIdentity, f"_{name}", value)
    monkeypatch.setattr(flower, "POLL_SECONDS", 0.001)


class Wires(Grid):
    """A grid whose nodes answer at once: node id -> a function from message to reply, or None for silence."""

    def __init__(self, nodes):
        self.nodes, self.replies, self.asked, self.count = nodes, {}, [], 0

    set_run = run = create_message = send_and_receive = None

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        identifiers = []
        for message in messages:
            self.count += 1
            assert message.metadata.ttl > 0, "Flower refuses a message that has no time"
            message.metadata.__dict__["_message_id"] = str(self.count)
            self.asked.append((message.metadata.dst_node_id, message.metadata.message_type))
            reply = self.nodes[message.metadata.dst_node_id](message)
            if reply is not None:
                self.replies[str(self.count)] = reply
            identifiers.append(str(self.count))
        return identifiers

    def pull_messages(self, identifiers):
        return [self.replies.pop(identifier) for identifier in identifiers if identifier in self.replies]


def plan_of(**changes):
    return deployment_config(CONFIG | {name.replace("_", "-"): value for name, value in changes.items()}, task.OBJECTIVE)


def node(client, plan=None):
    """An honest node."""
    app = make_client_app(lambda _: (plan or plan_of()).client_engine(client, *task.rows(client)))
    context = Context(run_id=1, node_id=1, node_config={"partition-id": client}, state=RecordDict(), run_config={})
    return lambda message: app(message, context)


def silent(message):
    return None


def failing(message):
    return Message(Error(2, "<class 'OSError'>:<'no\n rows'>"), reply_to=message)


def talking(client, change):
    """A node that announces itself, and answers with its honest reply changed."""
    honest = node(client)

    def reply(message):
        answer = honest(message)
        if message.metadata.message_type == flower.ANNOUNCE_MESSAGE:
            return answer
        return change(answer)

    return reply


def network(nodes, **changes):
    plan = plan_of(**changes)
    return plan, FlowerExchange(plan, Wires(nodes))


def exchanged(plan, over, clients=(0, 1, 2)):
    clock = Clock(1, 2)
    server = initial_server(plan.algorithm, plan.objective, plan.seed, plan.dtype)
    packet = plan.algorithm.broadcast(server, clock, server_sampler(plan.seed, 1, 0, plan.dtype))
    return over(clock, packet, list(clients))


def honest_nodes():
    return {100 + client: node(client) for client in range(3)}


def test_a_run_over_a_grid_ends_with_the_bits_of_the_batched_engine(tmp_path):
    plan, over = network(honest_nodes(), run_dir=str(tmp_path / "run"))
    run_server(plan, over)
    model, packets, rounds = batched(plan, tmp_path / "packets.json")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["bytes_up"] for row in rows] == [done.uplink.total for done in rounds]
    assert sum(row["bytes_down"] for row in rows) == sum(3 * len(packet) // 2 for packet in packets["sent"])


def cut_off(plan, rounds):
    """A run that ends without warning after some rounds."""

    class Cut(FlowerExchange):
        def __call__(self, clock, *rest):
            if clock.round == rounds:
                raise SystemExit
            return super().__call__(clock, *rest)

    with pytest.raises(SystemExit):
        run_server(plan, Cut(plan, Wires(honest_nodes())))


def test_a_run_that_was_cut_off_goes_on_to_the_same_bits_with_one_line_a_round(tmp_path, capsys):
    plan = plan_of(run_dir=str(tmp_path / "run"), rounds=4)
    for rounds in (0, 1, 3):
        cut_off(plan, rounds)
    patient = plan_of(run_dir=str(tmp_path / "run"), rounds=4, round_seconds=0.7, quorum=0.3)
    run_server(patient, FlowerExchange(patient, Wires(honest_nodes())))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == batched(plan, tmp_path / "packets.json")[0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert "3 of 4 rounds are done, going on" in capsys.readouterr().out


def test_a_finished_run_is_left_as_it_is_and_asks_nobody(tmp_path):
    plan, over = network(honest_nodes(), run_dir=str(tmp_path / "run"))
    run_server(plan, over)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = FlowerExchange(plan, Wires({}))
    run_server(plan, again)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_run_does_not_go_on_with_other_settings(tmp_path):
    cut_off(plan_of(run_dir=str(tmp_path / "run")), 1)
    other = plan_of(run_dir=str(tmp_path / "run"), density=0.2)
    with pytest.raises(SettingsChangedError, match=r"density was 0.1, is 0.2"):
        run_server(other, FlowerExchange(other, Wires(honest_nodes())))


def test_a_round_whose_replies_do_not_pass_the_screen_is_not_kept(tmp_path):
    plan, over = network(honest_nodes(), run_dir=str(tmp_path / "run"), max_claimed_examples=65)
    with pytest.raises(QuorumError, match=r"round 1: 1 replies passed the screen, 2 are needed; client 1: it claims 70 examples"):
        run_server(plan, over)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_the_model_of_a_deployment_can_be_read_like_any_other(tmp_path):
    plan, over = network(honest_nodes(), run_dir=str(tmp_path / "run"))
    run_server(plan, over)
    given = read_model(tmp_path / "run" / "model.safetensors")
    assert given.num_nonzero == 4 and given.metadata.input_shape == (40,) and given.metadata.algorithm == "flops-pa"
    x, _ = task.rows(0)
    assert np.allclose(given.predict(x.astype(np.float32))[:, 0], x @ given.to_dense(), atol=1e-5)


def test_nodes_are_asked_once_whom_they_serve_and_replies_come_in_the_order_of_clients():
    plan, over = network({30: node(2), 10: node(1), 20: node(0)})
    assert over.wait_for_clients() == [0, 1, 2]
    for _ in range(2):
        assert [reply.client for reply in exchanged(plan, over).replies] == [0, 1, 2]
    assert sorted(kind for _, kind in over.grid.asked) == [flower.ANNOUNCE_MESSAGE] * 3 + [flower.TRAIN_MESSAGE] * 6


def test_a_node_that_comes_back_under_another_id_is_asked_again_and_serves_its_client():
    plan, over = network(honest_nodes())
    over.wait_for_clients()
    del over.grid.nodes[101]
    came = exchanged(plan, over)
    assert [reply.client for reply in came.replies] == [0, 2]
    assert came.rejected == [(1, "no node serves it")]
    over.grid.nodes[500] = node(1)
    assert [reply.client for reply in exchanged(plan, over).replies] == [0, 1, 2]
    assert (500, flower.ANNOUNCE_MESSAGE) in over.grid.asked


def test_of_two_nodes_for_one_client_the_newer_is_asked():
    plan, over = network(honest_nodes())
    over.wait_for_clients()
    over.grid.nodes[500] = node(1)
    exchanged(plan, over)
    exchanged(plan, over)
    assert over.directory.node_of(1) == 500
    assert "client 1 is now served by node 500" in over.directory.errors()
    assert over.grid.asked.count((101, flower.ANNOUNCE_MESSAGE)) == 1


def test_the_run_does_not_begin_below_the_quorum_and_says_which_nodes_are_missing():
    _, over = network({100: node(0), 200: failing})
    with pytest.raises(QuorumError, match=r"1 of 3 clients have a node after 0.5 s, 2 are needed.*partition-id 1, 2.*'no rows'"):
        over.wait_for_clients()


@pytest.mark.parametrize(
    ("said", "reason"),
    [({"row": "abc"}, "which shape"), ({"row": [-1]}, "which shape"), ({"row": [7]}, ""), ({"client": -1}, "which client")],
)
def test_a_node_that_announces_nonsense_does_not_stop_the_others(tmp_path, said, reason):
    honest = node(1)
    lying = lambda message: saying(**said)(honest(message))  # noqa: E731
    plan, over = network(honest_nodes() | {101: lying}, run_dir=str(tmp_path / "run"))
    run_server(plan, over)
    assert read_model(tmp_path / "run" / "model.safetensors").metadata.input_shape == (40,)
    assert reason in over.directory.errors()


def test_the_run_begins_without_a_node_when_there_is_a_quorum():
    plan, over = network({100: node(0), 101: node(1)})
    assert over.wait_for_clients() == [0, 1, 2]
    assert exchanged(plan, over).rejected == [(2, "no node serves it")]


def test_strangers_that_come_when_time_is_up_are_not_asked_any_more(monkeypatch):
    monkeypatch.setattr(flower, "POLL_SECONDS", 0.6)  # longer than there is time
    _, over = network({})
    visitors = iter(range(1000, 2000))

    def one_more():
        over.grid.nodes[next(visitors)] = failing
        return list(over.grid.nodes)

    over.grid.get_node_ids = one_more
    with pytest.raises(QuorumError, match="0 of 3 clients have a node"):
        over.wait_for_clients()
    assert over.grid.asked == [(1000, flower.ANNOUNCE_MESSAGE)]


def test_a_client_without_rows_is_never_asked():
    plan = plan_of()
    empty = make_client_app(lambda _: plan.client_engine(2, np.zeros((0, 40)), np.zeros(0)))
    context = Context(run_id=1, node_id=1, node_config={"partition-id": 2}, state=RecordDict(), run_config={})
    _, over = network({100: node(0), 101: node(1), 102: lambda message: empty(message, context)})
    assert over.wait_for_clients() == [0, 1]


def test_below_the_quorum_those_without_a_reply_are_asked_again_and_the_bits_are_the_same():
    calls = []

    def twice(message):
        calls.append(message.metadata.message_type)
        return None if calls.count(flower.TRAIN_MESSAGE) == 1 and calls[-1] == flower.TRAIN_MESSAGE else node(1)(message)

    plan, over = network(honest_nodes() | {101: twice}, quorum=1.0)
    over.wait_for_clients()
    came = exchanged(plan, over)
    plain, undisturbed = network(honest_nodes())
    undisturbed.wait_for_clients()
    expected = exchanged(plain, undisturbed)
    assert came.rejected == [(1, "no reply within 0.5 s")]
    for one, other in zip(came.replies, expected.replies, strict=True):
        assert wire.encode(one.packet, plan.message_id(Clock(1, 2))) == wire.encode(other.packet, plan.message_id(Clock(1, 2)))
    assert came.uplink == expected.uplink and came.downlink.total == expected.downlink.total * 4 // 3


def test_a_round_that_stays_below_the_quorum_stops_the_run_with_the_reasons():
    plan, over = network({100: node(0), 101: talking(1, lambda reply: None), 102: talking(2, lambda reply: None)})
    over.wait_for_clients()
    with pytest.raises(QuorumError, match=r"round 2: 1 of 3 clients gave a good reply in 2 tries, 2 are needed \(client 1: no reply"):
        exchanged(plan, over)


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


def saying(**facts):
    def change(reply):
        reply.content["reply"] = ConfigRecord({**reply.content["reply"], **facts})
        return reply

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("packet"), "no packet"),
        (without("reply"), "does not say which client"),
        (packet_with(stype="numpy.ndarray"), "no packet"),
        (packet_with(dtype="float32"), "no packet"),
        (packet_with(data=b""), "no packet"),
        (packet_with(data=bytes(10**6)), "oversized"),
        (saying(examples=-1), "how many rows"),
        (saying(examples=1.5), "how many rows"),
        (saying(examples=True), "how many rows"),
        (saying(client=2), "its node answers for client 2"),
        (failing, "it failed: <class 'OSError'>:<'no rows'>"),
        (lambda reply: Message(Error(5, "Node Unavailable - in Flower's words"), reply_to=reply), "its node went away"),
    ],
)
def test_a_reply_that_is_none_is_refused_by_name_and_the_others_are_taken(change, reason):
    plan, over = network(honest_nodes() | {101: talking(1, change)})
    over.wait_for_clients()
    came = exchanged(plan, over)
    assert [reply.client for reply in came.replies] == [0, 2]
    ((client, said),) = came.rejected
    assert client == 1 and reason in said


@pytest.mark.parametrize("data", [b"nothing of the kind", bytes(10**6)])
def test_bytes_that_crossed_are_counted_also_where_they_were_refused(data):
    plan, over = network(honest_nodes())
    over.wait_for_clients()
    honest = exchanged(plan, over, [0, 2]).uplink.total
    over.grid.nodes[101] = talking(1, packet_with(data=data))
    came = exchanged(plan, over)
    assert came.uplink.total == honest + len(data)
    assert came.uplink.header + came.uplink.positions + came.uplink.scalars + came.uplink.weights + came.uplink.gates == came.uplink.total


def test_a_node_must_say_which_client_it_serves():
    app = make_client_app(lambda _: plan_of().client_engine(0, *task.rows(0)))
    for config in ({}, {"partition-id": "0"}):
        context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
        with pytest.raises(ValueError, match="partition-id"):
            app(Message(RecordDict(), 1, flower.ANNOUNCE_MESSAGE), context)


def test_the_envelope_is_what_flower_adds_to_the_packets():
    plan, over = network(honest_nodes())
    over.wait_for_clients()
    before = over.flower_overhead_down
    came = exchanged(plan, over)
    content = RecordDict(
        {"packet": flower.to_array_record(b"x" * (came.downlink.total // 3)), "clock": ConfigRecord(Clock(1, 2)._asdict())}
    )
    whole = flower.serialized_size(Message(content, 100, flower.TRAIN_MESSAGE, ttl=0.2, group_id="2"))
    assert abs(over.flower_overhead_down - before - 3 * (whole - came.downlink.total // 3)) < 3 * 40
