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
from fedsieve.core.types import Bytes, Clock, Exchanged, Reply
from fedsieve.deployment.plan import Plan
from fedsieve.runtime.loop import Loop, weigh

PACKET = "fedsieve.packet.v1"
TRAIN, ANNOUNCE = "train", "query.announce"
LOST = {
    ErrorCode.MESSAGE_UNAVAILABLE: "it did not answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its answer came too late",
    ErrorCode.NODE_UNAVAILABLE: "its node went away",
}
"""What Flower answers in the place of a node that does not."""
POLL = 0.25
"""Seconds between two looks for replies."""


class QuorumError(RuntimeError):
    """Too few clients answered, again and again; what there is up to that round is kept."""


# What a client does


def make_client_app(site_for: Callable[[Context], Loop]) -> ClientApp:
    """A Flower client over `site_for(context)`, which is `plan.site(partition id, x, y)` with this node's own rows."""
    app = ClientApp()

    @app.query("announce")
    def announce(message: Message, context: Context) -> Message:
        client = partition_of(context)
        return Message(RecordDict({"reply": facts(site_for(context), client)}), reply_to=message)

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        client, site = partition_of(context), site_for(context)
        clock = Clock(**{name: int(message.content["clock"][name]) for name in Clock._fields})
        reply = site.visit(clock, message.content["packet"]["packet"].data, client)
        return Message(RecordDict({"packet": packed(reply.join()), "reply": facts(site, client)}), reply_to=message)

    return app


def partition_of(context: Context) -> int:
    """The number of the client this node serves: Flower's simulation sets it, in a deployment whoever starts the node."""
    client = context.node_config.get("partition-id")
    if type(client) is not int:
        raise ValueError(
            f"the node must say which client it serves; start it with --node-config 'partition-id=0 num-partitions=3'; "
            f"its partition-id is {client!r}"
        )
    return client


def facts(site: Loop, client: int) -> ConfigRecord:
    """Who answers, with how many rows of what shape."""
    return ConfigRecord({"client": client, "examples": site.rows.examples(client), "row": list(site.rows.x.shape[1:])})


def packed(data: bytes) -> ArrayRecord:
    """A packet's bytes as Flower carries them."""
    return ArrayRecord({"packet": Array(dtype="uint8", shape=(len(data),), stype=PACKET, data=data)})


# What the server does


