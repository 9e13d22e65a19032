"""The exchange over Flower's grid. fedsieve chooses the cohorts and encodes the packets; Flower only transports them.

What a client keeps between its rounds is stored in its node's context, which belongs to a run of Flower. The server says on which round's
memory a message builds. A node has two: the last that the server accepted, and that after its last reply.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.types import NO_MEMORIES, ClientMemories, ClientMemory, Clock, ExchangeResult, Reply, Traffic
from fedsieve.deployment.deployment_config import DeploymentConfig
from fedsieve.deployment.flower_messages import (
    MEMORY_KEY,
    PACKET_TYPE,
    TRAIN_MESSAGE,
    PendingReplies,
    clock_record,
    is_count,
    load_memories,
    packet_bytes,
    parse_clock,
    parse_reply,
    pause,
    serialized_size,
    to_array_record,
    to_memory_record,
)
from fedsieve.deployment.node_directory import NodeDirectory
from fedsieve.runtime.buffers import num_buffer_values
from fedsieve.runtime.client_memory import choose_messages
from fedsieve.runtime.loop import LoopEngine

MAX_CLAIM_RATIO = 10
"""Largest number of examples that counts, over the median of those that clients announced: a client cannot outweigh all others."""


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
        counts = {client: self.directory.num_examples.get(client) for client in range(num_clients)}
        self.max_counted_examples = MAX_CLAIM_RATIO * max(1, int(median([count for count in counts.values() if count] or [1])))
        return [client for client in range(num_clients) if counts[client] != 0]

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
        down, up = sum((wire.measure_traffic([encoded[client]]) for client in messages), Traffic()), Traffic()
        self.flower_overhead_down += sum(map(serialized_size, messages.values())) - down.total
        replies: dict[int, Reply] = {}
        reasons: dict[int, str] = {}
        deadline = ReplyDeadline(timeout, min_replies, len(messages), self.deployment.grace_seconds)
        for client, received in self._receive(messages, deadline):
            data = packet_bytes(received)
            self.flower_overhead_up += serialized_size(received) - len(data) if received.has_content() else 0
            try:
                num_examples = self._num_examples(client, received)
                self.directory.note_memories(client, received)
                self._check_size(data)
                reply = wire.decode(data, message_id, self.deployment.objective.layout.size, support)
                replies[client] = Reply(client, reply, num_examples)
                deadline.note_replies(len(replies))
                up = up + wire.measure_traffic([wire.encode(reply, message_id, support)])
            except wire.PacketError as error:
                reasons[client] = str(error)
                up = up + Traffic(total=len(data), header=len(data))  # a rejected reply is counted as a whole
        late = f"no reply within {deadline.seconds:.3g} s"
        rejected = [
            (client, reasons.get(client, late if client in messages else "no node serves it"))
            for client in clients
            if client not in replies
        ]
        has_memory = self.deployment.support.memory is not None
        kept = {client: ClientMemory(clock.round, {}) for client in replies} if has_memory else {}
        return ExchangeResult(list(replies.values()), rejected, down, up, kept)

    def _receive(self, messages: Mapping[int, Message], deadline: "ReplyDeadline") -> Iterator[tuple[int, Message]]:
        """Send the messages and yield the replies that arrive in time, each with its client."""
        pending = PendingReplies(self.grid)
        pending.send(messages)
        while True:
            yield from pending.receive()
            if not pending.waiting or deadline.has_passed():
                return
            pause()

    def _num_examples(self, client: int, reply: Message) -> int:
        """Return a client's n_k, or raise PacketError if the reply is an error or of another client."""
        sender, num_examples = parse_reply(reply)
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


class ReplyDeadline:
    """When an exchange ends: after `timeout` seconds without a quorum, and otherwise not much later than the quorum.

    The clients outside the quorum have the time that all clients need at the quorum's pace, and `grace_seconds` more.
    """

    def __init__(self, timeout: float, min_replies: int, num_asked: int, grace_seconds: float) -> None:
        self.start = time.monotonic()
        self.seconds = timeout
        self.min_replies, self.num_asked, self.grace_seconds = min_replies, num_asked, grace_seconds

    def note_replies(self, num_valid: int) -> None:
        """Shorten the time when the quorum is reached."""
        if num_valid == self.min_replies:
            quorum_seconds = time.monotonic() - self.start
            self.seconds = min(self.seconds, quorum_seconds * self.num_asked / self.min_replies + self.grace_seconds)

    def has_passed(self) -> bool:
        """Return whether the exchange ends."""
        return time.monotonic() > self.start + self.seconds
