"""The exchange over Flower's grid: our rounds, our cohorts, our packets; Flower carries them. The only file that imports flwr.

A message down is a packet and the clock, a reply is a packet, who answers and n_k. Both packets are typed byte arrays.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr is first imported

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import Clock, ExchangeResult, Reply, Traffic
from fedsieve.deployment.plan import DeploymentConfig
from fedsieve.runtime.loop import LoopEngine, measure_traffic

PACKET_TYPE = "fedsieve.packet.v1"
TRAIN_MESSAGE, ANNOUNCE_MESSAGE = "train", "query.announce"
FLOWER_ERRORS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "it did not answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its answer came too late",
    ErrorCode.NODE_UNAVAILABLE: "its node went away",
}
"""What Flower answers in the place of a node that does not."""
POLL_SECONDS = 0.25
"""Seconds between two looks for replies."""


class QuorumError(RuntimeError):
    """Too few clients answered, again and again; what there is up to that round is kept."""


# What a client does


def make_client_app(client_engine_for: Callable[[Context], LoopEngine]) -> ClientApp:
    """A Flower client over `site_for(context)`, which is `plan.site(partition id, x, y)` with this node's own rows."""
    app = ClientApp()

    @app.query("announce")
    def announce(message: Message, context: Context) -> Message:
        client = partition_id(context)
        return Message(RecordDict({"reply": client_record(client_engine_for(context), client)}), reply_to=message)

    @app.train()
    def train_and_reply(message: Message, context: Context) -> Message:
        client, site = partition_id(context), client_engine_for(context)
        clock = Clock(**{name: int(message.content["clock"][name]) for name in Clock._fields})
        reply = site.run_client(clock, message.content["packet"]["packet"].data, client)
        return Message(RecordDict({"packet": to_array_record(reply.to_bytes()), "reply": client_record(site, client)}), reply_to=message)

    return app


def partition_id(context: Context) -> int:
    """The number of the client this node serves: Flower's simulation sets it, in a deployment whoever starts the node."""
    client = context.node_config.get("partition-id")
    if type(client) is not int:
        raise ValueError(
            f"the node must say which client it serves; start it with --node-config 'partition-id=0 num-partitions=3'; "
            f"its partition-id is {client!r}"
        )
    return client


def client_record(engine: LoopEngine, client: int) -> ConfigRecord:
    """Who answers, with how many rows of what shape."""
    return ConfigRecord({"client": client, "examples": engine.data.num_examples(client), "row": list(engine.data.x.shape[1:])})


def to_array_record(data: bytes) -> ArrayRecord:
    """A packet's bytes as Flower carries them."""
    return ArrayRecord({"packet": Array(dtype="uint8", shape=(len(data),), stype=PACKET_TYPE, data=data)})


# What the server does


