"""The exchange over Flower's grid. Outside the folder `flower`, the only file that imports flwr.

A broadcast contains a packet and the clock. A reply contains a packet, the client's number and its number of examples n_k. fedsieve
chooses the cohorts and encodes the packets; Flower only transports them, as typed byte arrays.

What a client keeps between its rounds is stored in its node's context, which belongs to a run of Flower. The server says on which round's
memory a message builds. A node has two: the last that the server accepted, and that after its last reply.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeGuard

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr is first imported

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import NO_MEMORIES, ClientMemories, ClientMemory, Clock, ExchangeResult, Reply, Traffic
from fedsieve.deployment.config import DeploymentConfig
from fedsieve.runtime.buffers import num_buffer_values
from fedsieve.runtime.client_memory import choose_messages
from fedsieve.runtime.loop import LoopEngine

PACKET_TYPE, MEMORY_TYPE = "fedsieve.packet.v1", "fedsieve.memory.v1"
MEMORY_KEY = "memory"
"""In a broadcast, the round of the memory on which it builds; in a reply, the rounds of the memories that the node has."""
TRAIN_MESSAGE, ANNOUNCE_MESSAGE = "train", "query.announce"
FLOWER_ERRORS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "it did not reply in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply came too late",
    ErrorCode.NODE_UNAVAILABLE: "its node is offline",
}
"""Errors that Flower returns for a node without a reply, and how we report them."""
MAX_ROUNDS = 1 << 31
MAX_CLAIM_RATIO = 10
"""Largest number of examples that counts, over the median of those that clients announced: a client cannot outweigh all others."""
POLL_SECONDS = 0.25
"""Seconds between two requests for replies."""


class QuorumError(RuntimeError):
    """Too few clients replied after all retries. Rounds before this one are stored."""


# Client


def make_client_app(client_engine_for: Callable[[Context], LoopEngine]) -> ClientApp:
    """Return Flower's client app; `client_engine_for(context)` is `DeploymentConfig.client_engine(partition id, x, y)` of this node."""
    app = ClientApp()

    @app.query("announce")
    def announce(message: Message, context: Context) -> Message:
        client = partition_id(context)
        return Message(RecordDict({"reply": client_record(client_engine_for(context), client, context.state)}), reply_to=message)

    @app.train()
    def train_and_reply(message: Message, context: Context) -> Message:
        client, engine, clock = partition_id(context), client_engine_for(context), parse_clock(message)
        known_round = message.content.config_records["clock"].get(MEMORY_KEY)
        memories = load_memories(context.state)
        if is_count(known_round) and known_round not in memories:
            return Message(RecordDict({"reply": client_record(engine, client, context.state)}), reply_to=message)
        memory = memories[known_round] if is_count(known_round) else None
        reply, kept = engine.run_client(clock, packet_bytes(message), client, memory)
        if kept is not None:
            context.state[MEMORY_KEY] = to_memory_record([kept] if memory is None else [memory, kept])
        content = {"packet": to_array_record(reply.to_bytes()), "reply": client_record(engine, client, context.state)}
        return Message(RecordDict(content), reply_to=message)

    return app


def partition_id(context: Context) -> int:
    """Return the number of the client this node serves. Flower's simulation sets it; in a deployment, the command that starts the node."""
    client = context.node_config.get("partition-id")
    if type(client) is not int:
        raise ValueError(
            f"partition-id must be a whole number, the client that the node serves; got {client!r}; "
            f"start the node with --node-config 'partition-id=0 num-partitions=3'"
        )
    return client


def client_record(engine: LoopEngine, client: int, state: RecordDict) -> ConfigRecord:
    """Return the client's number, its number of examples, the shape of one example, and the rounds of its memories if it has any."""
    record = {"client": client, "examples": engine.data.num_examples[client], "row": list(engine.data.x.shape[1:])}
    rounds = sorted(load_memories(state))
    return ConfigRecord(record | ({MEMORY_KEY: rounds} if rounds else {}))


def to_memory_record(memories: Sequence[ClientMemory]) -> ArrayRecord:
    """Return the memories of one client as Flower's record; an array is named by its round and vector, such as "7.residual"."""
    arrays = {f"{memory.round}.{name}": vector.numpy(force=True) for memory in memories for name, vector in memory.vectors.items()}
    return ArrayRecord(
        {name: Array(dtype=str(one.dtype), shape=one.shape, stype=MEMORY_TYPE, data=one.tobytes()) for name, one in arrays.items()}
    )


def load_memories(state: RecordDict, record_key: str = MEMORY_KEY) -> dict[int, ClientMemory]:
    """Return the memories in the state of a node, by round."""
    memories: dict[int, ClientMemory] = {}
    for key, array in state.array_records.get(record_key, ArrayRecord()).items():
        round, _, name = key.partition(".")
        vector = torch.from_numpy(np.frombuffer(array.data, array.dtype).copy())
        memories.setdefault(int(round), ClientMemory(int(round), {})).vectors[name] = vector
    return memories


