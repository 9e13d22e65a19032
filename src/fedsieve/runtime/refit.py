"""The final refit: after the last round the kept weights of a linear model are fitted to all examples, near convergence.

All clients take part in every message, each with all its examples, so that the fit is that of all examples in one place: L-BFGS at the
server, gradients of m numbers from the clients. The loss has the penalty |theta|^2 / 2n, a prior of unit variance, without which the
weights of separable classes have no finite optimum. Refitting a selected support: relaxed lasso (Meinshausen 2007).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.recipes import Recipe
from fedsieve.algorithms.support_gradient import Server, SupportGradient
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.lbfgs import minimize
from fedsieve.core.protocols import LinearObjective, Objective
from fedsieve.core.random import server_sampler
from fedsieve.core.reply_validation import ReplyLimits, validate_replies
from fedsieve.core.types import Clock, Exchange, Traffic
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.rounds import RoundResult

MAX_MESSAGES = 30
"""The largest number of gradients of a refit."""
EXCESS_FRACTION = 0.01
"""The refit ends if the loss can fall by this fraction of m/2n at most, the loss that estimating m weights from n examples costs."""


def gradient_algorithm(algorithm: BaseAlgorithm) -> SupportGradient:
    """Return the algorithm of the refit's messages: clients count by their examples, or equally if the run says so."""
    equal = algorithm.client_weighting is ClientWeighting.UNIFORM or algorithm.aggregator is not Aggregator.WEIGHTED
    return SupportGradient(
        density=algorithm.density,
        client_weighting=ClientWeighting.UNIFORM if equal else ClientWeighting.EXAMPLES,
        aggregator=algorithm.aggregator,
        max_malicious_fraction=algorithm.max_malicious_fraction,
    )


def can_refit(algorithm: BaseAlgorithm, objective: Objective) -> bool:
    """Return whether the kept weights of a run can be refitted."""
    try:
        require_refit(algorithm, objective)
    except ValueError:
        return False
    return True


def require_refit(algorithm: BaseAlgorithm, objective: Objective) -> None:
    """Raise ValueError if the kept weights of a run cannot be refitted."""
    if not isinstance(objective, LinearObjective):
        raise ValueError("refit needs a linear model, whose loss has one minimum; a network trains its kept weights in the last rounds")
    if algorithm.privacy is not None:
        raise ValueError("refit sends gradients without noise, which privacy.noise-multiplier forbids; leave one of them out")
    if algorithm.recipe is not Recipe.RECOMMENDED:
        raise ValueError(f"refit is no part of what the paper states, and algorithm.recipe is {algorithm.recipe}; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What a refit needs of its run."""

    exchange: LoopEngine | BatchedEngine
    """the exchange of the run's rounds"""
    clients: Sequence[int]
    """the clients that have examples"""
    num_rounds: int
    limits: ReplyLimits
    add_failures: Callable[[Exchange], Exchange] = lambda exchange: exchange
    """wraps an exchange in the simulated failures of the run"""

    @property
    def algorithm(self) -> BaseAlgorithm:
        """The algorithm of the run."""
        assert isinstance(self.exchange.context.algorithm, BaseAlgorithm)
        return self.exchange.context.algorithm

    def make_exchange(self, algorithm: SupportGradient, known_support: Tensor | None) -> Exchange:
        """Return the exchange of the refit's messages: a batch is all examples of a client."""
        context = replace(self.exchange.context, algorithm=algorithm, known_support=known_support)
        return self.add_failures(replace(self.exchange, context=context, data=self.exchange.data.as_whole_batches()))

    def apply(self, rounds: Iterable[RoundResult]) -> Iterator[RoundResult]:
        """Yield the rounds; the last one has the weights after the refit, and its bytes."""
        for result in rounds:
            if result.round < self.num_rounds - 1:
                yield result
                continue
            theta, downlink, uplink = self.fit(self.algorithm.parameters(result.server))
            server = self.algorithm.with_parameters(result.server, theta)
            yield result._replace(server=server, downlink=result.downlink + downlink, uplink=result.uplink + uplink)

    def fit(self, start: Float[Tensor, " p"]) -> tuple[Float[Tensor, " p"], Traffic, Traffic]:
        """Return the weights fitted on the support of `start`, and the bytes down and up. A client that stops replying ends the refit."""
        messages = Messages(self, start)
        slope = messages.gradient(start[messages.server.support])
        if slope is None:
            return start, messages.downlink, messages.uplink
        max_decrease = EXCESS_FRACTION * len(slope) / (2 * messages.num_examples)
        fitted = minimize(messages.gradient, start[messages.server.support], slope, max_gradients=MAX_MESSAGES, max_decrease=max_decrease)
        return start.scatter(0, messages.server.support, fitted), messages.downlink, messages.uplink


class Messages:
    """The messages of one refit: gradients from the clients that replied to the first."""

    def __init__(self, refit: Refit, start: Float[Tensor, " p"]) -> None:
        self.refit, self.context, self.algorithm = refit, refit.exchange.context, gradient_algorithm(refit.algorithm)
        self.draw = server_sampler(self.context.seed, refit.num_rounds, 0, self.context.dtype, self.context.device)
        self.server: Server = self.algorithm.init(self.context.objective.layout, start, self.draw)
        self.exchange = refit.make_exchange(self.algorithm, None)
        self.clients, self.num_sent, self.num_examples = list(refit.clients), 0, 0
        self.downlink, self.uplink = Traffic(), Traffic()

    def gradient(self, theta: Float[Tensor, " m"]) -> Float[Tensor, " m"] | None:
        """Return the mean gradient with that of the penalty; None if a client is missing."""
        clock = Clock(self.refit.num_rounds + self.num_sent, self.refit.num_rounds)
        server = self.server._replace(theta=self.server.theta.scatter(0, self.server.support, theta))
        packet = self.algorithm.broadcast(server, clock, self.draw)
        result = self.exchange(clock, packet, self.clients)
        result = validate_replies(self.algorithm, packet, result, self.clients, clock, self.refit.limits, self.context.dtype)
        if not self.num_sent:  # from now on the clients that replied know the support
            self.clients, self.num_examples = list(result.clients), sum(reply.num_examples for reply in result.replies)
            self.exchange = self.refit.make_exchange(self.algorithm, self.server.support)
        self.downlink, self.uplink, self.num_sent = self.downlink + result.downlink, self.uplink + result.uplink, self.num_sent + 1
        if not result.replies or list(result.clients) != self.clients:
            return None
        mean = self.algorithm.aggregate(server, packet, result.replies, clock, self.draw).theta[self.server.support]
        is_gated = self.server.support < self.context.objective.layout.num_gated
        return mean + theta * is_gated / self.num_examples