def make_server_app(
    deployment_for: Callable[[Context], DeploymentConfig], run_server: Callable[[DeploymentConfig, "FlowerExchange"], None]
) -> ServerApp:
    """A Flower server that leads `plan_for(context)` over the grid; `lead` trains and keeps what comes of it."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        plan = deployment_for(context)
        run_server(plan, FlowerExchange(plan, grid))

    return app


class FlowerExchange:
    """An exchange with the clients behind a grid. It goes on with those who answer; below the quorum it asks the others again."""

    def __init__(self, deployment: DeploymentConfig, grid: Grid) -> None:
        self.deployment = deployment
        self.grid = grid
        self.directory = NodeDirectory(grid)
        self.flower_overhead_down = self.flower_overhead_up = 0
        """bytes of Flower's own around the packets, so far"""

    def wait_for_clients(self) -> list[int]:
        """Wait for all clients, at most `start_seconds`; those who may be asked, once there are enough for the quorum."""
        plan, everyone = self.deployment, range(self.deployment.clients)
        missing = self.directory.wait_for(everyone, plan.clients, plan.start_seconds)
        if plan.clients - len(missing) < plan.min_replies(plan.clients):
            raise QuorumError(
                f"{plan.clients - len(missing)} of {plan.clients} clients have a node after {plan.start_seconds:g} s, "
                f"{plan.min_replies(plan.clients)} are needed; start nodes with partition-id {', '.join(map(str, missing))}"
                f"{self.directory.errors()}"
            )
        return [client for client in everyone if self.directory.num_examples.get(client) != 0]

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> ExchangeResult:
        """Send, wait, collect; ask again those without a good reply while they are too many."""
        needed = self.deployment.min_replies(len(clients))
        came = ExchangeResult([], [], Traffic(), Traffic())
        for _ in range(1 + self.deployment.retries):
            answered = {reply.client for reply in came.replies}
            more = self._send(clock, packet, [client for client in clients if client not in answered], needed - len(answered))
            replies = sorted([*came.replies, *more.replies], key=lambda reply: reply.client)  # sums run in this order everywhere
            came = ExchangeResult(replies, came.rejected + more.rejected, came.downlink.plus(more.downlink), came.uplink.plus(more.uplink))
            if len(replies) >= needed:
                return came
        reasons = "; ".join(f"client {client}: {reason}" for client, reason in more.rejected)
        raise QuorumError(
            f"round {clock.round + 1}: {len(came.replies)} of {len(clients)} clients gave a good reply in {1 + self.deployment.retries} tries, "
            f"{needed} are needed ({reasons}){self.directory.errors()}"
        )

    def _send(self, clock: Clock, packet: Packet, clients: Sequence[int], min_replies: int) -> ExchangeResult:
        """One try, within `round_seconds`."""
        plan, began, half = self.deployment, time.monotonic(), self.deployment.round_seconds / 2
        self.directory.wait_for(clients, min_replies, half)
        left = max(2 * half - (time.monotonic() - began), half)
        address = plan.message_id(clock)
        encoded = wire.encode(packet, address)
        support = plan.resolve_seed(packet, clock).support
        content = {"packet": to_array_record(encoded.to_bytes()), "clock": ConfigRecord(clock._asdict())}
        messages = {
            client: Message(RecordDict(dict(content)), node, TRAIN_MESSAGE, ttl=left, group_id=str(clock.round + 1))
            for client in clients
            if (node := self.directory.node_of(client)) is not None
        }
        came = send_and_receive(self.grid, messages, left)
        down, up = measure_traffic(encoded).times(len(messages)), Traffic()
        self.flower_overhead_down += sum(map(serialized_size, messages.values())) - down.total
        replies, rejected = [], []
        self.flower_overhead_up += sum(serialized_size(reply) - len(packet_bytes(reply)) for reply in came.values() if reply.has_content())
        for client in clients:
            data = packet_bytes(came[client]) if client in came else b""
            try:
                examples = self._num_examples(client, messages, came)
                self._check_size(data)
                reply = wire.decode(data, address, plan.objective.layout.size, support)
                replies.append(Reply(client, reply, examples))
                up = up.plus(measure_traffic(wire.encode(reply, address, support)))
            except wire.PacketError as problem:
                rejected.append((client, str(problem)))
                up = up.plus(Traffic(total=len(data), header=len(data)))  # what is refused has no parts
        return ExchangeResult(replies, rejected, down, up)

    def _num_examples(self, client: int, messages: Mapping[int, Message], replies: Mapping[int, Message]) -> int:
        """A client's n_k, if it replied for itself."""
        if client not in messages:
            raise wire.PacketError("no node serves it")
        if client not in replies:
            raise wire.PacketError(f"no reply within {self.deployment.round_seconds:g} s")
        who, examples = parse_reply(replies[client])
        if who != client:
            raise wire.PacketError(f"its node answers for client {who}")
        return examples

    def _check_size(self, data: bytes) -> None:
        """Refuse bytes that no reply of this model can be, before anything reads them."""
        if not data:
            raise wire.PacketError(f"no packet: its reply has no {PACKET_TYPE} array")
        if len(data) > (limit := wire.max_packet_size(self.deployment.objective.layout.size, self.deployment.algorithm.all_reply_fields)):
            raise wire.PacketError(f"oversized: {len(data)} bytes; no reply of this model has more than {limit}")


