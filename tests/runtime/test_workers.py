"""Workers: the same bits for any number of processes, and errors that arrive at the caller."""

import os
import time

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn

from fedsieve.core.optimizers import StepRule
from fedsieve.experiments.config import Engine, RunConfig
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime import batched
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.rounds import Population, initial_server, train
from fedsieve.runtime.workers import WorkerPool, num_available, split_evenly
from helpers.algorithms import SOME_ALGORITHMS, make_algorithm

COUNTS = [30, 12, 40, 5, 9, 21, 16]


@pytest.fixture
def small_stacks(monkeypatch):
    """Stacks of two or three clients, and workers from the third exchange on, however short an exchange is."""
    monkeypatch.setattr(batched, "CACHE_FLOATS", 1000)
    monkeypatch.setattr(batched, "MIN_SHARED_SECONDS", 0.0)
    monkeypatch.setattr(batched, "START_SECONDS", 0.0)


def make_engine(name, num_workers, *, sparse=False, loss=None, sample_bytes=False):
    generator = np.random.default_rng(4)
    x = generator.standard_normal((sum(COUNTS), 30)) * (generator.random((sum(COUNTS), 30)) < (0.2 if sparse else 1))
    if loss is None:
        objective = Linear(loss=Loss.MULTILABEL if sparse else Loss.SQUARED, num_features=30, num_outputs=3 if sparse else 1)
        y = torch.from_numpy((x[:, :3] > 0) if sparse else x[:, 0]).float()
        options = {}
    else:
        objective = Module(module=nn.Sequential(nn.Linear(30, 4), nn.Dropout(0.5), nn.Linear(4, 3)), loss=loss)
        y, options = torch.from_numpy(x[:, :3].argmax(1)), {"step_rule": StepRule.CONSTANT, "learning_rate": 0.1, "max_gradient_norm": 1.0}
    algorithm = make_algorithm(name, 3, density=0.2, **options)
    examples = csr_matrix(x.astype(np.float32)) if sparse else torch.from_numpy(x).float()
    data = ClientData(examples, y, COUNTS, objective, algorithm.workload.batch_size, algorithm.workload.batch_sampling)
    context = RunContext(algorithm=algorithm, objective=objective, seed=2, fingerprint=1)
    return BatchedEngine(context=context, data=data, num_workers=num_workers, sample_bytes=sample_bytes)


def train_with(name, num_workers, rounds=4, weights=None, **options):
    """Parameters and bytes after every round, what clients keep at the end, and whether workers were started."""
    engine = make_engine(name, num_workers, **options)
    algorithm = engine.context.algorithm
    server = initial_server(algorithm, engine.context.objective, 2, torch.float32, weights=weights)
    done = list(
        train(algorithm, server, Population(len(COUNTS), range(len(COUNTS))), 1.0, engine, rounds, 2, start_from_seed=weights is None)
    )
    kept = {client: memory.vectors for client, memory in done[-1].memories.items()}
    return [(algorithm.parameters(r.server), r.uplink, r.downlink) for r in done], kept, engine.workers.pool is not None


def assert_same(one, other):
    for (a, *traffic_a), (b, *traffic_b) in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b)
        assert traffic_a == traffic_b
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][client][name], other[1][client][name]) for client in one[1] for name in one[1][client])


@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize("name", SOME_ALGORITHMS)
def test_any_number_of_workers_gives_the_same_bits_and_bytes(name):
    one = train_with(name, 1)
    assert not one[2]
    for num_workers in (2, 3):
        several = train_with(name, num_workers)
        assert several[2]
        assert_same(one, several)


@pytest.mark.usefixtures("small_stacks")
@pytest.mark.parametrize(
    "options", [{"sparse": True}, {"loss": lambda out, y: nn.functional.cross_entropy(out, y)}, {"sample_bytes": True}]
)
def test_workers_give_the_same_bits_on_every_kind_of_work(options):
    """A loss that cannot be pickled reaches the workers, and dropout draws the same numbers there."""
    weights = torch.linspace(-1, 1, 139) if "loss" in options else None
    assert_same(train_with("sieve", 1, weights=weights, **options), train_with("sieve", 2, weights=weights, **options))


def test_short_exchanges_start_no_workers():
    assert not train_with("sieve", 3)[2]


@pytest.mark.usefixtures("small_stacks")
def test_an_error_in_a_worker_is_raised():
    parent = os.getpid()

    def fail_elsewhere(outputs, labels):
        if os.getpid() != parent:
            raise ArithmeticError("only in a worker")
        return nn.functional.cross_entropy(outputs, labels)

    with pytest.raises(ArithmeticError, match="only in a worker"):
        train_with("sieve", 2, weights=torch.linspace(-1, 1, 139), loss=fail_elsewhere)


def test_a_lost_worker_is_an_error_with_a_remedy():
    pool = WorkerPool(lambda code: os._exit(code) if code else 0, 1)
    with pytest.raises(RuntimeError, match="--workers 1"):
        pool.map(lambda code: code, [(0,), (3,)])


def test_workers_end_with_their_pool():
    pool = WorkerPool(os.getpid, 3)
    pids = pool.map(os.getpid, [()] * 4)[1:]
    assert len({os.getpid(), *pids}) == 4
    del pool
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    """Whether a child process still runs; a finished one that nobody waited for does not."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def test_parts_are_consecutive_and_about_equal():
    for sizes in ([2, 2, 1], [1] * 10, [9, 9, 9, 9, 9, 5], [1], [1, 1, 1, 100]):
        for num_parts in (1, 2, 3, 4):
            parts = split_evenly(range(len(sizes)), sizes, num_parts)
            assert [i for part in parts for i in part] == list(range(len(sizes)))
            assert all(parts)
            assert len(parts) <= num_parts
            assert max(sum(sizes[i] for i in part) for part in parts) <= sum(sizes) / num_parts + max(sizes)


def test_no_more_workers_than_cores():
    assert 1 <= num_available("auto") == num_available(10_000)
    assert num_available(1) == 1


@pytest.mark.parametrize(
    ("settings", "message"), [({"workers": 0}, "at least 1, or auto"), ({"engine": Engine.LOOP, "workers": 2}, "batched")]
)
def test_wrong_numbers_of_workers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)
