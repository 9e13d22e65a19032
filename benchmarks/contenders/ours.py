"""fedsieve as users get it: the default engine, every message encoded."""

from collections.abc import Callable

import torch
from scipy.sparse import csr_matrix
from torch import nn

from benchmarks.workloads import Workload, draw
from fedsieve.algorithms.base import Method
from fedsieve.algorithms.flops import Flops
from fedsieve.algorithms.flops_pa import FlopsPA, GateNoise
from fedsieve.core.optimizers import StepRule
from fedsieve.core.reply_validation import Screen
from fedsieve.core.types import Exchange, Objective
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime.batched import Batched
from fedsieve.runtime.client_data import Rows
from fedsieve.runtime.rounds import Population, start, train

ROUNDS = 100_000


def algorithm_of(work: Workload) -> Method:
    """The method with plain SGD steps, which every contender can take."""
    shared = {"density": work.density, "batch": work.batch, "steps": work.steps, "gate_rate": work.gate_rate}
    if work.flops:
        return Flops(**shared)
    gates = GateNoise.SAMPLED if work.sampled else GateNoise.DETERMINISTIC
    return FlopsPA(**shared, rate=work.rate, step_rule=StepRule.CONSTANT, step_gates=gates)


def objective_of(work: Workload, *, generic: bool) -> Objective:
    """The closed form, or the same model as a module."""
    if work.loss == "lenet":
        return Module(module=lenet(), build=lenet)
    if not generic:
        return Linear(loss=Loss(work.loss), features=work.features, outputs=work.outputs)
    loss = {"squared": lambda out, y: nn.functional.mse_loss(out[:, 0], y), "softmax": nn.functional.cross_entropy}[work.loss]
    return Module(module=nn.Linear(work.features, work.outputs, bias=False), loss=loss)


def rows_of(work: Workload, objective: Objective) -> Rows:
    """Each client's rows."""
    x, y = draw(work)
    if work.nonzero:
        x = csr_matrix(x, shape=(len(y), work.features))
    else:
        x = torch.from_numpy(x)
        x = x.view(-1, 1, 28, 28) if work.loss == "lenet" else x
    return Rows(x, torch.from_numpy(y), [work.rows] * work.clients, objective, work.batch)


def prepare(
    work: Workload, *, generic: bool = False, wrap: Callable[[Exchange], Exchange] = lambda exchange: exchange
) -> Callable[[], None]:
    """One round, all clients."""
    algorithm, objective = algorithm_of(work), objective_of(work, generic=generic)
    exchange = wrap(Batched(algorithm=algorithm, objective=objective, rows=rows_of(work, objective), seed=1, fingerprint=1))
    server = start(algorithm, objective, 1, torch.float32)
    everyone = Population(work.clients, range(work.clients))
    rounds = train(algorithm, server, everyone, 1.0, exchange, ROUNDS, 1, screen=Screen(norm_limit=algorithm.usual_norm_limit))
    return lambda: next(rounds)
