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


class LinearObjective(Objective, Protocol):
    """A linear model, which can be restricted to some of its features."""

    num_features: int
    num_outputs: int

    def with_features(self, num_features: int) -> "LinearObjective":
        """Return the same model over `num_features` features, with weights stored feature by feature."""
        ...


class Workload(NamedTuple):
    """How much each client of a cohort computes."""

    exchanges: int
    """exchanges per round: n(B) for gradient exchange, else 1"""
    local_steps: int
    """local steps per exchange"""
    batch_size: int | None
    """examples per local step; None: all examples of the client"""
    needs_smoothness: bool = False
    """whether local steps read `Batch.smoothness`"""


def _unchanged(client: Any, _num_skipped: Tensor, _clock: Clock) -> Any:
    return client


@dataclass(frozen=True, kw_only=True)
class EngineSupport:
    """What engines may know about an algorithm in order to run it on sparse examples and on stacks of clients.

    No formula of an algorithm is defined here. The defaults are correct for every algorithm whose local steps leave a weight unchanged
    if its gradient is zero.
    """

    vector_fields: tuple[str, ...]
    """fields of the client state that hold one value per parameter"""
    replies_have_equal_length: Callable[[Layout], bool]
    """whether the replies of all clients have the same number of entries, so that they can be stacked"""
    projected_field: str | None = None
    """the field whose nonzero weights are compared with each other in a local step, so that none of them may be left out"""
    unseen_weights_are_equal: bool = False
    """whether all weights that are neither in the broadcast nor in the client's examples have the same state"""
    apply_skipped_steps: Callable[[Any, Tensor, Clock], Any] = _unchanged
    """(client, number of steps without a gradient per coordinate, clock) -> client after these steps"""
    fused_step: Callable[["LinearObjective", Any, Tensor, Batch, Clock], bool] | None = None
    """`client_step` in place, on some features of a client state that holds more; False if its options do not allow it"""


@runtime_checkable
class Algorithm(Protocol):
    """A frozen dataclass of options with pure methods: state in, state out, random numbers as an argument.

    The methods are listed in the order in which a round calls them.
    """

    @property
    def workload(self) -> Workload:
        """How much a client computes."""
        ...

    def init(self, layout: Layout, weights: Tensor, draw: Draw) -> Any:
        """Return the initial server state."""
        ...

    def broadcast(self, server: Any, clock: Clock, draw: Draw) -> Packet:
        """Return the message to the cohort, already quantized."""
        ...

    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: Any) -> Any:
        """Return the client state that the broadcast defines, without a client axis."""
        ...

    def client_step(self, objective: Objective, client: Any, batch: Batch, clock: Clock, draw: Draw) -> Any:
        """Return a stack of clients after one local step."""
        ...

    def client_reply(self, client: Any, clock: Clock, draw: Draw) -> Packet:
        """Return the replies of a stack of clients."""
        ...

    def expected_reply_fields(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """Return the fields and scalars that a reply to `packet` must have."""
        ...

    def decode_sparse(self, packet: Packet, dtype: Any) -> dict[str, SparseVector]:
        """Return the vectors in a packet, or in a stack of packets, by name."""
        ...

    def aggregate(self, server: Any, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Any:
        """Return the server state after the replies to `packet`."""
        ...

    def end_round(self, server: Any, clock: Clock) -> Any:
        """Return the server state after the last exchange of a round."""
        ...

    def parameters(self, server: Any) -> Tensor:
        """Return the test-time parameters (p,), of which exactly m are nonzero."""
        ...

    def unprojected_parameters(self, server: Any) -> Tensor:
        """Return the server's parameters before the final projection."""
        ...

    def diagnostics(self, server: Any) -> dict[str, Tensor]:
        """Return numbers to report: densities, multiplier, violation."""
        ...

    @property
    def engine_support(self) -> EngineSupport:
        """What engines may use to run the algorithm on sparse examples and on stacks of clients."""
        ...
