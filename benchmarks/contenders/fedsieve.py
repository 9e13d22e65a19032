"""fedsieve with its default engine; every message is encoded."""

from collections.abc import Callable

import torch
from scipy.sparse import csr_matrix
from torch import nn

from benchmarks.workloads import IMAGE_SHAPES, Workload, draw_examples
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.flops import Flops
from fedsieve.algorithms.flops_pa import FlopsPA
from fedsieve.algorithms.gated import GateNoise
from fedsieve.core.optimizers import StepRule
from fedsieve.core.protocols import Objective
from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Exchange
from fedsieve.objectives.cifar_cnn import cifar_cnn
from fedsieve.objectives.lenet import lenet
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.rounds import Population, initial_server, train

MAX_ROUNDS = 100_000
NETWORKS = {"lenet": lenet, "cifar_cnn": cifar_cnn}


def build_algorithm(workload: Workload) -> BaseAlgorithm:
    """Return the algorithm with plain SGD steps and messages of one size, which every contender supports."""
    shared = {
        "density": workload.density,
        "batch_size": workload.batch_size,
        "gate_rate": workload.gate_learning_rate,
    }
    if workload.exchanges_gradients:
        return Flops(**shared, exchanges=workload.local_steps)
    gates = GateNoise.SAMPLED if workload.samples_gates else GateNoise.DETERMINISTIC
    return FlopsPA(
        **shared,
        local_steps=workload.local_steps,
        learning_rate=workload.learning_rate,
        step_rule=StepRule.CONSTANT,
        density_schedule=DensitySchedule.CONSTANT,
        local_gate_noise=gates,
    )


def build_objective(workload: Workload, *, as_module: bool) -> Objective:
    """Return the model in closed form, or as a module."""
    if workload.loss in NETWORKS:
        return Module(module=NETWORKS[workload.loss](), factory=NETWORKS[workload.loss])
    if not as_module:
        return Linear(loss=Loss(workload.loss), num_features=workload.num_features, num_outputs=workload.num_outputs)
    loss = {"squared": lambda out, y: nn.functional.mse_loss(out[:, 0], y), "softmax": nn.functional.cross_entropy}[workload.loss]
    return Module(module=nn.Linear(workload.num_features, workload.num_outputs, bias=False), loss=loss)


def build_client_data(workload: Workload, objective: Objective) -> ClientData:
    """Return the examples of all clients."""
    x, y = draw_examples(workload)
    if workload.nonzero_per_example:
        x = csr_matrix(x, shape=(len(y), workload.num_features))
    else:
        x = torch.from_numpy(x)
        x = x.view(-1, *IMAGE_SHAPES[workload.loss]) if workload.loss in IMAGE_SHAPES else x
    return ClientData(x, torch.from_numpy(y), [workload.examples_per_client] * workload.num_clients, objective, workload.batch_size)


def prepare(
    workload: Workload,
    *,
    as_module: bool = False,
    num_workers: int = 1,
    wrap_exchange: Callable[[Exchange], Exchange] = lambda exchange: exchange,
) -> Callable[[], None]:
    """Return a function that trains one round of all clients."""
    algorithm, objective = build_algorithm(workload), build_objective(workload, as_module=as_module)
    exchange = wrap_exchange(
        BatchedEngine(
            context=RunContext(algorithm=algorithm, objective=objective, seed=1, fingerprint=1),
            data=build_client_data(workload, objective),
            num_workers=num_workers,
        )
    )
    server = initial_server(algorithm, objective, 1, torch.float32)
    everyone = Population(workload.num_clients, range(workload.num_clients))
    rounds = train(
        algorithm, server, everyone, 1.0, exchange, MAX_ROUNDS, 1, limits=ReplyLimits(max_norm_ratio=algorithm.default_max_norm_ratio)
    )
    return lambda: next(rounds)