def to_array_record(data: bytes) -> ArrayRecord:
    """Wrap a packet's bytes in Flower's record."""
    return ArrayRecord({"packet": Array(dtype="uint8", shape=(len(data),), stype=PACKET_TYPE, data=data)})


# Server


def make_server_app(
    deployment_for: Callable[[Context], DeploymentConfig], run_server: Callable[[DeploymentConfig, "FlowerExchange"], None]
) -> ServerApp:
    """Return Flower's server app, which calls `run_server` with `deployment_for(context)` and an exchange over the grid."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        deployment = deployment_for(context)
        run_server(deployment, FlowerExchange(deployment, grid))

    return app


class FlowerExchange:
    """An exchange with the clients of a grid. It continues with the clients that reply; below the quorum it asks the others again."""

    def __init__(self, deployment: DeploymentConfig, grid: Grid) -> None:
        self.deployment = deployment
        self.grid = grid
        self.directory = NodeDirectory(grid)
        self.max_counted_examples = 1
        """limit of a client's n_k, set when the clients have announced themselves"""
        self.flower_overhead_down = self.flower_overhead_up = 0
        """bytes that Flower added to the packets so far"""

    def wait_for_clients(self) -> list[int]:
        """Wait at most `start_seconds` for all clients, at least for a quorum; return those that may be sampled.

        A client that announced no examples is never sampled.
        """
        num_clients, seconds = self.deployment.clients, self.deployment.start_seconds
        missing = self.directory.wait_for(range(num_clients), num_clients, seconds)
        needed = self.deployment.min_replies(num_clients)
        if num_clients - len(missing) < needed:
            raise QuorumError(
                f"{num_clients - len(missing)} of {num_clients} clients have a node after {seconds:g} s, {needed} are needed; "
                f"start nodes with partition-id {', '.join(map(str, missing))}{self.directory.errors()}"
            )
        counts = self.directory.num_examples
        self.max_counted_examples = MAX_CLAIM_RATIO * max(1, int(median([count for count in counts.values() if count] or [1])))
        return [client for client in range(num_clients) if counts.get(client) != 0]

    def __call__(self, clock: Clock, packet: Packet, clients: Sequence[int], memories: ClientMemories = NO_MEMORIES) -> ExchangeResult:
        """Send the packet and collect the replies; below the quorum, ask the clients without a valid reply again."""
        needed = self.deployment.min_replies(len(clients))
        result = ExchangeResult([], [], Traffic(), Traffic())
        for _ in range(1 + self.deployment.retries):
            replied = {reply.client for reply in result.replies}
            missing = [client for client in clients if client not in replied]
            attempt = self._send(clock, packet, missing, needed - len(replied), memories)
            result = ExchangeResult(
                sorted([*result.replies, *attempt.replies], key=lambda reply: reply.client),  # every engine sums in this order
                result.rejected + attempt.rejected,
                result.downlink + attempt.downlink,
                result.uplink + attempt.uplink,
                {**result.memories, **attempt.memories},
            )
            if len(result.replies) >= needed:
                return result
        replied = {reply.client for reply in result.replies}
        reasons = "; ".join(f"client {client}: {reason}" for client, reason in dict(result.rejected).items() if client not in replied)
        raise QuorumError(
            f"round {clock.round + 1}: {len(result.replies)} of {len(clients)} clients sent a valid reply in "
            f"{1 + self.deployment.retries} tries, {needed} are needed ({reasons}){self.directory.errors()}"
        )

    def _send(self, clock: Clock, packet: Packet, clients: Sequence[int], min_replies: int, memories: ClientMemories) -> ExchangeResult:
        """Exchange once, within `round_seconds`: up to half of it to wait for nodes, the rest for their replies."""
        start, half = time.monotonic(), self.deployment.round_seconds / 2
        self.directory.wait_for(clients, min_replies, half)
        timeout = max(2 * half - (time.monotonic() - start), half)
        message_id = self.deployment.message_id(clock)
        support = self.deployment.resolve_seed(packet, clock).support
        known = {client: memory for client, memory in memories.by_client.items() if self.directory.has_memory(client, memory.round)}
        encoded = {
            client: message.encoded
            for client, message in choose_messages(self.deployment, clock, packet, clients, memories._replace(by_client=known)).items()
        }
        messages = {
            client: Message(
                RecordDict({"packet": to_array_record(encoded[client].to_bytes()), "clock": clock_record(clock, known.get(client))}),
                node,
                TRAIN_MESSAGE,
                ttl=timeout,
                group_id=str(clock.round + 1),
            )
            for client in clients
            if (node := self.directory.node_of(client)) is not None
        }
        received = send_and_receive(self.grid, messages, timeout)
        down, up = sum((wire.measure_traffic([encoded[client]]) for client in messages), Traffic()), Traffic()
        self.flower_overhead_down += sum(map(serialized_size, messages.values())) - down.total
        replies, rejected = [], []
        self.flower_overhead_up += sum(
            serialized_size(reply) - len(packet_bytes(reply)) for reply in received.values() if reply.has_content()
        )
        for client in clients:
            data = packet_bytes(received[client]) if client in received else b""
            try:
                num_examples = self._num_examples(client, messages, received)
                self.directory.note_memories(client, received[client])
                self._check_size(data)
                reply = wire.decode(data, message_id, self.deployment.objective.layout.size, support)
                replies.append(Reply(client, reply, num_examples))
                up = up + wire.measure_traffic([wire.encode(reply, message_id, support)])
            except wire.PacketError as error:
                rejected.append((client, str(error)))
                up = up + Traffic(total=len(data), header=len(data))  # a rejected reply is counted as a whole
        has_memory = self.deployment.support.memory is not None
        kept = {reply.client: ClientMemory(clock.round, {}) for reply in replies} if has_memory else {}
        return ExchangeResult(replies, rejected, down, up, kept)

    def _num_examples(self, client: int, messages: Mapping[int, Message], replies: Mapping[int, Message]) -> int:
        """Return a client's n_k, or raise PacketError if it did not reply for itself."""
        if client not in messages:
            raise wire.PacketError("no node serves it")
        if client not in replies:
            raise wire.PacketError(f"no reply within {self.deployment.round_seconds:g} s")
        sender, num_examples = parse_reply(replies[client])
        if sender != client:
            raise wire.PacketError(f"its node replied for client {sender}")
        if num_examples != (announced := self.directory.num_examples[client]):
            raise wire.PacketError(f"it claims {num_examples} examples, and announced {announced}; the number is fixed for the run")
        return num_examples if self.deployment.has_claim_limit else min(num_examples, self.max_counted_examples)

    def _check_size(self, data: bytes) -> None:
        """Reject bytes that no reply of this model can have, before they are parsed."""
        if not data:
            raise wire.PacketError(f"no packet: its reply has no {PACKET_TYPE} array, or its node has lost the memory it was asked for")
        objective, fields = self.deployment.objective, self.deployment.algorithm.all_reply_fields
        if len(data) > (limit := wire.max_packet_size(objective.layout.size, fields, num_buffer_values(objective))):
            raise wire.PacketError(f"oversized: {len(data)} bytes; no reply of this model has more than {limit}")


