"""Types that algorithms, objectives and engines share. Letters: p parameters, m kept weights, k clients, b examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fedsieve.core.batches import IndexedRows, SparseBatch
from fedsieve.core.packets import Packet, concatenate


class Batch(NamedTuple):
    """Examples of a stack of clients: x (*k, b, ...) and y (*k, b, ...)."""

    x: Tensor | IndexedRows | SparseBatch
    y: Tensor
    smoothness: Tensor | None = None
    """(*k,): smoothness L of each client's loss; None if the algorithm does not need it"""
    module_seeds: list[int] | None = None
    """one seed per client for random layers such as dropout"""
    buffers: list[dict[str, Tensor]] | None = None
    """the buffers of each client's model by name, which a training step may change; None if the model has none"""


@runtime_checkable
class CsrMatrix(Protocol):
    """A CSR matrix of SciPy. It is a protocol, so that clients with dense examples need no SciPy."""

    indptr: Any
    indices: Any
    data: Any
    shape: Any

    def __getitem__(self, rows: Any, /) -> Any:
        """Return some rows, as such a matrix."""
        ...


class Clock(NamedTuple):
    """Position in a run, for schedules on the server and on clients."""

    round: int
    num_rounds: int
    exchange: int = 0


class Layout(NamedTuple):
    """The layers of a flat parameter vector: name -> slice and shape in the model."""

    size: int
    layers: dict[str, tuple[slice, tuple[int, ...]]]
    num_ungated: int = 0
    """number of last coordinates outside all layers, such as an intercept: always kept, not gated, not counted in the density"""
    groups: Tensor | None = None
    """(size,): the group of each coordinate, numbered along the layers; a group is kept or dropped whole"""
    global_index: Callable[[np.ndarray], np.ndarray] | None = None
    """maps indices of a restricted vector to those of the full one; None if the vector is full"""

    @property
    def num_gated(self) -> int:
        """Number of coordinates that the density counts."""
        return self.size - self.num_ungated


class Reply(NamedTuple):
    """The reply of one client."""

    client: int
    packet: Packet
    num_examples: float


@dataclass(eq=False)
class StackedReplies(Sequence[Reply]):
    """Replies of a cohort as one stacked packet; it is unstacked only if a single reply is accessed."""

    clients: Sequence[int]
    packet: Packet
    num_examples: Sequence[float]

    @cached_property
    def _replies(self) -> list[Reply]:
        return [Reply(*each) for each in zip(self.clients, self.packet.unstack(), self.num_examples, strict=True)]

    def __len__(self) -> int:
        """Number of replies."""
        return len(self.clients)

    def __getitem__(self, i: Any) -> Any:
        """One reply, or a slice of them."""
        return self._replies[i]


def stack_replies(replies: Sequence[Reply]) -> Packet | None:
    """Replies as one stacked packet, or None if their schemas differ."""
    return replies.packet if isinstance(replies, StackedReplies) else concatenate([reply.packet.unsqueeze() for reply in replies])


@dataclass(frozen=True)
class Traffic:
    """Bytes sent in one direction, counted in three ways (decision E6): the paper's formula, values and positions, and all bytes.

    The last five fields are the parts of `total` and add up to it.
    """

    paper_formula: int = 0
    payload: int = 0
    total: int = 0
    header: int = 0
    """includes the checksum"""
    positions: int = 0
    scalars: int = 0
    weights: int = 0
    gates: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        """The sum of two messages."""
        return Traffic(*map(add, vars(self).values(), vars(other).values()))  # `dataclasses.astuple` copies deeply and is slow


class ClientMemory(NamedTuple):
    """What one client keeps between two of its rounds."""

    round: int
    """the round of the reply after which the client kept it"""
    vectors: dict[str, Tensor]
    """vectors (p,) by name; the server of a deployment knows only the round, since its nodes hold the vectors"""


class ClientMemories(NamedTuple):
    """The memories of all clients before an exchange, and the messages that build on them."""

    by_client: Mapping[int, ClientMemory] = {}
    """only clients whose reply was accepted before have one"""
    catch_up: Callable[[int | None], Sequence[Packet]] = lambda _: ()
    """(round of a client's memory, None without one) -> messages that this client can use instead of the broadcast"""


NO_MEMORIES = ClientMemories()


class ExchangeResult(NamedTuple):
    """The result of one exchange; clients may be missing."""

    replies: Sequence[Reply]
    rejected: list[tuple[int, str]]
    downlink: Traffic
    uplink: Traffic
    memories: Mapping[int, ClientMemory] = {}
    """what clients keep if their reply is accepted"""
    links: Mapping[str, int] = {}
    """bytes of each link between aggregators, both directions; empty without aggregators"""

    @property
    def clients(self) -> Sequence[int]:
        """The clients that replied."""
        return self.replies.clients if isinstance(self.replies, StackedReplies) else [reply.client for reply in self.replies]


Exchange = Callable[..., ExchangeResult]
"""(clock, packet, clients) -> result: sends a packet to clients and returns their replies. Simulation and deployment differ only here.

If the algorithm's clients have memory, a fourth argument is their `ClientMemories`."""
