"""What every method promises: exactly m weights, the same bits again, finite numbers, messages that weigh what the wire says."""

import pytest
import torch

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.core.budgets import BudgetRule
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.protocols import Algorithm
from fedsieve.core.schedules import DensitySchedule
from fedsieve.data.synthetic import Shift, Synthetic
from fedsieve.experiments.config import FederationConfig
from helpers.algorithms import SOME_ALGORITHMS, make_algorithm
from helpers.runs import small_run, train_run

pytestmark = pytest.mark.usefixtures("few_test_rows")
DATA = Synthetic(num_examples=400, num_features=50, num_classes=3, true_density=0.1)
SMALL = FederationConfig(clients=10, participation=0.4)


def train(method, task="lr", density=0.1, rounds=5, seed=3, data=DATA, federation=SMALL, centralized=False, **options):
    algorithm = make_algorithm(method, **({"num_batches": 6} | options))
    settings = {"density": density, "rounds": rounds, "seed": seed, "data": data, "federation": federation, "centralized": centralized}
    run = small_run(method, task=task, algorithm=algorithm, **settings)
    return run, train_run(run)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_method_is_an_algorithm(method):
    assert isinstance(algorithm_class(method)(), Algorithm)


@pytest.mark.parametrize("method", ALGORITHMS)
@pytest.mark.parametrize(("task", "density"), [("lr", 0.1), ("lg", 0.95), ("mc", 0.02)])
def test_every_model_has_exactly_the_weights_asked_for_in_every_round(method, task, density):
    run, steps = train(method, task, density)
    wanted = int(round(density * run.objective.layout.size, 6))
    assert [int((s.parameters != 0).sum()) for s in steps] == [wanted] * len(steps)


@pytest.mark.parametrize("method", SOME_ALGORITHMS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_another_model(method):
    (_, one), (_, again), (_, other) = train(method), train(method), train(method, seed=4)
    assert torch.equal(one[-1].parameters, again[-1].parameters)
    assert not torch.equal(one[-1].parameters, other[-1].parameters)


SHARED = (
    {"batch_size": "all"},
    {"bits": 4},
    {"bits": 16},
    {"warmup": 2},
    {"density_schedule": DensitySchedule.CUBIC, "initial_density": 0.8},
    {"server_optimizer": Optimizer.MOMENTUM, "server_learning_rate": 1e-3},
    {"server_optimizer": Optimizer.ADAM, "server_learning_rate": 0.01},
    {"step_rule": StepRule.CAPPED, "learning_rate": 0.5},
    {"step_rule": StepRule.CONSTANT, "learning_rate": 1e-4},
    {"max_gradient_norm": 1.0},
    {"residual_decay": 0.5},
    {"sparsity_allocation": BudgetRule.ERK},
)


@pytest.mark.parametrize(
    ("method", "fields"),
    [(name, fields) for fields in SHARED for name in ALGORITHMS if fields.keys() <= algorithm_class(name).option_names()],
    ids=str,
)
def test_shared_options_are_accepted_by_every_algorithm(method, fields):
    _, steps = train(method, rounds=3, **{"num_batches": 4, **fields})
    assert torch.isfinite(steps[-1].parameters).all()
    assert int((steps[-1].parameters != 0).sum()) == 5


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_algorithm_runs_centrally_centred_and_tuned_at_the_server(method):
    for federation in (
        FederationConfig(clients=10, participation=0.4, center_features=True),
        FederationConfig(clients=10, participation=0.4, server_examples=20),
    ):
        _, steps = train(method, federation=federation, rounds=2)
        assert torch.isfinite(steps[-1].parameters).all()
    _, steps = train(method, federation=FederationConfig(clients=10), centralized=True, rounds=2)
    assert torch.isfinite(steps[-1].parameters).all()


@pytest.mark.parametrize("method", SOME_ALGORITHMS)
@pytest.mark.parametrize("task", ["lr", "lg", "mc"])
def test_default_rates_work_under_a_strong_shift(method, task):
    data = Synthetic(num_examples=300, num_features=50, num_classes=3, true_density=0.1, shift=Shift.SCALAR, shift_scale=3.0)
    _run, steps = train(method, task, data=data, federation=FederationConfig(clients=30, participation=0.2, alpha=0.3), rounds=8)
    assert torch.isfinite(steps[-1].parameters).all()
    assert steps[-1].parameters.abs().max() < 50


def test_server_examples_cost_no_bytes():
    _, plain = train("fed-avg")
    _, tuned = train("fed-avg", federation=FederationConfig(clients=10, participation=0.4, server_examples=20))
    assert plain[-1].metrics["bytes_up"] == tuned[-1].metrics["bytes_up"]
    assert not torch.equal(plain[-1].parameters, tuned[-1].parameters)


def test_sparse_messages_are_smaller_than_dense_ones():
    up = {name: train(name)[1][-1].metrics["bytes_up"] for name in ("fed-avg", "fed-iter-ht", "flops-pa", "fed-ht")}
    assert up["fed-iter-ht"] < up["flops-pa"] < up["fed-avg"] == up["fed-ht"]


def test_a_warm_up_sends_everything_and_then_only_the_top():
    _, steps = train("fed-iter-ht", warmup=2, density_schedule=DensitySchedule.CONSTANT)
    up = [s.metrics["bytes_up_paper_formula"] for s in steps]
    assert up == [4 * 4 * 50] * 2 + [4 * 4 * 5] * 3


@pytest.mark.parametrize(
    ("method", "fields", "text"),
    [
        ("fed-avg", {"local_steps": 0}, "algorithm.local-steps must be at least 1"),
        ("fed-avg", {"learning_rate": -1.0}, "algorithm.learning-rate must be above 0"),
        ("fed-avg", {"final_learning_rate_fraction": 2.0}, "between 0 and 1"),
        ("fed-l1", {"shrinkage": -0.1}, "algorithm.shrinkage is a fraction"),
        ("flops", {"stretch_low": 0.1}, "algorithm.stretch-low must be below 0"),
        ("flops", {"initial_gate_probability": 1.0}, "logit is infinite"),
        ("sieve", {"initial_gate_probability": 1.0}, "logit is infinite"),
        ("sieve", {"initial_gate_probability": 0.0}, "must be above 0"),
        ("flops", {"density": 1e-7}, "out of reach"),
        ("flops-pa", {"min_default_gate": 1.5}, "algorithm.min-default-gate is a fraction"),
    ],
)
def test_settings_that_cannot_work_are_refused(method, fields, text):
    with pytest.raises(ValueError, match=text):
        algorithm_class(method)(**fields)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_the_count_is_exact_even_where_rounding_leaves_zeros(method):
    """Per-layer budgets can keep whole layers, where coarse dense messages have made some weights exactly zero."""
    _, steps = train(method, "mc", density=0.98, bits=4, rounds=2)
    assert int((steps[-1].parameters != 0).sum()) == 147


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_belongs_to_another_section_is_not_offered_twice(name):
    """--algorithm.weights beside --federation.client-weighting would be read and then overruled."""
    assert not {"density", "client_weighting"} & algorithm_class(name).option_names()
