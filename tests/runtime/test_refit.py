"""The final refit: it gives the weights that all examples in one place would give, in few messages, on every engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

from fedsieve.algorithms import ALGORITHMS
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.random import server_sampler
from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.data.synthetic import Synthetic
from fedsieve.data.user_files import UserFiles
from fedsieve.experiments.config import FederationConfig, Precision, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.training import run_rounds
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.attacks import Attack
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.privacy import Privacy
from fedsieve.runtime.refit import MAX_MESSAGES, Refit
from fedsieve.runtime.simulate import Engine
from helpers.algorithms import make_algorithm
from helpers.runs import small_run
from helpers.training import make_exchange

COUNTS = [30, 0, 50, 20]
KEPT = [1, 4, 5]


def table(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(COUNTS), 8))
    return x, (x[:, 1] - 2 * x[:, 4] + 0.5 + rng.normal(size=len(x)) > 0).astype(float)


def fit(objective, x, y, *, engine=None, dtype=torch.float64, **options):
    """The refitted weights on KEPT, from weights that are far from the optimum, and the bytes of all messages."""
    rows = torch.from_numpy(x).to(dtype) if isinstance(x, np.ndarray) else x
    given = {} if engine is None else {"engine": engine}
    exchange = make_exchange(
        make_algorithm("sieve", **options), objective, rows, torch.from_numpy(y).to(dtype), COUNTS, dtype=dtype, **given
    )
    start = torch.zeros(objective.layout.size, dtype=dtype)
    start[KEPT] = 3.0
    return Refit(exchange=exchange, clients=[0, 2, 3], num_rounds=5, limits=ReplyLimits()).fit(start)


def test_the_refit_of_a_logistic_model_is_that_of_scikit_learn_on_all_examples():
    x, y = table()
    theta, _, _ = fit(Linear(loss=Loss.LOGISTIC, num_features=8, intercept=True), x, y)
    exact = LogisticRegression(C=1.0, tol=1e-10, max_iter=1000).fit(x[:, KEPT], y)
    np.testing.assert_allclose(theta[KEPT], exact.coef_[0], atol=0.05)
    np.testing.assert_allclose(theta[-1], exact.intercept_[0], atol=0.05)
    assert theta[:8].nonzero()[:, 0].tolist() == KEPT


def test_the_refit_of_a_linear_model_is_ridge_regression_on_all_examples():
    x, _ = table()
    y = x[:, 1] * 2 - x[:, 5]
    theta, _, _ = fit(Linear(loss=Loss.SQUARED, num_features=8), x, y)
    kept = x[:, KEPT]
    exact = np.linalg.solve(kept.T @ kept + 0.5 * np.eye(3), kept.T @ y)  # mean square + |theta|^2 / 2n
    np.testing.assert_allclose(theta[KEPT], exact, atol=5e-3)


def test_engines_and_sparse_examples_agree():
    x, y = table()
    objective = Linear(loss=Loss.LOGISTIC, num_features=8, intercept=True)
    batched, loop = fit(objective, x, y), fit(objective, x, y, engine=LoopEngine)
    assert torch.equal(batched[0], loop[0]) and batched[1:] == loop[1:]
    sparse, *_ = fit(objective, csr_matrix(x), y)
    torch.testing.assert_close(sparse, batched[0])


def test_only_the_first_broadcast_has_positions():
    x, y = table()
    _, downlink, uplink = fit(Linear(loss=Loss.LOGISTIC, num_features=8), x, y)
    num_messages = uplink.weights // (3 * 4)
    assert uplink.positions == num_messages <= 3 * MAX_MESSAGES, "one byte says that the positions are known"
    assert downlink.weights == uplink.weights and num_messages <= downlink.positions <= num_messages + 3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_the_weights_it_is_given(name):
    algorithm = make_algorithm(name, density=0.3)
    layout = Linear(loss=Loss.SQUARED, num_features=10, intercept=True).layout
    draw = server_sampler(1, 0, 0, torch.float32)
    server = algorithm.init(layout, torch.randn(11, generator=torch.Generator().manual_seed(0)), draw)
    theta = algorithm.parameters(server)
    theta = torch.where(theta != 0, theta + torch.arange(11) / 7 + 0.3, 0.0)
    torch.testing.assert_close(algorithm.parameters(algorithm.with_parameters(server, theta)), theta, rtol=1e-6, atol=0)


DATA = Synthetic(num_examples=600, num_features=40, true_density=0.1)


def run(refit=True, task="lr", federation=None, **settings):
    federation = federation or FederationConfig(clients=6, participation=0.5)
    return small_run(
        "sieve",
        task=task,
        algorithm=make_algorithm("sieve"),
        data=DATA,
        rounds=3,
        density=0.1,
        federation=federation,
        **settings,
        refit=refit,
    )


@pytest.mark.usefixtures("few_test_rows")
def test_only_the_last_round_changes_and_its_loss_falls():
    plain, refitted = list(run_rounds(run(refit=False))), list(run_rounds(run()))
    for before, after in zip(plain[:-1], refitted[:-1], strict=True):
        assert torch.equal(before.parameters, after.parameters)
    assert torch.equal(plain[-1].parameters != 0, refitted[-1].parameters != 0)
    assert refitted[-1].metrics["r2"] > plain[-1].metrics["r2"]
    assert refitted[-1].metrics["bytes_up"] > plain[-1].metrics["bytes_up"] + 6 * 4 * 4 * 2


@pytest.mark.usefixtures("few_test_rows")
def test_a_robust_refit_ignores_a_malicious_client():
    attacked = Failures(malicious_fraction=0.2, attack=Attack.SCALE, attack_scale=1e3)
    settings = {"clients": 6, "participation": 1.0, "aggregator": Aggregator.MEDIAN}
    federation = FederationConfig(**settings, client_weighting=ClientWeighting.UNIFORM)
    honest, robust = ([*run_rounds(run(federation=federation, failures=each))][-1].metrics["r2"] for each in (Failures(), attacked))
    assert robust > honest - 0.1


@pytest.mark.usefixtures("few_test_rows")
def test_a_client_that_stops_replying_ends_the_refit():
    last = [*run_rounds(run(failures=Failures(dropout=0.4), engine=Engine.LOOP, precision=Precision.DOUBLE))][-1]
    assert torch.isfinite(last.parameters).all() and int((last.parameters != 0).sum()) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "mnist-cnn"}, "refit needs a linear model"),
        ({"privacy": Privacy(noise_multiplier=1.0, clip=1.0)}, "refit sends gradients without noise"),
        ({"algorithm_name": "flops-pa", "algorithm": {"recipe": "paper"}}, "refit is no part of what the paper states"),
        ({"federation": FederationConfig(server_examples=10)}, "leave one of them out"),
    ],
)
def test_a_refit_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve(RunConfig(refit=True, **{"task": "lg"} | settings))


def test_a_run_without_refit_keeps_its_id():
    plain = resolve(RunConfig(task="lr"))
    assert "refit" not in plain.settings_dict and resolve(RunConfig(task="lr", refit=True)).id != plain.id


def test_task_file_refits_by_default_and_other_tasks_do_not(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b,price\n" + "\n".join(f"{i},{i % 3},{2 * i}" for i in range(40)) + "\n")
    table = RunConfig(task="file", data=UserFiles(path=path, target="price"), density=0.5)
    assert resolve(table).refit and not resolve(RunConfig(task="lr")).refit
    assert not resolve(replace(table, refit=False)).refit
    assert not resolve(replace(table, privacy=Privacy(noise_multiplier=1.0))).refit
