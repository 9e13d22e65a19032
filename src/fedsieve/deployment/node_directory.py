"""Which node of Flower serves which client. It imports flwr."""

import time
from collections import Counter
from collections.abc import Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedsieve import wire
from fedsieve.deployment.flower_messages import ANNOUNCE_MESSAGE, MEMORY_KEY, PendingReplies, is_count, parse_reply, parse_shape, pause

NODE_NAME_PREFIX = "client-"
"""A node whose key was registered under this name and a number serves the client with this number only."""


class NodeDirectory:
    """Which node serves which client. A node announces its client when it is asked.

    A client belongs to the first node that announced it. To Flower a node is a key: a node that returns with its key has the same id.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.num_examples: dict[int, int] = {}
        """announced n_k of each client"""
        self._example_shapes: dict[int, tuple[int, ...]] = {}
        self._memory_rounds: dict[int, list[int]] = {}
        self._nodes: dict[int, int] = {}
        self._online: dict[int, str] = {}
        """names under which the keys of the online nodes are registered"""
        self._node_errors: dict[int, str] = {}
        self._announcements = PendingReplies(grid)

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

        New nodes are asked which client they serve, and what they announce later is read in the next call. A node that failed is asked
        once more per call if there are too few clients.
        """
        deadline = time.monotonic() + timeout_seconds
        asked: set[int] = set()
        while True:
            self._online = {info.node_id: info.name for info in self.grid.get_nodes()}
            seconds_left = deadline - time.monotonic()
            unknown_nodes = self._online.keys() - self._nodes.values() - self._announcements.waiting.keys() - asked
            if self._num_served(clients) >= min_clients:
                unknown_nodes -= self._node_errors.keys()
            if seconds_left > 0:  # Flower rejects a message without time to live
                queries = {node: Message(RecordDict({}), node, ANNOUNCE_MESSAGE, ttl=seconds_left) for node in sorted(unknown_nodes)}
                self._announcements.send(queries)
                asked |= unknown_nodes
            for node, reply in self._announcements.receive():
                self._note_announcement(node, reply)
            if self._num_served(clients) >= min_clients or time.monotonic() > deadline:
                return [client for client in clients if self.node_of(client) is None]
            pause()

    def _num_served(self, clients: Sequence[int]) -> int:
        """Return how many of the clients have a node."""
        return sum(self.node_of(client) is not None for client in clients)

    def errors(self) -> str:
        """Describe the online nodes that serve no client, for an error message."""
        unannounced = dict.fromkeys(self._announcements.waiting, "it has not announced which client it serves")
        return "".join(f"; node {node}: {reason}" for node, reason in (unannounced | self._node_errors).items() if node in self._online)

    def _note_announcement(self, node: int, reply: Message) -> None:
        """Note which client a node serves, or why it serves none."""
        try:
            client, num_examples = parse_reply(reply)
            example_shape = parse_shape(reply)
            if (name := self._online.get(node, "")).startswith(NODE_NAME_PREFIX) and name != f"{NODE_NAME_PREFIX}{client}":
                raise wire.PacketError(f"it announces client {client}, and its key is registered as {name}")
            if (owner := self._nodes.get(client, node)) != node:
                raise wire.PacketError(f"client {client} belongs to node {owner} until the server restarts; start it with that node's key")
            if num_examples != (announced := self.num_examples.get(client, num_examples)):
                raise wire.PacketError(f"client {client} announced {announced} examples before, and {num_examples} now; start a new run")
        except wire.PacketError as error:
            self._node_errors[node] = str(error)
            return
        self._node_errors.pop(node, None)
        self._nodes[client], self.num_examples[client], self._example_shapes[client] = node, num_examples, example_shape
        self.note_memories(client, reply)
