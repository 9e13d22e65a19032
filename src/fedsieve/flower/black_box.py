"""Algorithms around a training function of the user: what a client replies after it, and what the server does with the mean.

The training function shows only the weights before and after a round. Gates of `sieve` are not learned by default, as for all networks;
with `learn_gates` the saliency of a gate is theta times the update of the round, not the sum of theta g over local steps, and gates are
not sampled while training.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import network_options, require_effect
from fedsieve.algorithms.sieve import Sieve, mean_gates
from fedsieve.core import gates
from fedsieve.core.gates import LOG_ALPHA_LIMIT
from fedsieve.core.packets import GATE_VALUE_FIELDS, Packet, dense_packet
from fedsieve.core.random import Draw
from fedsieve.core.settings import field_types, parse_settings
from fedsieve.core.types import ClientMemory, Clock, Layout, Reply

OFFERED = ("sieve", "sign-ht", "fed-round-ht", "fed-ht", "fed-ef", "eden", "fed-avg")
"""Algorithms whose clients do nothing inside a local step but train: they need only the weights before and after."""
TRAINING_OPTIONS = frozenset(
    {
        "batch_size",
        "batch_sampling",
        "local_steps",
        "learning_rate",
        "final_learning_rate_fraction",
        "step_rule",
        "max_gradient_norm",
        "recipe",
    }
)
"""Options of local steps, which the training function of the user decides."""
SERVER_OPTIONS = frozenset({"server_optimizer", "server_learning_rate", "server_momentum"})
"""Options of the server's step, which the wrapped strategy decides."""
ROUND_DEFAULTS: dict[str, dict[str, Any]] = {"sieve": {"gate_rate": 1.0}}
"""Defaults that differ because a round has one saliency instead of one for each local step."""


def build_algorithm(name: str, density: float, options: Mapping[str, Any]) -> BaseAlgorithm:
    """Return an algorithm with the options of messages that the user sets, or raise ValueError."""
    if name not in OFFERED:
        raise ValueError(
            f"algorithm {name!r} is none of SparseStrategy, which sees only the weights before and after `train`; "
            f"it offers {', '.join(OFFERED)}"
        )
    cls = algorithm_class(name)
    for owner, names in (("the train function", TRAINING_OPTIONS), ("the wrapped strategy", SERVER_OPTIONS)):
        if refused := sorted(names & options.keys()):
            raise ValueError(f"option {refused[0]} of SparseStrategy has no effect, because {owner} decides it; leave it out")
    names = cls.option_names() - TRAINING_OPTIONS - SERVER_OPTIONS
    parsed = parse_settings(field_types(cls, names), options, "SparseStrategy option ")
    defaults: dict[str, Any] = {key: value for key, value in network_options(cls).items() if key in names}
    if "server_learning_rate" in cls.option_names():
        defaults["server_learning_rate"] = 1.0
    return require_effect(cls(density=density, **defaults | ROUND_DEFAULTS.get(name, {}) | parsed))


def received_weights(algorithm: BaseAlgorithm, packet: Packet) -> Float[Tensor, " p"]:
    """Return the weights in a broadcast, zeros where it has none."""
    return packet.field_dense(_weights_field(algorithm), torch.float32)


def make_reply(
    algorithm: BaseAlgorithm,
    packet: Packet,
    layout: Layout,
    trained: Float[Tensor, " p"],
    clock: Clock,
    draw: Draw,
    memory: ClientMemory | None,
) -> tuple[Packet, ClientMemory | None]:
    """Return the reply of a client with these weights after training, without gates, and what the client keeps."""
    client, support = _trained_client(algorithm, packet, layout, trained, clock), algorithm.engine_support.memory
    if support is not None and memory is not None:
        client = client._replace(**{name: memory.vectors[name][None] for name in support.vectors})
    stack = algorithm.client_reply(client, clock, draw)
    reply = stack.unstack()[0]
    reply = reply._replace(scalars={name: value for name, value in reply.scalars.items() if name not in GATE_VALUE_FIELDS})
    if support is None:
        return reply, None
    return reply, ClientMemory(clock.round, {name: vector[0] for name, vector in support.after_reply(client, stack).items()})


def with_known_gates(reply: Packet, packet: Packet) -> Packet:
    """Return a reply with the mean gates of the broadcast: clients do not send any."""
    return reply._replace(scalars=reply.scalars | {name: value for name, value in packet.scalars.items() if name in GATE_VALUE_FIELDS})


def replied_weights(algorithm: BaseAlgorithm, packet: Packet, reply: Packet) -> Float[Tensor, " p"]:
    """Return the weights of a client as its reply describes them."""
    vectors = algorithm.decode_dense(reply, torch.float32)
    return vectors["theta"] if "theta" in vectors else received_weights(algorithm, packet) + vectors["update"]


def aggregate(
    algorithm: BaseAlgorithm, server: Any, packet: Packet, layout: Layout, aggregated: Float[Tensor, " p"], clock: Clock, draw: Draw
) -> Any:
    """Return the server state after a round in which the wrapped strategy moved the broadcast weights to `aggregated`.

    The result of the strategy is one exact reply. Its gates follow from it as those of a client follow from its training: no gate of a
    single client is read, so that noise of the strategy protects them too.
    """
    if "theta" in algorithm.all_reply_fields:
        reply = dense_packet({"theta": aggregated}, 32, draw)
    else:
        reply = dense_packet({"update": aggregated - received_weights(algorithm, packet)}, 32, draw)
    if isinstance(algorithm, Sieve):
        client = _trained_client(algorithm, packet, layout, aggregated, clock)
        mask = algorithm.support_mask(client.weights, client.log_alpha, layout, clock)
        reply = reply._replace(scalars={name: value[0] for name, value in mean_gates(client.log_alpha, mask, layout).items()})
    server = algorithm.aggregate(server, packet, [Reply(0, reply, 1)], clock, draw)
    return algorithm.end_round(server, clock)


def _trained_client(algorithm: BaseAlgorithm, packet: Packet, layout: Layout, trained: Float[Tensor, " p"], clock: Clock) -> Any:
    """Return a stack of one client with these weights; the gates of `sieve` take one step along the saliency of the round."""
    state = algorithm.client_init(packet, layout, clock, torch.float32)
    client = type(state)(*(part[None] if isinstance(part, Tensor) else part for part in state))
    client = client._replace(**{_weights_field(algorithm): trained[None]})
    if isinstance(algorithm, Sieve) and algorithm.learn_gates and algorithm.is_searching(clock):
        descent, num_kept = received_weights(algorithm, packet) - trained, packet.fields["weights"].codes.shape[-1]
        constant = torch.ones_like(client.weights), torch.zeros(1, 1)
        step = gates.saliency_step(
            client.weights, client.log_alpha, descent[None], *constant, algorithm.gate_rate, num_kept, LOG_ALPHA_LIMIT, layout.groups
        )
        client = client._replace(log_alpha=step[1])
    return client


def _weights_field(algorithm: BaseAlgorithm) -> str:
    """Return the field of broadcasts and of client states that holds the weights."""
    return algorithm.engine_support.vector_fields[0]
