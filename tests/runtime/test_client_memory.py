"""What clients keep between their rounds: who has it, both engines, checkpoints, failures, and its size."""

import pytest
import torch

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.flops_pa import DualLocation
from fedsieve.estimators import SparseFederatedRegressor
from fedsieve.experiments.config import Engine, FederationConfig, Precision
from fedsieve.experiments.runner import start_run
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import initial_state, run_rounds
from fedsieve.fitting import fit
from fedsieve.runtime import client_memory
from fedsieve.runtime.client_memory import memory_bytes
from fedsieve.runtime.evaluation import RunState
from fedsieve.runtime.failures import Failures
from fedsieve.storage import checkpoint
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
REMEMBERING = [name for name in ALGORITHMS if algorithm_class(name)().engine_support.memory is not None]


def run_of(method, **settings):
    return small_run(method, **{"precision": Precision.DOUBLE, "federation": FederationConfig(clients=12, participation=0.25), **settings})


def test_error_feedback_at_clients_needs_memory():
    assert REMEMBERING == ["fed-ef", "stc"]


@pytest.mark.parametrize("method", REMEMBERING)
def test_exactly_the_clients_that_took_part_keep_something(method):
    run = run_of(method)
    seen = {}
    for step in train_run(run):
        seen |= dict.fromkeys(step.result.replied, step.result.round)
        assert {client: memory.round for client, memory in step.result.memories.items()} == seen
    assert len(seen) < 12
    for memory in step.result.memories.values():
        assert tuple(memory.vectors) == run.algorithm.engine_support.memory.names
        assert all(vector.shape == (40,) and vector.dtype is torch.float64 for vector in memory.vectors.values())


@pytest.mark.parametrize("method", REMEMBERING)
@pytest.mark.parametrize("failures", [Failures(), Failures(dropout=0.3, straggler_fraction=0.3)], ids=["none", "late"])
def test_both_engines_keep_the_same_bits(method, failures):
    loop, batched = (train_run(run_of(method, engine=engine, rounds=6, failures=failures)) for engine in Engine)
    for one, other in zip(loop, batched, strict=True):
        assert one.result.memories.keys() == other.result.memories.keys()
        for client, memory in one.result.memories.items():
            for name, vector in memory.vectors.items():
                assert torch.equal(vector, other.result.memories[client].vectors[name])
        assert one.metrics["bytes_down"] == other.metrics["bytes_down"]


def client_dual_run(**settings):
    """FLoPS-PA whose clients ascend multipliers of their own."""
    algorithm = algorithm_class("flops-pa")(dual_location=DualLocation.CLIENT, dual_rate=0.05, local_steps=3)
    return run_of("flops-pa", **{"algorithm": algorithm, "rounds": 8, **settings})


def test_multipliers_of_clients_are_numbers_of_their_own_and_the_same_in_both_engines():
    loop, batched = (train_run(client_dual_run(engine=engine)) for engine in Engine)
    memories, others = (steps[-1].result.memories for steps in (loop, batched))
    assert memories.keys() == others.keys() and all(memory.vectors["multiplier"].shape == () for memory in memories.values())
    assert all(torch.equal(memory.vectors["multiplier"], others[client].vectors["multiplier"]) for client, memory in memories.items())
    assert len({float(memory.vectors["multiplier"]) for memory in memories.values()}) > 1
    run = client_dual_run()
    assert memory_bytes(run.algorithm, run.objective.layout, 12, run.dtype) == 12 * 8


def test_a_client_continues_with_its_own_multiplier():
    """The multiplier of a client that took part before differs from the one it would have from the broadcast."""
    run = client_dual_run()
    simulation, steps = Simulation(run), train_run(run)
    before, after = steps[3].result, steps[4].result
    again = [client for client in after.replied if client in before.memories]
    assert again
    (forgetful, *_) = run_rounds(run, simulation, RunState(before.server, 4, memories={}))
    for client in again:
        assert after.memories[client].vectors["multiplier"] != forgetful.result.memories[client].vectors["multiplier"]


