"""Types and protocols shared by algorithms, objectives and engines. Letters: p parameters, m kept weights, k clients, b examples."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fedsieve.core.aggregation import Aggregator
from fedsieve.core.batches import BatchSampling, IndexedRows, SparseBatch
from fedsieve.core.optimizers import StepRule
from fedsieve.core.packets import Packet, SparseVector, concatenate
from fedsieve.core.private_mean import GaussianMechanism
from fedsieve.core.random import Draw


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


@runtime_checkable
class Objective(Protocol):
    """A loss over a flat parameter vector, for a stack of clients at once."""

    has_random_layers: ClassVar[bool]
    """whether `gradient` uses `Batch.module_seeds`"""

    @property
    def layout(self) -> Layout:
        """The layers of the flat vector."""
        ...

    @property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Slice and shape of every parameter in the flat vector by name, ungated ones included."""
        ...

    @property
    def supports_indexed_rows(self) -> bool:
        """Whether `gradient` accepts `IndexedRows`."""
        ...

    def initial_weights(self, draw: Draw) -> Tensor:
        """Initial weights theta~ (p,)."""
        ...

    def gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss (*k,) and its gradient (*k, p) at theta (*k, p)."""
        ...

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """Predictions or logits for examples x (n, ...)."""
        ...

    def zero_model_loss(self, batch: Batch) -> Tensor:
        """Mean loss (*k,) of a model with zero weights; inf if it is not meaningful."""
        ...

    def smoothness(self, examples: Batch, batch_size: int) -> Tensor:
        """Smoothness L of the mini-batch loss of one client with these examples; 0 if no bound is known."""
        ...

    def local_smoothness(self, smoothness: Tensor, loss_fraction: Tensor) -> Tensor:
        """Smoothness near weights whose loss is this fraction of the zero model's, at most 1."""
        ...


@runtime_checkable
class BufferedObjective(Objective, Protocol):
    """A model with buffers that training may change, such as the running statistics of BatchNorm: b values in all."""

    @property
    def buffer_slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Slice and shape of every buffer in the vector of parameters and buffers (p + b,), by name."""
        ...

    def initial_buffers(self, draw: Draw) -> Tensor:
        """Values (b,) of the buffers before training, float32."""
        ...

    def make_buffers(self, values: Tensor) -> dict[str, Tensor]:
        """Buffers with these values (b,), by name, which the caller may change."""
        ...

    def buffer_values(self, buffers: Mapping[str, Tensor]) -> Tensor:
        """The values (b,) of buffers, float32."""
        ...

    def average_buffers(self, values: Tensor, weights: Tensor) -> Tensor:
        """The buffers (b,) of all clients together, from those of each (k, b) and its weight (k,)."""
        ...


@runtime_checkable
class LinearObjective(Objective, Protocol):
    """A linear model: what training on sparse examples and standardization need."""

    @property
    def num_features(self) -> int:
        """Number of input features."""
        ...

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        ...

    def with_features(self, num_features: int) -> "LinearObjective":
        """The same model over some features, with its weights ordered by feature."""
        ...


class Workload(NamedTuple):
    """How much each client of a cohort computes."""

    exchanges: int
    """exchanges per round: n(B) for gradient exchange, else 1"""
    local_steps: int
    """local steps per exchange"""
    batch_size: int | None
    """examples per local step; None: all examples of the client"""
    step_rule: StepRule = StepRule.CONSTANT
    """all but `constant` read `Batch.smoothness`"""
    batch_sampling: BatchSampling = BatchSampling.SHUFFLED
    """how a client draws its mini-batches"""
    full_rounds: int = 0
    """number of first rounds in which all clients take part"""


def _unchanged(client: Any, _num_skipped: Tensor, _clock: Clock) -> Any:
    return client


@dataclass(frozen=True, kw_only=True)
class MemorySupport:
    """What the clients of an algorithm keep from one of their rounds to the next.

    A client keeps it if the server accepts its reply, so that it holds exactly what the server has not received. A client that takes
    part for the first time has none.
    """

    vectors: tuple[str, ...]
    """fields of the client state that are kept, with one value per parameter; they replace what `client_init` sets"""
    after_reply: Callable[[Any, Packet], dict[str, Tensor]]
    """(stack of clients, their replies) -> these vectors (k, p) after the replies"""
    catch_up: "CatchUp | None" = None
    """messages that replace the broadcast for a client that has received an earlier one; None: all clients receive the broadcast"""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all vectors that a client keeps."""
        return self.vectors if self.catch_up is None else (*self.vectors, self.catch_up.model_field)


