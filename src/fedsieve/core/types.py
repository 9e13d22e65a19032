"""The contract between algorithms, objectives, engines and the round. Letters: p parameters, m kept, k clients, b rows."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from operator import add
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fedsieve.core.batches import IndexedRows, SparseBatch
from fedsieve.core.packets import Packet, SparseVector, concatenate
from fedsieve.core.random import Draw


class Batch(NamedTuple):
    """Rows of a stack of clients: x (*k, b, ...), y (*k, b, ...), and what each client knows of its own curvature."""

    x: Tensor | IndexedRows | SparseBatch
    y: Tensor
    smoothness: Tensor | None = None
    """(*k,): L of the client's loss, for the step cap; None where no method asks for it"""
    module_seeds: list[int] | None = None
    """one a client: for objectives with noise of their own, such as dropout"""


@runtime_checkable
class CsrMatrix(Protocol):
    """A CSR matrix as SciPy makes it, by what is asked of it: a client with dense rows needs no SciPy."""

    indptr: Any
    indices: Any
    data: Any
    shape: tuple[int, ...]


class Clock(NamedTuple):
    """Where a run stands: what schedules need, on both sides."""

    round: int
    num_rounds: int
    exchange: int = 0


class Layout(NamedTuple):
    """How a flat parameter vector is made of layers: name -> its slice and the shape it has in the model."""

    size: int
    layers: dict[str, tuple[slice, tuple[int, ...]]]
    num_ungated: int = 0
    """the last coordinates, outside all layers: always kept, never gated, not counted in the density (an intercept)"""
    groups: Tensor | None = None
    """(size,): the group of each coordinate, numbered along the layers; a group is kept or dropped whole"""
    global_index: Callable[[np.ndarray], np.ndarray] | None = None
    """where some coordinates stand among all, if a vector holds a few of them in an order of its own (sparse rows)"""

    @property
    def num_gated(self) -> int:
        """Coordinates the density counts."""
        return self.size - self.num_ungated


class Reply(NamedTuple):
    """What one client sent back."""

    client: int
    packet: Packet
    num_examples: int


class StackedReplies(Sequence[Reply]):
    """Replies made together: one packet for all clients of a cohort, taken apart only when somebody asks for one of them."""

    def __init__(self, clients: Sequence[int], packet: Packet, num_examples: Sequence[int]) -> None:
        self.clients = clients
        self.packet = packet
        self.num_examples = num_examples

    @cached_property
    def _replies(self) -> list[Reply]:
        return [Reply(*each) for each in zip(self.clients, self.packet.unstack(), self.num_examples, strict=True)]

    def __len__(self) -> int:
        """How many replied."""
        return len(self.clients)

    def __getitem__(self, i: Any) -> Any:
        """One of them."""
        return self._replies[i]


def stack_replies(replies: Sequence[Reply]) -> Packet | None:
    """Replies as one packet, if they have one form."""
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
        return Traffic(*map(add, astuple(self), astuple(other)))

    def __mul__(self, num_copies: int) -> "Traffic":
        """The same message sent several times."""
        return Traffic(*(num_copies * part for part in astuple(self)))


class ExchangeResult(NamedTuple):
    """What came of one exchange. Fewer replies than asked for is normal."""

    replies: Sequence[Reply]
    rejected: list[tuple[int, str]]
    downlink: Traffic
    uplink: Traffic

    @property
    def clients(self) -> Sequence[int]:
        """Who replied."""
        return self.replies.clients if isinstance(self.replies, StackedReplies) else [reply.client for reply in self.replies]


Exchange = Callable[[Clock, Packet, Sequence[int]], ExchangeResult]
"""Send this packet to these clients, give me their replies: all that differs between simulation and deployment."""