def test_a_run_with_multipliers_of_clients_resumes_to_the_same_bits(tmp_path):
    run = client_dual_run()
    whole = train_run(run)
    checkpoint.save(tmp_path, 4, whole[3].result.server, run.settings_dict, whole[3].result.memories)
    latest = checkpoint.latest(tmp_path)
    state = RunState(latest.restore(initial_state(run, Simulation(run)).server), 4, memories=latest.memories)
    (*_, last) = run_rounds(run, Simulation(run), state)
    assert all(torch.equal(one, other) for one, other in zip(last.result.server[:4], whole[-1].result.server[:4], strict=True))


@pytest.mark.parametrize("method", REMEMBERING)
def test_a_client_whose_reply_is_late_keeps_what_it_had(method):
    steps = train_run(run_of(method, rounds=12, failures=Failures(straggler_fraction=0.5)))
    late = 0
    for before, after in zip(steps, steps[1:], strict=False):
        for client, _ in after.result.rejected:
            late += client in before.result.memories
            assert after.result.memories.get(client) is before.result.memories.get(client)
    assert late


@pytest.mark.parametrize("method", REMEMBERING)
def test_without_its_memories_a_resumed_run_has_other_bits(method, tmp_path):
    run = run_of(method, rounds=8)
    whole = train_run(run)
    checkpoint.save(tmp_path, 5, whole[4].result.server, run.settings_dict, whole[4].result.memories)
    latest = checkpoint.latest(tmp_path)
    server = latest.restore(initial_state(run, Simulation(run)).server)
    resumed, forgetful = (
        list(run_rounds(run, Simulation(run), RunState(server, 5, memories=memories)))[-1] for memories in (latest.memories, {})
    )
    assert torch.equal(resumed.result.server[0], whole[-1].result.server[0])
    assert not torch.equal(forgetful.result.server[0], whole[-1].result.server[0])


def test_the_bytes_kept_are_clients_times_vectors_times_weights_times_their_size():
    run = run_of("fed-ef")
    steps = train_run(run)
    kept = [vector for memory in steps[-1].result.memories.values() for vector in memory.vectors.values()]
    bytes_kept = sum(vector.numel() * vector.element_size() for vector in kept)
    assert memory_bytes(run.algorithm, run.objective.layout, len(kept), torch.float64) == bytes_kept == len(kept) * 40 * 8
    assert memory_bytes(run_of("sieve").algorithm, run.objective.layout, 12, torch.float64) == 0


def test_memory_that_does_not_fit_is_refused_and_much_is_noted(monkeypatch, tmp_path, capsys):
    run = run_of("fed-ef")
    monkeypatch.setattr(client_memory, "physical_memory", lambda: 12 * 40 * 8 - 1)
    with pytest.raises(
        ValueError, match=r"12 clients x residual x 40 weights x 8 bytes\), more than .* of this machine; use fewer clients"
    ):
        Simulation(run).validate()
    Simulation(run_of("fed-ef", rounds=3)).validate()  # nine clients take part at most
    monkeypatch.undo()
    monkeypatch.setattr("fedsieve.experiments.runner.physical_memory", lambda: 12 * 40 * 8)
    start_run(run, Simulation(run), tmp_path, quiet=False)
    assert "note: the clients keep" in capsys.readouterr().err


@pytest.mark.parametrize("method", REMEMBERING)
def test_modules_and_estimators_train_with_memory(method):
    generator = torch.Generator().manual_seed(3)
    clients = [(torch.randn(20, 6, generator=generator), torch.randint(0, 2, (20,), generator=generator)) for _ in range(4)]
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    settings = {"density": 0.2, "algorithm": method, "rounds": 4, "participation": 0.5}
    results = [fit(module, torch.nn.functional.cross_entropy, clients, **settings)[1] for _ in range(2)]
    assert results[0].nonzero == 14 and results[0].history[-1]["loss"] == results[1].history[-1]["loss"]
    x = torch.randn(60, 10, generator=generator).numpy()
    estimator = SparseFederatedRegressor(density=0.2, algorithm=method, rounds=4, participation=0.5, random_state=0).fit(x, x[:, 0])
    assert (estimator.coef_ != 0).sum() == 2
