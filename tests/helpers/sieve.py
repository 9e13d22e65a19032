"""A small federation with sieve, in the middle of a round: what tests of its round and of its rules begin with."""

import torch

from fedsieve.algorithms.sieve import Sieve
from fedsieve.core.random import client_sampler, server_sampler
from fedsieve.core.types import Batch, Clock
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.runner import run_rounds
from fedsieve.experiments.simulation import Simulation
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.rounds import initial_server

MODEL = Linear(loss=Loss.SOFTMAX, num_features=30, num_outputs=4)
SIEVE = Sieve(density=0.1, local_steps=4, batch_size=8)
FIRST, SEARCH, POLISH = Clock(0, 10), Clock(2, 10), Clock(8, 10)


def draw(round=0, step=0, clients=(0,)):
    return client_sampler(5, round, 0, step, list(clients), torch.float64, "cpu")


def begun(clock=SEARCH, sieve=SIEVE, signs=0.0, width=-1.0):
    server = initial_server(sieve, MODEL, 3, torch.float64)._replace(signs=torch.tensor(signs), width=torch.tensor(width))
    packet = sieve.broadcast(server, clock, server_sampler(3, clock.round, 0, torch.float64, "cpu"))
    client = sieve.client_init(packet, MODEL.layout, clock, torch.float64)
    return server, packet, type(client)(*(part[None] if isinstance(part, torch.Tensor) else part for part in client))


def stepped(client, clock=SEARCH, steps=4, sieve=SIEVE):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(1, 8, 30, generator=generator, dtype=torch.float64)
        client = sieve.client_step(MODEL, client, Batch(x, torch.randint(0, 4, (1, 8), generator=generator)), clock, draw(step=step))
    return client


def trained(task, density, data, sieve, rounds=10):
    """The rounds of a short run."""
    place = FederationConfig(clients=10, participation=0.4)
    run = resolve(
        RunConfig(task=task, algorithm_name="sieve", density=density, rounds=rounds, data=data, federation=place, algorithm=sieve)
    )
    return list(run_rounds(run, Simulation(run)))