class NodeDirectory:
    """Which node serves which client. A node announces its client when it is asked; a node that returns has a new id."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.num_examples: dict[int, int] = {}
        """announced n_k of each client"""
        self._example_shapes: dict[int, tuple[int, ...]] = {}
        self._memory_rounds: dict[int, list[int]] = {}
        self._nodes: dict[int, int] = {}
        self._online: set[int] = set()
        self._node_errors: dict[int, str] = {}

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of one example that most clients announced."""
        return Counter(self._example_shapes.values()).most_common(1)[0][0]

    def node_of(self, client: int) -> int | None:
        """Return the node of a client, or None if it is offline."""
        node = self._nodes.get(client)
        return node if node in self._online else None

    def has_memory(self, client: int, round: int) -> bool:
        """Return whether the node of a client has said that it holds the memory of this round."""
        return round in self._memory_rounds.get(client, ())

    def note_memories(self, client: int, reply: Message) -> None:
        """Note which memories the node of a client holds; a wrong statement harms only this client."""
        rounds = reply.content.config_records["reply"].get(MEMORY_KEY)
        self._memory_rounds[client] = [round for round in rounds if is_count(round)][:2] if isinstance(rounds, list) else []

    def wait_for(self, clients: Sequence[int], min_clients: int, timeout_seconds: float) -> list[int]:
        """Wait until `min_clients` of the clients have a node, or the time is up; return the clients without one.

        Unknown nodes are asked at least once, even if there are enough clients. A node that failed is asked once more per call.
        """
        deadline = time.monotonic() + timeout_seconds
        failed_nodes_asked = False
        while True:
            self._online = set(self.grid.get_node_ids())
            seconds_left = deadline - time.monotonic()
            unknown_nodes = self._online - set(self._nodes.values())
            enough = sum(self.node_of(client) is not None for client in clients) >= min_clients
            if enough or failed_nodes_asked:
                unknown_nodes -= self._node_errors.keys()
            failed_nodes_asked |= not enough
            if seconds_left > 0:  # Flower rejects a message without time to live
                self._query(sorted(unknown_nodes), seconds_left)
            missing = [client for client in clients if self.node_of(client) is None]
            if len(clients) - len(missing) >= min_clients or time.monotonic() > deadline:
                return missing
            time.sleep(POLL_SECONDS)

    def errors(self) -> str:
        """Describe the online nodes that serve no client, for an error message."""
        return "".join(f"; node {node}: {reason}" for node, reason in self._node_errors.items() if node in self._online)

    def _query(self, nodes: Sequence[int], timeout_seconds: float) -> None:
        """Ask nodes which client they serve."""
        replies = send_and_receive(
            self.grid, {node: Message(RecordDict({}), node, ANNOUNCE_MESSAGE, ttl=timeout_seconds) for node in nodes}, timeout_seconds
        )
        for node in nodes:
            try:
                if node not in replies:
                    raise wire.PacketError("it did not announce which client it serves")
                client, num_examples = parse_reply(replies[node])
                example_shape = parse_shape(replies[node])
                if num_examples != (announced := self.num_examples.get(client, num_examples)):
                    raise wire.PacketError(
                        f"client {client} announced {announced} examples before, and {num_examples} now; start a new run"
                    )
            except wire.PacketError as error:
                self._node_errors[node] = str(error)
                continue
            if client in self._nodes:
                self._node_errors[self._nodes[client]] = f"client {client} is now served by node {node}"
            self._node_errors.pop(node, None)
            self._nodes[client], self.num_examples[client], self._example_shapes[client] = node, num_examples, example_shape
            self.note_memories(client, replies[node])