def make_server_app(plan_for: Callable[[Context], Plan], lead: Callable[[Plan, "Network"], None]) -> ServerApp:
    """A Flower server that leads `plan_for(context)` over the grid; `lead` trains and keeps what comes of it."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        plan = plan_for(context)
        lead(plan, Network(plan, grid))

    return app


class Network:
    """An exchange with the clients behind a grid. It goes on with those who answer; below the quorum it asks the others again."""

    def __init__(self, plan: Plan, grid: Grid) -> None:
        self.plan = plan
        self.grid = grid
        self.directory = Directory(grid)
        self.envelope_down = self.envelope_up = 0
        """bytes of Flower's own around the packets, so far"""

    def gather(self) -> list[int]:
        """Wait for all clients, at most `start_seconds`; those who may be asked, once there are enough for the quorum."""
        plan, everyone = self.plan, range(self.plan.clients)
        missing = self.directory.find(everyone, plan.clients, plan.start_seconds)
        if plan.clients - len(missing) < plan.needed(plan.clients):
            raise QuorumError(
                f"{plan.clients - len(missing)} of {plan.clients} clients have a node after {plan.start_seconds:g} s, "
                f"{plan.needed(plan.clients)} are needed; start nodes with partition-id {', '.join(map(str, missing))}"
                f"{self.directory.complaints()}"
            )
        return [client for client in everyone if self.directory.examples.get(client) != 0]

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int]) -> Exchanged:
        """Send, wait, collect; ask again those without a good reply while they are too many."""
        needed = self.plan.needed(len(clients))
        came = Exchanged([], [], Bytes(), Bytes())
        for _ in range(1 + self.plan.retries):
            answered = {reply.client for reply in came.replies}
            more = self._ask(clock, packet, [client for client in clients if client not in answered], needed - len(answered))
            replies = sorted([*came.replies, *more.replies], key=lambda reply: reply.client)  # sums run in this order everywhere
            came = Exchanged(replies, came.rejected + more.rejected, came.down.plus(more.down), came.up.plus(more.up))
            if len(replies) >= needed:
                return came
        reasons = "; ".join(f"client {client}: {reason}" for client, reason in more.rejected)
        raise QuorumError(
            f"round {clock.round + 1}: {len(came.replies)} of {len(clients)} clients gave a good reply in {1 + self.plan.retries} tries, "
            f"{needed} are needed ({reasons}){self.directory.complaints()}"
        )

    def _ask(self, clock: Clock, packet: Packet, clients: Sequence[int], needed: int) -> Exchanged:
        """One try, within `round_seconds`."""
        plan, began, half = self.plan, time.monotonic(), self.plan.round_seconds / 2
        self.directory.find(clients, needed, half)
        left = max(2 * half - (time.monotonic() - began), half)
        address = plan.address(clock)
        encoded = wire.encode(packet, address)
        support = plan.opened(packet, clock).support
        content = {"packet": packed(encoded.join()), "clock": ConfigRecord(clock._asdict())}
        messages = {
            client: Message(RecordDict(dict(content)), node, TRAIN, ttl=left, group_id=str(clock.round + 1))
            for client in clients
            if (node := self.directory.node_of(client)) is not None
        }
        came = ask(self.grid, messages, left)
        down, up = weigh(encoded).times(len(messages)), Bytes()
        self.envelope_down += sum(map(heft, messages.values())) - down.wire
        replies, rejected = [], []
        self.envelope_up += sum(heft(reply) - len(carried(reply)) for reply in came.values() if reply.has_content())
        for client in clients:
            data = carried(came[client]) if client in came else b""
            try:
                examples = self._examples(client, messages, came)
                self._weighed(data)
                reply = wire.decode(data, address, plan.objective.layout.size, support)
                replies.append(Reply(client, reply, examples))
                up = up.plus(weigh(wire.encode(reply, address, support)))
            except wire.PacketError as problem:
                rejected.append((client, str(problem)))
                up = up.plus(Bytes(wire=len(data), header=len(data)))  # what is refused has no parts
        return Exchanged(replies, rejected, down, up)

    def _examples(self, client: int, messages: Mapping[int, Message], came: Mapping[int, Message]) -> int:
        """A client's n_k, if it replied for itself."""
        if client not in messages:
            raise wire.PacketError("no node serves it")
        if client not in came:
            raise wire.PacketError(f"no reply within {self.plan.round_seconds:g} s")
        who, examples = said(came[client])
        if who != client:
            raise wire.PacketError(f"its node answers for client {who}")
        return examples

    def _weighed(self, data: bytes) -> None:
        """Refuse bytes that no reply of this model can be, before anything reads them."""
        if not data:
            raise wire.PacketError(f"no packet: its reply has no {PACKET} array")
        if len(data) > (limit := wire.longest(self.plan.objective.layout.size, self.plan.algorithm.reply_fields)):
            raise wire.PacketError(f"oversized: {len(data)} bytes; no reply of this model has more than {limit}")


