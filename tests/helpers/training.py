"""Build and train a small run."""

import torch

from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.rounds import Population, initial_server, train


def make_exchange(algorithm, objective, x, y, counts, *, engine=BatchedEngine, seed=1, dtype=torch.float32):
    """An exchange over examples that are ordered by client."""
    workload = algorithm.workload
    data = ClientData(x, y, counts, objective, workload.batch_size, workload.batch_sampling)
    context = RunContext(algorithm=algorithm, objective=objective, seed=seed, fingerprint=1, dtype=dtype)
    return engine(context=context, data=data)


def run_training(algorithm, objective, x, y, counts, *, engine=BatchedEngine, rounds=5, participation=1.0, seed=1, dtype=torch.float32):
    """All rounds of a run over examples that are ordered by client."""
    exchange = make_exchange(algorithm, objective, x, y, counts, engine=engine, seed=seed, dtype=dtype)
    server = initial_server(algorithm, objective, seed, dtype)
    population = Population(len(counts), range(len(counts)))
    return list(train(algorithm, server, population, participation, exchange, rounds, seed, dtype=dtype))