def packet_bytes(message: Message) -> bytes:
    """Return the packet in a message, empty if there is none."""
    record = message.content.get("packet") if message.has_content() else None
    array = record.get("packet") if isinstance(record, ArrayRecord) else None
    return b"" if array is None or (array.stype, array.dtype) != (PACKET_TYPE, "uint8") else array.data


def parse_reply(reply: Message) -> tuple[int, int]:
    """Return the client that sent a reply, and its n_k."""
    if reply.has_error() and reply.error.code in FLOWER_ERRORS:
        raise wire.PacketError(FLOWER_ERRORS[reply.error.code])
    if reply.has_error():
        raise wire.PacketError(f"it failed: {' '.join(str(reply.error.reason).split())}")
    record = reply.content.config_records.get("reply", ConfigRecord())
    client, num_examples = record.get("client"), record.get("examples")
    if not (is_count(client) and is_count(num_examples)):
        raise wire.PacketError("its reply lacks the client's number or its number of examples")
    return client, num_examples


def parse_shape(reply: Message) -> tuple[int, ...]:
    """Return the shape of one example of a node."""
    record = reply.content.config_records["reply"].get("row")
    if not isinstance(record, list) or not all(is_count(length) and length > 0 for length in record):
        raise wire.PacketError("its reply lacks the shape of its examples")
    return tuple(length for length in record if is_count(length))


def clock_record(clock: Clock, memory: ClientMemory | None) -> ConfigRecord:
    """Return the clock of a broadcast, and the round of the memory on which it builds if there is one."""
    return ConfigRecord(clock._asdict() | ({} if memory is None else {MEMORY_KEY: memory.round}))


def parse_clock(message: Message) -> Clock:
    """Return the clock of a broadcast."""
    record = message.content.config_records.get("clock", ConfigRecord()) if message.has_content() else ConfigRecord()
    fields = {name: value for name in Clock._fields if is_count(value := record.get(name))}
    if len(fields) < len(Clock._fields):
        raise wire.PacketError("the broadcast lacks its clock")
    clock = Clock(**fields)
    if not clock.round < clock.num_rounds <= MAX_ROUNDS or clock.exchange >= MAX_ROUNDS:
        raise wire.PacketError(f"the clock of the broadcast is impossible: {clock}")
    return clock


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value of a record is a whole number of at least 0; a bool is none."""
    return type(value) is int and value >= 0


def send_and_receive(grid: Grid, messages: Mapping[int, Message], timeout_seconds: float) -> dict[int, Message]:
    """Send all messages and return the replies that arrive in time, by the keys of their messages."""
    if not messages:
        return {}
    accepted = set(grid.push_messages(list(messages.values())))
    deadline = time.monotonic() + timeout_seconds
    waiting = {name: message.metadata.message_id for name, message in messages.items() if message.metadata.message_id in accepted}
    replies: dict[int, Message] = {}
    while True:
        for name, identifier in list(waiting.items()):
            for reply in grid.pull_messages([identifier]):  # one by one, so that a reply that Flower cannot unpack does not lose the others
                replies[name] = reply
                del waiting[name]
        if not waiting or time.monotonic() > deadline:
            return replies
        time.sleep(POLL_SECONDS)


def serialized_size(part: Any) -> int:
    """Return the bytes of a message as Flower serializes it, without HTTP and TLS."""
    return len(part.deflate()) + sum(serialized_size(child) for child in (part.children or {}).values())
