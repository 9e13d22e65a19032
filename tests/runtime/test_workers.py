"""Workers: the same bits for any number of processes, no process that stays, and errors that arrive at the caller."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn

from fedsieve.cli.main import main
from fedsieve.core.optimizers import StepRule
from fedsieve.core.random import server_sampler
from fedsieve.core.types import Clock
from fedsieve.experiments.config import Engine, RunConfig
from fedsieve.experiments.processes import map_runs
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime import batched, cores, workers
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.cores import count_cohort_processes
from fedsieve.runtime.rounds import Population, initial_server, train
from fedsieve.runtime.workers import WorkerLostError, WorkerPool, split_evenly
from helpers.algorithms import SOME_ALGORITHMS, make_algorithm

COUNTS = [30, 12, 40, 5, 9, 21, 16]


@pytest.fixture
def small_stacks(monkeypatch):
    """Stacks of two or three clients, and workers from the third exchange on, each of which takes less time than the one before."""
    monkeypatch.setattr(batched, "CACHE_FLOATS", 1000)
    monkeypatch.setattr(workers, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(workers, "START_SECONDS", 0.0)
    set_durations(monkeypatch, (1 / n for n in count(1)))


def set_durations(monkeypatch, durations):
    """Let the exchanges appear to take these times."""
    clock = accumulate(step for duration in durations for step in (0.0, duration))
    monkeypatch.setattr(workers, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


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
    return [(algorithm.parameters(r.server), r.uplink, r.downlink) for r in done], kept, engine.shared_work.pool is not None


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
    with pytest.raises(WorkerLostError, match="--workers 1"):
        pool.map(lambda code: code, [(0,), (3,)])


def test_a_worker_lost_between_exchanges_is_an_error_with_a_remedy():
    pool = WorkerPool(lambda value: value, 1)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(WorkerLostError, match="--workers 1"):
        pool.map(lambda value: value, [(0,), (1,)])


def test_a_lost_worker_is_one_line_for_a_user(monkeypatch, tmp_path, capsys):
    def lose(*_):
        raise WorkerLostError("a worker process ended early")

    monkeypatch.setattr(BatchedEngine, "_train_stacks", lose)
    assert main(["train", "--rounds", "1", "--out", str(tmp_path / "run"), "--quiet"]) == 1
    assert capsys.readouterr().err == "fedsieve: a worker process ended early\n"


def test_a_lost_run_is_an_error_with_a_remedy():
    with pytest.raises(WorkerLostError, match="--workers 1"):
        list(map_runs(os._exit, [(3,), (3,)], 2))


@pytest.mark.parametrize("system", ["linux", pytest.param("darwin", marks=pytest.mark.long)])
def test_runs_share_processes_on_every_system(system, monkeypatch):
    """By forks or, where a fork is not safe, by new processes."""
    monkeypatch.setattr(sys, "platform", system)
    assert sorted(map_runs(abs, [(-1,), (2,), (-3,)], 2)) == [1, 2, 3]
    assert not multiprocessing.active_children()


USER_PROGRAM = """
import multiprocessing, torch
import fedsieve
from fedsieve.runtime import batched, workers