class CatchUp(NamedTuple):
    """Messages about the updates that a client missed."""

    model_field: str
    """field of the client state with the model that the client received; it is kept until the next message"""
    messages: Callable[[Any, int, Draw], list[Packet]]
    """(server, first missed round, draw) -> messages with the field `update`"""
    receive: Callable[[Packet, Tensor], Packet]
    """(catch-up message, the model that the client received last) -> the broadcast of this round"""


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
    fused_step: Callable[["LinearObjective", Any, Tensor, Batch, Clock, Draw], bool] | None = None
    """`client_step` in place, on some features of a client state that holds more; False if its options do not allow it"""
    needs_all_weights: str | None = None
    """why a local step cannot be restricted to the features of a batch, so that sparse examples are refused; None if it can"""
    memory: MemorySupport | None = None
    """what clients keep between their rounds; None: nothing"""


@runtime_checkable
class AggregationOptions(Protocol):
    """Options of an algorithm whose aggregate may be private or robust; an algorithm without them has the weighted mean."""

    @property
    def privacy(self) -> GaussianMechanism | None:
        """Clipping and noise; None: no privacy."""
        ...

    @property
    def aggregator(self) -> Aggregator:
        """How client updates are aggregated."""
        ...

    @property
    def max_malicious_fraction(self) -> float:
        """The fraction of a cohort that may be malicious."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """A frozen dataclass of options with pure methods: state in, state out, random numbers as an argument.

    The methods are listed in the order in which a round calls them.
    """

    @property
    def workload(self) -> Workload:
        """How much a client computes."""
        ...

    @abstractmethod
    def init(self, layout: Layout, weights: Tensor, draw: Draw) -> Any:
        """Return the initial server state."""
        ...

    @abstractmethod
    def broadcast(self, server: Any, clock: Clock, draw: Draw) -> Packet:
        """Return the message to the cohort, already quantized."""
        ...

    @abstractmethod
    def client_init(self, packet: Packet, layout: Layout, clock: Clock, dtype: Any) -> Any:
        """Return the client state that the broadcast defines, without a client axis."""
        ...

    @abstractmethod
    def client_step(self, objective: Objective, client: Any, batch: Batch, clock: Clock, draw: Draw) -> Any:
        """Return a stack of clients after one local step."""
        ...

    @abstractmethod
    def client_reply(self, client: Any, clock: Clock, draw: Draw) -> Packet:
        """Return the replies of a stack of clients."""
        ...

    def expected_reply_fields(self, packet: Packet, clock: Clock) -> frozenset[str]:
        """Return the fields and scalars that a reply to `packet` must have."""
        ...

    def decode_sparse(self, packet: Packet, dtype: Any) -> dict[str, SparseVector]:
        """Return the vectors in a packet, or in a stack of packets, by name."""
        ...

    @abstractmethod
    def aggregate(self, server: Any, packet: Packet, replies: Sequence[Reply], clock: Clock, draw: Draw) -> Any:
        """Return the server state after the replies to `packet`."""
        ...

    def end_round(self, server: Any, clock: Clock) -> Any:
        """Return the server state after the last exchange of a round."""
        ...

    @abstractmethod
    def parameters(self, server: Any) -> Tensor:
        """Return the test-time parameters (p,), of which exactly m are nonzero."""
        ...

    @abstractmethod
    def unprojected_parameters(self, server: Any) -> Tensor:
        """Return the server's parameters before the final projection."""
        ...

    def diagnostics(self, server: Any) -> dict[str, Tensor]:
        """Return numbers to report: densities, multiplier, violation."""
        ...

    @property
    @abstractmethod
    def engine_support(self) -> EngineSupport:
        """What engines may use to run the algorithm on sparse examples and on stacks of clients."""
        ...
