"""What engines expect of an objective and of an algorithm. Letters: p parameters, m kept weights, k clients, b examples."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from fedsieve.core.aggregation import Aggregator
from fedsieve.core.batches import BatchSampling
from fedsieve.core.optimizers import StepRule
from fedsieve.core.packets import Packet, SparseVector
from fedsieve.core.private_mean import GaussianMechanism
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock, Layout, Reply


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


def _keep_client(client: Any, _num_skipped: Tensor, _clock: Clock) -> Any:
    return client


@dataclass(frozen=True, kw_only=True)
class MemorySupport:
    """What the clients of an algorithm keep from one of their rounds to the next.

    A client keeps it if the server accepts its reply, so that it holds exactly what the server has not received. A client that takes
    part for the first time has none.
    """

    vectors: tuple[str, ...]
    """fields of the client state that are kept; they replace what `client_init` sets"""
    after_reply: Callable[[Any, Packet], dict[str, Tensor]]
    """(stack of clients, their replies) -> these vectors (k, p), or numbers (k), after the replies"""
    one_number: bool = False
    """whether the fields hold one number instead of one value per parameter"""
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
    apply_skipped_steps: Callable[[Any, Tensor, Clock], Any] = _keep_client
    """(client, number of steps without a gradient per coordinate, clock) -> client after these steps"""
    fused_step: Callable[[LinearObjective, Any, Tensor, Batch, Clock, Draw], bool] | None = None
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
