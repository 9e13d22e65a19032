"""What every method promises: exactly m weights, the same bits again, finite numbers, messages that weigh what the wire says."""

import pytest
import torch

from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.selection import BudgetRule, Schedule
from fedsieve.core.types import Algorithm
from fedsieve.data.synthetic import Shift, Synthetic
from fedsieve.experiments.config import Centring, Federation, Run
from fedsieve.experiments.simulation import Problem
from fedsieve.experiments.training import execute

pytestmark = pytest.mark.usefixtures("few_test_rows")
DATA = Synthetic(rows=400, features=50, classes=3, true_density=0.1)
SMALL = Federation(clients=10, participation=0.4)


def train(method, task="lr", density=0.1, rounds=5, seed=3, data=DATA, federation=SMALL, **fields):
    algorithm = algorithm_class(method)(**({"steps": 6, "batch": 8} | fields))
    run = Run(task=task, method=method, density=density, rounds=rounds, seed=seed, data=data, federation=federation, algorithm=algorithm)
    return run, list(execute(run, Problem(run)))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_an_algorithm(method):
    assert isinstance(algorithm_class(method)(), Algorithm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("task", "density"), [("lr", 0.1), ("lg", 0.95), ("mc", 0.02)])
def test_every_model_has_exactly_the_weights_asked_for_in_every_round(method, task, density):
    run, steps = train(method, task, density)
    wanted = int(round(density * run.objective.layout.size, 6))
    assert [int((s.theta != 0).sum()) for s in steps] == [wanted] * len(steps)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_another_model(method):
    (_, one), (_, again), (_, other) = train(method), train(method), train(method, seed=4)
    assert torch.equal(one[-1].theta, again[-1].theta)
    assert not torch.equal(one[-1].theta, other[-1].theta)


SHARED = (
    {"batch": "all"},
    {"bits": 4},
    {"bits": 16},
    {"warmup": 2},
    {"schedule": Schedule.CUBIC, "start_density": 0.8},
    {"server": Optimizer.MOMENTUM, "server_rate": 1e-3},
    {"server": Optimizer.ADAM, "server_rate": 0.01},
    {"step_rule": StepRule.CAPPED, "rate": 0.5},
    {"step_rule": StepRule.CONSTANT, "rate": 1e-4},
    {"clip": 1.0},
    {"memory": 0.5},
    {"budget": BudgetRule.ERK},
)


@pytest.mark.parametrize(
    ("method", "fields"),
    [(name, fields) for fields in SHARED for name in METHODS if fields.keys() <= algorithm_class(name).offered()],
    ids=str,
)
def test_options_are_nobodys_privilege(method, fields):
    _, steps = train(method, rounds=3, **{"steps": 4, **fields})
    assert torch.isfinite(steps[-1].theta).all()
    assert int((steps[-1].theta != 0).sum()) == 5


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_centrally_centred_and_tuned_at_the_server(method):
    for federation in (
        Federation(clients=10, central=True),
        Federation(clients=10, participation=0.4, centring=Centring.CLIENT),
        Federation(clients=10, participation=0.4, server_rows=20),
    ):
        _, steps = train(method, federation=federation, rounds=2)
        assert torch.isfinite(steps[-1].theta).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", ["lr", "lg", "mc"])
def test_no_method_needs_a_hand_set_rate_under_a_strong_shift(method, task):
    data = Synthetic(rows=300, features=50, classes=3, true_density=0.1, shift=Shift.SCALAR, shift_scale=3.0)
    _run, steps = train(method, task, data=data, federation=Federation(clients=30, participation=0.2, alpha=0.3), rounds=8)
    assert torch.isfinite(steps[-1].theta).all()
    assert steps[-1].theta.abs().max() < 50


def test_server_rows_cost_no_bytes():
    _, plain = train("fed-avg")
    _, tuned = train("fed-avg", federation=Federation(clients=10, participation=0.4, server_rows=20))
    assert plain[-1].row["bytes_up"] == tuned[-1].row["bytes_up"]
    assert not torch.equal(plain[-1].theta, tuned[-1].theta)


def test_sparse_messages_are_smaller_than_dense_ones():
    up = {name: train(name)[1][-1].row["bytes_up"] for name in ("fed-avg", "fed-iter-ht", "flops-pa", "fed-ht")}
    assert up["fed-iter-ht"] < up["flops-pa"] < up["fed-avg"] == up["fed-ht"]


def test_a_warm_up_sends_everything_and_then_only_the_top():
    _, steps = train("fed-iter-ht", warmup=2)
    up = [s.row["bytes_up_formula"] for s in steps]
    assert up == [4 * 4 * 50] * 2 + [4 * 4 * 5] * 3


@pytest.mark.parametrize(
    ("method", "fields", "text"),
    [
        ("fed-avg", {"steps": 0}, "algorithm.steps must be at least 1"),
        ("fed-avg", {"rate": -1.0}, "algorithm.rate must be above 0"),
        ("fed-avg", {"final_rate": 2.0}, "between 0 and 1"),
        ("fed-l1", {"shrinkage": -0.1}, "algorithm.shrinkage is a fraction"),
        ("flops", {"low": 0.1}, "algorithm.low must be below 0"),
        ("flops", {"initial_logit_density": 1.0}, "logit is infinite"),
        ("sieve", {"initial_logit_density": 1.0}, "logit is infinite"),
        ("sieve", {"initial_logit_density": 0.0}, "must be above 0"),
        ("flops", {"density": 1e-7}, "out of reach"),
        ("flops-pa", {"rest_floor": 1.5}, "algorithm.rest-floor is a fraction"),
    ],
)
def test_settings_that_cannot_work_are_refused(method, fields, text):
    with pytest.raises(ValueError, match=text):
        algorithm_class(method)(**fields)


@pytest.mark.parametrize("method", METHODS)
def test_the_count_is_exact_even_where_rounding_leaves_zeros(method):
    """Per-layer budgets can keep whole layers, where coarse dense messages have made some weights exactly zero."""
    _, steps = train(method, "mc", density=0.98, bits=4, rounds=2)
    assert int((steps[-1].theta != 0).sum()) == 147


@pytest.mark.parametrize("name", METHODS)
def test_what_belongs_to_another_section_is_not_offered_twice(name):
    """--algorithm.weights beside --federation.weights would be read and then overruled."""
    assert not {"density", "weights"} & algorithm_class(name).offered()