class Directory:
    """Which node serves which client. A node says so in its first message, and again when it comes back under another id."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.examples: dict[int, int] = {}
        """n_k by client, as announced"""
        self._rows: dict[int, tuple[int, ...]] = {}
        self._nodes: dict[int, int] = {}
        self._online: set[int] = set()
        self._refused: dict[int, str] = {}

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one row that most clients announced."""
        return Counter(self._rows.values()).most_common(1)[0][0]

    def node_of(self, client: int) -> int | None:
        """The node of a client, if it is there."""
        node = self._nodes.get(client)
        return node if node in self._online else None

    def find(self, clients: Sequence[int], needed: int, seconds: float) -> list[int]:
        """Look until `needed` of the clients have a node, or the time is up; those without one. Nodes never seen are asked in any case."""
        deadline = time.monotonic() + seconds
        asked_again = False
        while True:
            self._online = set(self.grid.get_node_ids())
            left = deadline - time.monotonic()
            strangers = self._online - set(self._nodes.values())
            enough = sum(self.node_of(client) is not None for client in clients) >= needed
            if enough or asked_again:
                strangers -= self._refused.keys()
            asked_again |= not enough
            if left > 0:  # a message lives for some time, or Flower refuses it
                self._meet(sorted(strangers), left)
            missing = [client for client in clients if self.node_of(client) is None]
            if len(clients) - len(missing) >= needed or time.monotonic() > deadline:
                return missing
            time.sleep(POLL)

    def complaints(self) -> str:
        """What nodes answered that serve nobody."""
        return "".join(f"; node {node}: {reason}" for node, reason in self._refused.items() if node in self._online)

    def _meet(self, nodes: Sequence[int], seconds: float) -> None:
        """Ask nodes whom they serve."""
        replies = ask(self.grid, {node: Message(RecordDict({}), node, ANNOUNCE, ttl=seconds) for node in nodes}, seconds)
        for node in nodes:
            try:
                if node not in replies:
                    raise wire.PacketError("it does not say which client it serves")
                client, examples = said(replies[node])
                row = shaped(replies[node])
            except wire.PacketError as problem:
                self._refused[node] = str(problem)
                continue
            if client in self._nodes:
                self._refused[self._nodes[client]] = f"client {client} is now served by node {node}"
            self._refused.pop(node, None)
            self._nodes[client], self.examples[client], self._rows[client] = node, examples, row


def carried(reply: Message) -> bytes:
    """The packet in a reply, nothing where it holds none."""
    record = reply.content.get("packet") if reply.has_content() else None
    array = record.get("packet") if isinstance(record, ArrayRecord) else None
    return b"" if array is None or (array.stype, array.dtype) != (PACKET, "uint8") else array.data


def said(reply: Message) -> tuple[int, int]:
    """The client a node answers for, and its n_k."""
    if reply.has_error() and reply.error.code in LOST:
        raise wire.PacketError(LOST[reply.error.code])
    if reply.has_error():
        raise wire.PacketError(f"it failed: {' '.join(str(reply.error.reason).split())}")
    record = reply.content.get("reply")
    numbers = [record.get(name) if isinstance(record, ConfigRecord) else None for name in ("client", "examples")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise wire.PacketError("its reply does not say which client answers with how many rows")
    return numbers[0], numbers[1]


def shaped(reply: Message) -> tuple[int, ...]:
    """The shape of a node's rows."""
    row = reply.content["reply"].get("row")
    if not isinstance(row, list) or not all(type(number) is int and number > 0 for number in row):
        raise wire.PacketError("its reply does not say which shape its rows have")
    return tuple(row)


def ask(grid: Grid, messages: Mapping[int, Message], seconds: float) -> dict[int, Message]:
    """Send all, wait at most so long, and give the replies by the names of what they answer."""
    if not messages:
        return {}
    taken = set(grid.push_messages(list(messages.values())))
    deadline = time.monotonic() + seconds
    waiting = {name: message.metadata.message_id for name, message in messages.items() if message.metadata.message_id in taken}
    replies: dict[int, Message] = {}
    while True:
        for name, identifier in list(waiting.items()):
            for reply in grid.pull_messages([identifier]):  # one by one: a reply that cannot be unpacked harms no other
                replies[name] = reply
                del waiting[name]
        if not waiting or time.monotonic() > deadline:
            return replies
        time.sleep(POLL)


def heft(part: Any) -> int:
    """Bytes of a message as Flower stores and sends it, object by object; HTTP and TLS come on top."""
    return len(part.deflate()) + sum(heft(child) for child in (part.children or {}).values())