class NodeDirectory:
    """Which node serves which client. A node says so in its first message, and again when it comes back under another id."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.num_examples: dict[int, int] = {}
        """n_k by client, as announced"""
        self._example_shapes: dict[int, tuple[int, ...]] = {}
        self._nodes: dict[int, int] = {}
        self._online: set[int] = set()
        self._node_errors: dict[int, str] = {}

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of one row that most clients announced."""
        return Counter(self._example_shapes.values()).most_common(1)[0][0]

    def node_of(self, client: int) -> int | None:
        """The node of a client, if it is there."""
        node = self._nodes.get(client)
        return node if node in self._online else None

    def wait_for(self, clients: Sequence[int], min_clients: int, timeout_seconds: float) -> list[int]:
        """Look until `needed` of the clients have a node, or the time is up; those without one. Nodes never seen are asked in any case."""
        deadline = time.monotonic() + timeout_seconds
        asked_again = False
        while True:
            self._online = set(self.grid.get_node_ids())
            left = deadline - time.monotonic()
            strangers = self._online - set(self._nodes.values())
            enough = sum(self.node_of(client) is not None for client in clients) >= min_clients
            if enough or asked_again:
                strangers -= self._node_errors.keys()
            asked_again |= not enough
            if left > 0:  # a message lives for some time, or Flower refuses it
                self._query(sorted(strangers), left)
            missing = [client for client in clients if self.node_of(client) is None]
            if len(clients) - len(missing) >= min_clients or time.monotonic() > deadline:
                return missing
            time.sleep(POLL_SECONDS)

    def errors(self) -> str:
        """What nodes answered that serve nobody."""
        return "".join(f"; node {node}: {reason}" for node, reason in self._node_errors.items() if node in self._online)

    def _query(self, nodes: Sequence[int], timeout_seconds: float) -> None:
        """Ask nodes whom they serve."""
        replies = send_and_receive(
            self.grid, {node: Message(RecordDict({}), node, ANNOUNCE_MESSAGE, ttl=timeout_seconds) for node in nodes}, timeout_seconds
        )
        for node in nodes:
            try:
                if node not in replies:
                    raise wire.PacketError("it does not say which client it serves")
                client, examples = parse_reply(replies[node])
                row = parse_shape(replies[node])
            except wire.PacketError as problem:
                self._node_errors[node] = str(problem)
                continue
            if client in self._nodes:
                self._node_errors[self._nodes[client]] = f"client {client} is now served by node {node}"
            self._node_errors.pop(node, None)
            self._nodes[client], self.num_examples[client], self._example_shapes[client] = node, examples, row


def packet_bytes(reply: Message) -> bytes:
    """The packet in a reply, nothing where it holds none."""
    record = reply.content.get("packet") if reply.has_content() else None
    array = record.get("packet") if isinstance(record, ArrayRecord) else None
    return b"" if array is None or (array.stype, array.dtype) != (PACKET_TYPE, "uint8") else array.data


def parse_reply(reply: Message) -> tuple[int, int]:
    """The client a node answers for, and its n_k."""
    if reply.has_error() and reply.error.code in FLOWER_ERRORS:
        raise wire.PacketError(FLOWER_ERRORS[reply.error.code])
    if reply.has_error():
        raise wire.PacketError(f"it failed: {' '.join(str(reply.error.reason).split())}")
    record = reply.content.get("reply")
    numbers = [record.get(name) if isinstance(record, ConfigRecord) else None for name in ("client", "examples")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise wire.PacketError("its reply does not say which client answers with how many rows")
    return numbers[0], numbers[1]


def parse_shape(reply: Message) -> tuple[int, ...]:
    """The shape of a node's rows."""
    row = reply.content["reply"].get("row")
    if not isinstance(row, list) or not all(type(number) is int and number > 0 for number in row):
        raise wire.PacketError("its reply does not say which shape its rows have")
    return tuple(row)


def send_and_receive(grid: Grid, messages: Mapping[int, Message], timeout_seconds: float) -> dict[int, Message]:
    """Send all, wait at most so long, and give the replies by the names of what they answer."""
    if not messages:
        return {}
    taken = set(grid.push_messages(list(messages.values())))
    deadline = time.monotonic() + timeout_seconds
    waiting = {name: message.metadata.message_id for name, message in messages.items() if message.metadata.message_id in taken}
    replies: dict[int, Message] = {}
    while True:
        for name, identifier in list(waiting.items()):
            for reply in grid.pull_messages([identifier]):  # one by one: a reply that cannot be unpacked harms no other
                replies[name] = reply
                del waiting[name]
        if not waiting or time.monotonic() > deadline:
            return replies
        time.sleep(POLL_SECONDS)


def serialized_size(part: Any) -> int:
    """Bytes of a message as Flower stores and sends it, object by object; HTTP and TLS come on top."""
    return len(part.deflate()) + sum(serialized_size(child) for child in (part.children or {}).values())