@runtime_checkable
class Objective(Protocol):
    """A loss over a flat parameter vector, for a stack of clients at once."""

    layout: Layout

    @property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Slice and shape of every parameter in the flat vector by name, ungated ones included."""
        ...

    @property
    def has_random_layers(self) -> bool:
        """Whether `gradient` uses `Batch.module_seeds`."""
        ...

    @property
    def supports_indexed_rows(self) -> bool:
        """Whether `gradient` accepts `IndexedRows`."""
        ...

    def initial_weights(self, draw: Draw) -> Tensor:
        """theta~ (p,) at the start."""
        ...

    def gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss (*k,) and its gradient (*k, p) at theta (*k, p)."""
        ...

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """What the model says of rows x (n, ...): predictions or logits."""
        ...

    def zero_model_loss(self, batch: Batch) -> Tensor:
        """Mean loss (*k,) of a model whose weights are all zero; inf where that says nothing."""
        ...

    def smoothness(self, examples: Batch, batch_size: int) -> Tensor:
        """L of the mini-batch loss of one client that owns `rows`."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """A frozen dataclass of hyper-parameters with pure methods. State is explicit; noise is an argument."""

    @property
    def exchanges_per_round(self) -> int:
        """Exchanges a round: n(B) for gradient methods, 1 otherwise."""
        ...

    @property
    def steps_per_exchange(self) -> int:
        """Local steps per exchange."""
        ...

    @property
    def examples_per_step(self) -> int | None:
        """Rows a step; None is all of a client's rows."""
        ...

    @property
    def needs_smoothness(self) -> bool:
        """Whether client steps want `Batch.smoothness`."""
        ...

    @property
    def all_reply_fields(self) -> frozenset[str]:
        """Fields and scalars that some client's packet may hold."""
        ...

    def expected_reply_fields(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """Those of replies to a packet; another reply is refused."""
        ...

    @property
    def needs_all_nonzero_weights(self) -> bool:
        """Whether a local step compares all weights with each other."""
        ...

    @property
    def unseen_weights_are_equal(self) -> bool:
        """Whether a client treats all weights alike that neither a sparse broadcast nor its rows speak of."""
        ...

    def replies_have_equal_length(self, layout: Layout) -> bool:
        """Whether all clients' messages have one length."""
        ...

    def apply_skipped_steps(self, client: Any, num_skipped: Tensor, clock: Clock) -> Any:
        """What local steps do to coordinates without a gradient, `missed` times each, where rows are sparse."""
        ...

    def init(self, layout: Layout, weights: Tensor, draw: Draw) -> Any:
        """The server's state at the start."""
        ...

    def broadcast(self, server: Any, clock: Clock, draw: Draw) -> Packet:
        """What the cohort receives, already rounded: exactly what a client will decode."""
        ...

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: Any) -> Any:
        """A client's state from the broadcast, without a client axis."""
        ...

    def client_step(self, objective: Objective, client: Any, batch: Batch, clock: Clock, draw: Draw) -> Any:
        """One local step of a stack of clients."""
        ...

    def fused_sparse_step(self, objective: Objective, client: Any, at: Tensor, batch: Batch, clock: Clock) -> bool:
        """`client_step` on some features of a client that holds more, where they stand; False where there is no form of it for that."""
        ...

    def client_reply(self, client: Any, clock: Clock, draw: Draw) -> Packet:
        """What each client of the stack sends back."""
        ...

    def decode_dense(self, packet: Packet, dtype: Any) -> dict[str, Tensor]:
        """What a packet says, part by part, as full vectors."""
        ...

    def decode_sparse(self, packet: Packet, dtype: Any) -> dict[str, SparseVector]:
        """What a packet says, part by part, at its support."""
        ...

    def aggregate(self, server: Any, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Any:
        """The server after the replies to `packet`."""
        ...

    def end_round(self, server: Any, clock: Clock) -> Any:
        """Once a round: scaling, dual."""
        ...

    def parameters(self, server: Any) -> Tensor:
        """Test-time parameters (p,): exactly m are not zero."""
        ...

    def unprojected_parameters(self, server: Any) -> Tensor:
        """The server's parameters before the final projection."""
        ...

    def diagnostics(self, server: Any) -> dict[str, Tensor]:
        """Numbers for people: densities, multiplier, violation."""
        ...