def fit(num_workers):
    batched.CACHE_FLOATS, workers.MEASURED_SECONDS, workers.START_SECONDS = 1000, 0.0, 0.0
    x = torch.randn(60, 30, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    module, clients = torch.nn.Linear(30, 2), [(part, (part[:, 0] > 0).long()) for part in x.split(10)]
    module, _ = fedsieve.fit(module, torch.nn.functional.cross_entropy, clients, density=0.5, rounds=6, workers=num_workers)
    return [value.tolist() for value in module.state_dict().values()]

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    torch.randn(600, 600) @ torch.randn(600, 600)
    torch.set_num_threads(2)
    expected = fit(1)
    assert fit(2) == expected
    assert torch.get_num_threads() == 2
    with multiprocessing.Pool(1) as pool:
        assert pool.apply(fit, (2,)) == expected
"""


def test_fit_repeats_in_programs_with_threads_spawn_and_daemons(tmp_path):
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end", [lambda pool: pool.close(), lambda pool: None])
def test_no_process_stays_when_a_pool_ends(end):
    """Not even a finished one whose exit code nobody has read, and not one that computes."""
    pool = WorkerPool(lambda seconds: time.sleep(seconds) or os.getpid(), 3)
    pids = pool.map(lambda _: os.getpid(), [(0,)] * 4)[1:]
    assert len({os.getpid(), *pids}) == 4
    pool._connections[0].send_bytes(workers._pickle((60,)))
    end(pool)
    del pool
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_end_with_a_parent_that_is_killed():
    here, there = multiprocessing.Pipe()

    def run():
        pool = WorkerPool(os.getpid, 2)
        there.send(pool.map(os.getpid, [()] * 3))
        time.sleep(60)

    parent = multiprocessing.get_context("fork").Process(target=run)
    parent.start()
    pids = here.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_daemon_process_uses_no_workers():
    """It must not have children: a pool of processes that calls fedsieve is one case."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: there.send(cores.count_cohort_processes("auto")), daemon=True)
    process.start()
    assert here.recv() == 1
    process.join()


@pytest.mark.usefixtures("small_stacks")
def test_workers_start_from_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(train_with("sieve", 2)))
    thread.start()
    thread.join()
    assert found[0][2]
    assert_same(train_with("sieve", 1), found[0])


@pytest.mark.usefixtures("small_stacks")
def test_workers_that_save_no_time_are_ended(monkeypatch):
    set_durations(monkeypatch, (1.0 for _ in count()))
    several = train_with("sieve", 2, rounds=6)
    assert not several[2]
    assert_same(train_with("sieve", 1, rounds=6), several)


@pytest.mark.usefixtures("small_stacks")
def test_no_memory_for_workers_is_no_error(monkeypatch):
    def fail(*_):
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(workers, "WorkerPool", fail)
    several = train_with("sieve", 2)
    assert not several[2]
    assert_same(train_with("sieve", 1), several)


@pytest.mark.usefixtures("small_stacks")
def test_a_later_cohort_may_be_larger_than_the_first():
    """Two workers are started for the first cohorts, and three may be used."""
    small, large = [0, 1, 2], list(range(7))

    def replies(num_workers):
        engine, found = make_engine("fed-avg", num_workers), []
        server = initial_server(engine.context.algorithm, engine.context.objective, 2, torch.float32)
        for number, clients in enumerate([small, small, small, large]):
            clock = Clock(number, 9, 0)
            packet = engine.context.algorithm.broadcast(server, clock, server_sampler(2, number, 0, torch.float32, "cpu"))
            found.append(engine(clock, packet, clients))
        return found, engine.shared_work.pool

    (one, _), (several, pool) = replies(1), replies(3)
    assert pool is not None
    assert pool.size == 2
    for a, b in zip(one, several, strict=True):
        assert a.uplink == b.uplink
        for first, second in zip(a.replies, b.replies, strict=True):
            (sent,), (expected,) = second.packet.fields.values(), first.packet.fields.values()
            assert torch.equal(sent.decode(torch.float32), expected.decode(torch.float32))


def test_parts_are_consecutive_and_about_equal():
    for sizes in ([2, 2, 1], [1] * 10, [9, 9, 9, 9, 9, 5], [1], [1, 1, 1, 100]):
        for num_parts in (1, 2, 3, 4):
            parts = split_evenly(range(len(sizes)), sizes, num_parts)
            assert [i for part in parts for i in part] == list(range(len(sizes)))
            assert all(parts)
            assert len(parts) <= num_parts
            assert max(sum(sizes[i] for i in part) for part in parts) <= sum(sizes) / num_parts + max(sizes)


def test_no_more_workers_than_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "missing")
    assert 1 <= count_cohort_processes("auto") == count_cohort_processes(10_000) == len(os.sched_getaffinity(0))
    assert count_cohort_processes(1) == 1


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("5000 100000", 1), ("9900000 100000", 8)])
def test_no_more_workers_than_the_quota_of_a_container(quota, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(cores, "CPU_QUOTA", tmp_path / "cpu.max")
    cores.CPU_QUOTA.write_text(f"{quota}\n")
    assert count_cohort_processes("auto") == expected


@pytest.mark.parametrize(
    ("settings", "message"), [({"workers": 0}, "at least 1, or auto"), ({"engine": Engine.LOOP, "workers": 2}, "batched")]
)
def test_wrong_numbers_of_workers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)
