"""Engine parity: in double precision the loop, which passes real bytes, and the batched engine give identical packets and parameters."""

import pytest
import torch

from fedsieve.algorithms import ALGORITHMS
from fedsieve.algorithms.flops_pa import DualLocation
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.constraint import DualUpdate
from fedsieve.experiments.config import Engine, FederationConfig, Precision
from helpers.algorithms import make_algorithm
from helpers.runs import SMALL_DATA, small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")


def outcome(engine, task, method, weights=ClientWeighting.EXAMPLES, precision=Precision.DOUBLE, data=SMALL_DATA, rounds=4, **options):
    federation = FederationConfig(clients=12, participation=0.5, client_weighting=weights)
    settings = {"task": task, "engine": engine, "precision": precision, "data": data, "rounds": rounds, "federation": federation}
    steps = train_run(small_run(method, algorithm=make_algorithm(method, **options), **settings))
    traffic = [(s.metrics["bytes_up"], s.metrics["bytes_down"], s.metrics["bytes_up_payload"]) for s in steps]
    tensors = [part for part in steps[-1].result.server if isinstance(part, torch.Tensor)]
    return steps[-1].parameters, tensors, traffic


def assert_parity(*args, **kwargs):
    loop, batched = (outcome(engine, *args, **kwargs) for engine in (Engine.LOOP, Engine.BATCHED))
    assert torch.equal(loop[0], batched[0])
    assert all(torch.equal(a, b) for a, b in zip(loop[1], batched[1], strict=True))
    assert loop[2] == batched[2]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_both_engines_give_the_same_bits_in_double_precision(method):
    assert_parity("lr", method)


@pytest.mark.parametrize(
    ("task", "method", "weights", "fields"),
    [
        ("lg", "flops", ClientWeighting.RIEMANNIAN, {}),
        ("mc", "flops-pa", ClientWeighting.SQRT, {}),
        ("mc", "fed-iter-ht", ClientWeighting.UNIFORM, {"bits": 32}),
        ("lg", "fed-avg", ClientWeighting.RIEMANNIAN, {"bits": 32}),
        ("mc", "flops", ClientWeighting.EXAMPLES, {"batch_size": "all"}),
        ("lg", "fed-round-ht", ClientWeighting.SQRT, {"batch_size": "all", "bits": 4}),
        ("lr", "fed-ht", ClientWeighting.EXAMPLES, {"step_rule": "capped", "learning_rate": 0.1}),
        ("lg", "flops", ClientWeighting.UNIFORM, {"recipe": "paper"}),
        ("mc", "flops-pa", ClientWeighting.UNIFORM, {"recipe": "paper"}),
        ("mc", "flops-pa", ClientWeighting.EXAMPLES, {"dual_location": DualLocation.CLIENT, "dual_update": DualUpdate.ASCENT}),
    ],
)
def test_parity_holds_for_other_tasks_weights_and_batches(task, method, weights, fields):
    if "step_rule" in fields:
        from fedsieve.core.optimizers import StepRule

        fields = {**fields, "step_rule": StepRule(fields["step_rule"])}
    assert_parity(task, method, weights, **fields)


@pytest.mark.long
@pytest.mark.parametrize("weights", ClientWeighting)
@pytest.mark.parametrize("task", ["lr", "lg", "mc"])
@pytest.mark.parametrize("method", ALGORITHMS)
@pytest.mark.parametrize("fields", [{}, {"bits": 32}, {"batch_size": "all"}], ids=["default", "bits 32", "full batch"])
def test_every_cell_has_parity(method, task, weights, fields):
    assert_parity(task, method, weights, **fields)


def test_a_cohort_too_large_for_the_cache_is_stepped_in_chunks_with_the_same_result(monkeypatch):
    whole = outcome(Engine.BATCHED, "lr", "flops-pa")
    monkeypatch.setattr("fedsieve.runtime.batched.CACHE_FLOATS", 8 * 40 * 2)
    chunked = outcome(Engine.BATCHED, "lr", "flops-pa")
    assert torch.equal(whole[0], chunked[0])


@pytest.mark.parametrize("engine", Engine)
def test_a_run_repeats_bit_for_bit_in_single_precision(engine):
    one, again = (outcome(engine, "lr", "flops-pa", precision=Precision.SINGLE) for _ in range(2))
    assert torch.equal(one[0], again[0]) and one[2] == again[2]


def test_in_single_precision_engines_differ_by_rounding_only():
    loop, batched = (outcome(engine, "lr", "fed-avg", precision=Precision.SINGLE, bits=32) for engine in Engine)
    assert (loop[0] - batched[0]).abs().max() < 1e-4


@pytest.mark.parametrize("method", ALGORITHMS)
def test_replies_have_the_fields_that_the_algorithm_declares(method):
    """Any other packet is rejected, so a wrong list would reject every client."""
    (step,) = train_run(
        small_run(method, rounds=1, engine=Engine.LOOP, federation=FederationConfig(clients=6, participation=0.5), algorithm=None)
    )
    assert step.result.rejected == [] and step.result.replied == step.result.cohort
