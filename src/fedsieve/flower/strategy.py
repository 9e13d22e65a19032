"""SparseStrategy: a wrapper that makes the messages of any Flower strategy sparse."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from logging import INFO, WARNING
from math import isfinite
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Result,
    Strategy,
)

from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.random import Draw, server_sampler
from fedsieve.core.reply_validation import ReplyLimits, validate_replies
from fedsieve.core.settings import parse_value
from fedsieve.core.types import Clock, ExchangeResult, Reply, Traffic
from fedsieve.flower import black_box
from fedsieve.flower.array_layout import ArrayLayout, to_numpy
from fedsieve.flower.sparse_messages import (
    Broadcast,
    RunSettings,
    model_packet,
    model_weights,
    read_bytes,
    record_size,
    replace_arrays,
    single_arrays,
)
from fedsieve.formatting import format_bytes

BYTES_UP, BYTES_DOWN, DENSITY = "bytes-up", "bytes-down", "density"
"""Metrics of a round: bytes of all replies and of all broadcasts, and the share of gated weights that are not zero."""
CLIENT_CLIPPING = (DifferentialPrivacyClientSideFixedClipping, DifferentialPrivacyClientSideAdaptiveClipping)


class ServerState(NamedTuple):
    """The server between two rounds, and the model that it returned."""

    settings: RunSettings
    server: Any
    model: ArrayRecord
    """the arrays from which the next round starts"""


class SentRound(NamedTuple):
    """What the server sent in the round that is running."""

    clock: Clock
    packet: Packet
    bytes_down: int


class SparseStrategy(Strategy):
    """Wraps a Flower strategy so that clients and server exchange sparse messages. It needs sparse_mod in the client app.

    Parameters
    ----------
    strategy : Strategy
        The strategy that samples clients, aggregates their weights and configures evaluation.
    density : float (default: 0.05)
        Fraction of the gated weights that may be nonzero.
    algorithm : str (default: "sieve")
        sieve, sign-ht, fed-round-ht, fed-ht, fed-ef, eden or fed-avg.
    seed : int (default: 0)
        Seed of the rounding in messages.
    ungated : str or sequence of str (default: ())
        Patterns of names of arrays that are sent whole, such as `"embedding.*"`. Arrays of one dimension and of integers always are.
    **options
        Options of the algorithm that concern messages, such as `search_fraction=0.7`.

    Examples
    --------
    ::

        strategy = SparseStrategy(FedAvg(fraction_train=0.5), density=0.05)
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)
    """

    def __init__(
        self,
        strategy: Strategy,
        density: float = 0.05,
        algorithm: str = "sieve",
        *,
        seed: int = 0,
        ungated: str | Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(strategy, Strategy):
            raise ValueError(f"SparseStrategy wraps a strategy of Flower, such as FedAvg(); got {strategy!r}")
        inner = strategy
        while isinstance(inner, Strategy):
            if isinstance(inner, CLIENT_CLIPPING):
                raise ValueError(
                    f"SparseStrategy cannot wrap {type(inner).__name__}: a message may be longer than the update that a client "
                    f"has clipped, and the noise would be too small; use its server-side variant"
                )
            if isinstance(inner, SparseStrategy):
                raise ValueError("SparseStrategy cannot wrap another SparseStrategy; use one")
            inner = getattr(inner, "strategy", None)
        self.strategy = strategy
        self.density, self.seed = parse_value(float, density, "density"), parse_value(int, seed, "seed")
        self.algorithm_name, self.options = algorithm, options
        self.ungated = (ungated,) if isinstance(ungated, str) else tuple(ungated)
        self.algorithm = black_box.build_algorithm(algorithm, self.density, options)
        self._num_rounds: int | None = None
        self._state: ServerState | None = None
        self._sent: SentRound | None = None
        self._evaluated_bytes = 0
        self._memory_rounds: dict[int, int] = {}

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **kwargs: Any) -> Result:
        """Execute the wrapped strategy for `num_rounds` rounds; the schedules of the algorithm end with them."""
        self._num_rounds, self._state, self._memory_rounds = num_rounds, None, {}
        return super().start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def summary(self) -> None:
        """Log the settings of the wrapper and of the wrapped strategy."""
        log(INFO, "\t├──> Sparse messages: algorithm %s, density %g", self.algorithm_name, self.density)
        self.strategy.summary()

    # Training

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Let the wrapped strategy sample clients for the weights of a broadcast, and encode them."""
        if self._num_rounds is None:
            raise ValueError(
                "SparseStrategy does not know the number of rounds; it must be the outermost strategy, whose start() is called: "
                "SparseStrategy(OtherWrapper(FedAvg()))"
            )
        if self._state is None or arrays is not self._state.model:
            self._state = self._initial_state(arrays)
        settings, clock = self._state.settings, Clock(server_round - 1, self._num_rounds)
        packet = self.algorithm.broadcast(self._state.server, clock, self._draw(clock))
        dense = settings.arrays.dense_arrays(to_numpy(arrays))
        weights = black_box.received_weights(self.algorithm, packet)
        sent = settings.arrays.unflatten(weights, dense)
        messages = list(self.strategy.configure_train(server_round, sent, config, grid))
        by_round: dict[int | None, tuple[ArrayRecord, ConfigRecord]] = {}
        total = 0
        for message in messages:
            known = self._memory_rounds.get(message.metadata.dst_node_id)
            if known not in by_round:
                by_round[known] = Broadcast(settings, clock, packet, dense, True, known).to_records()
            total += self._encode(message, *by_round[known])
        self._sent = SentRound(clock, packet, total)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies, let the wrapped strategy aggregate the valid ones, and step the server of the algorithm."""
        state, sent = self._state, self._sent
        assert state is not None, "configure_train comes first"
        assert sent is not None, "configure_train comes first"
        replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)  # sums do not depend on who replied first
        bytes_up = sum(record_size(record) for reply in replies if reply.has_content() for record in reply.content.array_records.values())
        valid = self._accept(replies, lambda reply: self._decode(reply, state.settings, sent))
        if replies and all(reply.has_error() for reply in valid):
            log(WARNING, "SparseStrategy: no reply can be aggregated; is the client app ClientApp(mods=[sparse_mod])?")
        arrays, metrics = self.strategy.aggregate_train(server_round, valid)
        if arrays is not None:
            arrays = self._step(state, sent, arrays)
        if arrays is not None and self.algorithm.engine_support.memory is not None:
            self._memory_rounds |= {reply.metadata.src_node_id: sent.clock.round for reply in valid if not reply.has_error()}
        metrics = MetricRecord() if metrics is None else metrics
        metrics[BYTES_UP], metrics[BYTES_DOWN] = bytes_up, sent.bytes_down
        if arrays is not None:
            metrics[DENSITY] = self._density(arrays)
        dense = len(replies) * state.settings.arrays.num_bytes
        log(
            INFO,
            "aggregate_train: sparse messages: %s up, %s down (dense: %s each way)",
            format_bytes(bytes_up),
            format_bytes(sent.bytes_down),
            format_bytes(dense),
        )
        return arrays, metrics

    def _initial_state(self, arrays: ArrayRecord) -> ServerState:
        """Return the server state before the first round, or after the arrays were changed from outside."""
        values = to_numpy(arrays)
        for pattern in self.ungated:
            if not any(fnmatch(name, pattern) for name in values):
                raise ValueError(f"SparseStrategy: ungated {pattern!r} matches no array; there are {', '.join(values)}")
        layout = ArrayLayout.of(values, self.ungated)
        if not layout.gated:
            raise ValueError(
                "SparseStrategy found no array with gates: floating-point arrays of two or more dimensions that match no pattern "
                "of `ungated`"
            )
        weights = layout.flatten(values)
        if not weights.isfinite().all():
            name = next(name for name, (part, _) in layout.layout.layers.items() if not weights[part].isfinite().all())
            raise ValueError(f"array {name} has a value that is not finite; if it is a buffer, use SparseStrategy(ungated=({name!r},))")
        settings = RunSettings(self.algorithm_name, self.density, self.options, self.seed, layout)
        server = self.algorithm.init(layout.layout, weights, server_sampler(self.seed, 0, 0, torch.float32))
        return ServerState(settings, server, arrays)

    def _step(self, state: ServerState, sent: SentRound, aggregated: ArrayRecord) -> ArrayRecord | None:
        """Step the server towards the aggregated arrays and return the model; None if a value is not finite."""
        layout, values = state.settings.arrays, to_numpy(aggregated)
        if (difference := layout.find_difference(values)) is not None:
            raise ValueError(f"{type(self.strategy).__name__} returned other arrays than it was given: {difference}")
        weights, draw = layout.flatten(values), self._draw(sent.clock)
        if not weights.isfinite().all():
            log(WARNING, "aggregate_train: %s returned a weight that is not finite; the round is ignored", type(self.strategy).__name__)
            return None
        server = black_box.aggregate(self.algorithm, state.server, sent.packet, layout.layout, weights, sent.clock, draw)
        weights = model_weights(model_packet(self.algorithm.parameters(server), draw))
        model = layout.unflatten(weights, layout.dense_arrays(values))
        self._state = ServerState(state.settings, server, model)
        return model

    def _decode(self, reply: Message, settings: RunSettings, sent: SentRound) -> None:
        """Replace the packet in a reply by the arrays that it describes, or raise PacketError."""
        key, record = single_arrays(reply.content)
        data, layout = read_bytes(record, "packet"), settings.arrays
        if len(data) > (limit := wire.max_packet_size(layout.layout.size, self.algorithm.all_reply_fields)):
            raise wire.PacketError(f"oversized: {len(data)} bytes; no reply of this model has more than {limit}")
        packet = wire.decode(data, settings.message_id(sent.clock), layout.layout.size, sent.packet.support)
        packet = black_box.with_known_gates(packet, sent.packet)
        dense = layout.dense_from_bytes(read_bytes(record, "dense"))
        result = ExchangeResult([Reply(0, packet, 1)], [], Traffic(), Traffic())
        checked = validate_replies(self.algorithm, sent.packet, result, [0], sent.clock, ReplyLimits(), torch.float32)
        if checked.rejected:
            raise wire.PacketError(checked.rejected[0][1])
        weights = black_box.replied_weights(self.algorithm, sent.packet, packet)
        reply.content = replace_arrays(reply.content, key, layout.unflatten(weights, dense))

    # Evaluation

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Let the wrapped strategy sample clients, and encode the model."""
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self._evaluated_bytes = 0
        if messages and self._state is not None:
            settings, clock, values = self._state.settings, Clock(server_round - 1, self._num_rounds or server_round), to_numpy(arrays)
            packet = model_packet(settings.arrays.flatten(values), self._draw(clock))
            records = Broadcast(settings, clock, packet, settings.arrays.dense_arrays(values), False).to_records()
            self._evaluated_bytes = sum(self._encode(message, *records) for message in messages)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the wrapped strategy aggregate the metrics of the valid replies."""
        metrics = self.strategy.aggregate_evaluate(server_round, self._accept(list(replies)))
        if metrics is not None and self._evaluated_bytes:
            metrics[BYTES_DOWN] = self._evaluated_bytes
        return metrics

    # Messages

    def _encode(self, message: Message, arrays: ArrayRecord, config: ConfigRecord) -> int:
        """Replace the arrays of a message by a packet; return the number of its bytes."""
        key, _ = single_arrays(message.content)
        message.content = replace_arrays(message.content, key, arrays, config)
        return record_size(arrays, config)

    def _accept(self, replies: Sequence[Message], decode: Callable[[Message], None] | None = None) -> list[Message]:
        """Return the replies that can be aggregated, and those of clients that failed; the others are named in the log."""
        accepted = []
        weight_key = _weight_key(self.strategy)
        schemas = Counter(
            schema for reply in replies if (schema := _metric_schema(reply)) is not None and weight_key in (None, *dict(schema))
        )
        usual = schemas.most_common(1)[0][0] if schemas else None
        for reply in replies:
            try:
                if not reply.has_error():
                    if decode is not None:
                        decode(reply)
                    _require_metrics(reply, weight_key, usual)
                accepted.append(reply)
            except wire.PacketError as error:
                log(WARNING, "SparseStrategy: the reply of node %d is not aggregated: %s", reply.metadata.src_node_id, error)
        return accepted

    def _draw(self, clock: Clock) -> Draw:
        return server_sampler(self.seed, clock.round, clock.exchange, torch.float32)

    def _density(self, arrays: ArrayRecord) -> float:
        assert self._state is not None
        return float((self._state.settings.arrays.flatten(to_numpy(arrays)) != 0).float().mean())


def _weight_key(strategy: Any) -> str | None:
    """Return the metric by which a strategy weights clients, or None; a wrapper has a strategy inside."""
    while isinstance(getattr(strategy, "strategy", None), Strategy):
        strategy = strategy.strategy
    return getattr(strategy, "weighted_by_key", None)


def _metric_schema(reply: Message) -> tuple[tuple[str, int | None], ...] | None:
    """Return names and lengths of the metrics in a reply (None: a number); None if it has not exactly one MetricRecord."""
    if not reply.has_content() or len(reply.content.metric_records) != 1:
        return None
    metrics = next(iter(reply.content.metric_records.values()))
    return tuple(sorted((name, len(value) if isinstance(value, list) else None) for name, value in metrics.items()))


def _require_metrics(reply: Message, weight_key: str | None, usual: tuple[tuple[str, int | None], ...] | None) -> None:
    """Raise PacketError if the metrics of a reply would stop the wrapped strategy, or make its mean not finite."""
    schema = _metric_schema(reply)
    if schema is None or schema != usual:
        needed = "" if weight_key is None else f", {weight_key!r} among them"
        raise wire.PacketError(f"it must have one MetricRecord with the metrics that most replies have{needed}")
    if weight_key is None:
        return
    weight = next(iter(reply.content.metric_records.values()))[weight_key]
    if isinstance(weight, list) or not isfinite(weight) or weight <= 0:
        raise wire.PacketError(f"its {weight_key!r} is {weight}; it must be a number above 0")
