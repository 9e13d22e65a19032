"""Recipes: the paper's one is what the paper states, options set by the user win, and every entry point takes it."""

import json
from dataclasses import replace
from math import inf

import pytest
import torch

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.defaults import recipe_options, require_recipes
from fedsieve.algorithms.flops import Flops
from fedsieve.algorithms.flops_pa import FlopsPA, GateEncoding, GateInverse
from fedsieve.algorithms.gated import GateNoise
from fedsieve.algorithms.recipes import Recipe
from fedsieve.cli.main import main
from fedsieve.core.aggregation import ClientWeighting
from fedsieve.core.batches import BatchSampling
from fedsieve.core.constraint import ConstraintScale, DualUpdate
from fedsieve.core.gates import GateAtTest, active_probability
from fedsieve.core.optimizers import Optimizer, StepRule
from fedsieve.core.random import server_sampler
from fedsieve.core.schedules import DensitySchedule, LogAlphaScaling
from fedsieve.core.types import Clock
from fedsieve.data.synthetic import Synthetic
from fedsieve.deployment.deployment_config import deployment_config
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.config_io import load_run
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.tasks import TASKS, default_options
from fedsieve.experiments.training import run_rounds
from fedsieve.fitting import fit
from fedsieve.objectives.linear import Linear, Loss

PUBLISHED = (Flops, FlopsPA)
STATED = {
    "client_weighting": ClientWeighting.UNIFORM,
    "batch_sampling": BatchSampling.INDEPENDENT,
    "step_rule": StepRule.CONSTANT,
    "final_learning_rate_fraction": 1.0,
    "server_optimizer": Optimizer.SGD,
    "bits": 32,
    "density_schedule": DensitySchedule.CONSTANT,
    "temperature": 0.66,
    "stretch_low": -0.1,
    "stretch_high": 1.1,
    "gate_samples": 1,
    "test_gate": GateAtTest.NO_TEMPERATURE,
    "constraint_scale": ConstraintScale.MEAN,
    "dual_update": DualUpdate.ASCENT,
    "log_alpha_scaling": LogAlphaScaling.LITERAL,
    "log_alpha_limit": inf,
}
"""What L118-204 state for both algorithms."""
STATED_FOR_PA = {
    "server_learning_rate": 1.0,
    "residual_decay": 0.0,
    "scaling_start": 0.0,
    "local_gate_noise": GateNoise.SAMPLED,
    "message_gate_noise": GateNoise.SAMPLED,
    "gate_inverse": GateInverse.PAPER,
    "gate_encoding": GateEncoding.GATES,
    "min_default_gate": 0.0,
}
SMALL = {
    "rounds": 4,
    "density": 0.1,
    "data": Synthetic(num_examples=200, num_features=30, num_classes=3, true_density=0.1),
    "federation": FederationConfig(clients=8, participation=0.5),
}


@pytest.mark.parametrize("cls", PUBLISHED)
def test_the_papers_recipe_is_what_the_paper_states(cls):
    stated = STATED | (STATED_FOR_PA if cls is FlopsPA else {})
    low, low_gates = (1e-4, 1e-5) if cls is FlopsPA else (1e-3, 1e-4)
    for loss in Loss:
        algorithm = cls(**recipe_options(cls, Recipe.PAPER, loss))
        assert {name: getattr(algorithm, name) for name in stated} == stated
        weights = algorithm.learning_rate if cls is FlopsPA else algorithm.server_learning_rate
        assert low <= weights <= 0.1 and low_gates <= algorithm.gate_rate <= 0.1  # L140, L303


@pytest.mark.parametrize("cls", PUBLISHED)
def test_an_option_set_by_the_user_overrides_the_recipe(cls):
    own = cls(recipe=Recipe.PAPER, bits=8, batch_sampling=BatchSampling.SHUFFLED)
    assert (own.bits, own.batch_sampling, own.test_gate) == (8, BatchSampling.SHUFFLED, GateAtTest.NO_TEMPERATURE)
    assert replace(own, density=0.2) == cls(recipe=Recipe.PAPER, bits=8, batch_sampling=BatchSampling.SHUFFLED, density=0.2)


@pytest.mark.parametrize("cls", PUBLISHED)
def test_the_recommended_recipe_is_the_defaults_of_the_class(cls):
    assert cls(recipe="recommended") == cls()
    assert recipe_options(cls, Recipe.RECOMMENDED, None) == {}


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match=r"algorithm.recipe is one of recommended, paper; got published"):
        Flops(recipe="published")


@pytest.mark.parametrize("task", ["lr", "mnist", "mnist-cnn"])
@pytest.mark.parametrize("cls", PUBLISHED)
def test_a_recipe_takes_precedence_over_the_defaults_of_a_task(cls, task):
    options = default_options(TASKS[task], cls, None, Recipe.PAPER)
    run = resolve(RunConfig(task=task, algorithm_name="flops", algorithm=cls(**options)))
    assert {name: getattr(run.algorithm, name) for name in STATED} == STATED
    assert run.federation.client_weighting is ClientWeighting.UNIFORM
    assert resolve(run.config) == run


@pytest.mark.parametrize("task", ["lr", "mc"])
@pytest.mark.parametrize(("cls", "stated"), [(Flops, 1.0), (FlopsPA, 0.1)])
def test_the_papers_dual_rate_is_a_fraction_of_one_weight_per_exchange(cls, stated, task):
    """L140, L303: eta_lambda is 1/|theta| per exchange, and .1/|theta| per round of FLoPS-PA; L_con is the mean of P minus rho."""
    run = resolve(RunConfig(task=task, algorithm_name="flops", algorithm=cls(recipe="paper")))
    layout = run.objective.layout
    assert run.algorithm.dual_rate == pytest.approx(stated * run.algorithm.workload.exchanges / layout.size, rel=1e-12)
    log_alpha = torch.linspace(-2, 4, layout.size, dtype=torch.float64)
    gap = active_probability(run.algorithm.shape, log_alpha).mean() - run.density
    for algorithm in (run.algorithm, cls(recipe="paper")):  # resolved, and as a library uses it
        after = algorithm.ascend(torch.tensor(0.25, dtype=torch.float64), log_alpha, layout, Clock(0, 10))
        assert float(after) == pytest.approx(0.25 + stated / layout.size * float(gap), rel=1e-12)


@pytest.mark.parametrize("cls", PUBLISHED)
def test_without_a_limit_log_alpha_is_not_clamped(cls):
    layout = Linear(loss=Loss.SQUARED, num_features=3).layout
    log_alpha = torch.tensor([40.0, -40.0, 8.0])
    for algorithm, kept in ((cls(recipe="paper"), [40, -40, 8]), (cls(recipe="paper", log_alpha_limit=12.0), [12, -12, 8])):
        assert algorithm.normalize_log_alpha(log_alpha, layout).tolist() == kept
    assert cls(recipe="paper").scale_log_alpha(log_alpha, True, 1).abs().max() > 40


def test_messages_with_log_alpha_need_its_limit():
    with pytest.raises(ValueError, match=r"algorithm.log-alpha-limit must be at most 12 if messages contain log_alpha"):
        FlopsPA(log_alpha_limit=inf, gate_encoding=GateEncoding.LOG_ALPHA)


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("flops", "lr"),
        *(("flops-pa", task) for task in ("lr", "lg", "mc")),
        *(pytest.param("flops", task, marks=pytest.mark.long) for task in ("lg", "mc")),
    ],
)
def test_the_papers_recipe_runs_on_the_papers_tasks(name, task):
    run = resolve(RunConfig(task=task, algorithm_name=name, algorithm=algorithm_class(name)(recipe="paper"), **SMALL))
    *_, last = run_rounds(run, Simulation(run))
    assert last.parameters.isfinite().all()
    assert int((last.parameters != 0).sum()) == run.objective.layout.size // 10


def test_the_papers_recipe_sends_float32_and_scales_literally():
    algorithm = Flops(recipe="paper", scaling_start=0.0)
    layout, draw = Linear(loss=Loss.SQUARED, num_features=20).layout, server_sampler(0, 0, 0, torch.float32)
    server = algorithm.init(layout, torch.linspace(1, 20, 20), draw)
    packet = algorithm.broadcast(server, Clock(0, 10), draw)
    assert torch.equal(packet.field_dense("weights", torch.float32), server.weights)
    after = algorithm.end_round(server, Clock(0, 10)).log_alpha / server.log_alpha
    torch.testing.assert_close(after, torch.where(torch.arange(20) == 19, 1.5, 0.5))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("flops", "flops-pa")])
def test_an_algorithm_without_recipes_names_those_that_have_one(name, capsys):
    assert main(["train", "--algorithm", name, "--algorithm.recipe", "paper"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "flops, flops-pa" in line and name in line
    with pytest.raises(ValueError, match="flops, flops-pa"):
        require_recipes(name, "paper")
    with pytest.raises(ValueError, match="has no recipes"):
        algorithm_class(name)(recipe=Recipe.PAPER)


def test_compare_needs_an_algorithm_that_has_recipes(capsys):
    assert main(["compare", "--algorithms", "sieve,fed-avg", "--algorithm.recipe", "paper"]) == 2
    assert "one that has recipes: flops, flops-pa" in capsys.readouterr().err


@pytest.mark.usefixtures("few_test_rows")
def test_the_command_line_prints_every_value_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--algorithm", "flops-pa", "--algorithm.recipe", "paper", "--algorithm.bits", "16", "--rounds", "2", "--quiet"]
    small = ["--data.num-examples", "100", "--data.num-features", "40", "--federation.clients", "5", "--federation.participation", "0.4"]
    assert main([*words, *small, "--out", "run"]) == 0
    text = (tmp_path / "run" / "config.toml").read_text()
    for line in ('recipe = "paper"', "bits = 16", 'batch-sampling = "independent"', "dual-rate = 0.0025", 'client-weighting = "uniform"'):
        assert line in text


def lines_of(capsys, *words):
    """The exit code of a small run, and what it wrote to standard error."""
    small = ["--data.num-examples", "400", "--data.num-features", "100", "--federation.clients", "10", "--out", "run"]
    code = main(["train", "--algorithm.recipe", "paper", *words, *small])
    return code, [line for line in capsys.readouterr().err.splitlines() if ": round " not in line]


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize(
    ("words", "formula"),
    [
        (["--algorithm", "flops", "--algorithm.server-learning-rate", "0.1", "--quiet"], "theta~ - eta g with a constant eta (L138)"),
        (["--algorithm", "flops-pa", "--algorithm.learning-rate", "0.1", "--quiet"], "theta~ - eta g with a constant eta (L138)"),
        (
            ["--algorithm", "flops", "--rounds", "90", "--algorithm.log-alpha-scaling-rate", "20", "--algorithm.exchanges", "1", "--quiet"],
            "the paper's scaling (1 +- r) log_alpha (L155-157) multiplies it by 21",
        ),
    ],
    ids=["flops step", "flops-pa step", "scaling"],
)
def test_a_formula_that_diverges_is_named_in_one_line(words, formula, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, (line,) = lines_of(capsys, *words, "--checkpoint.rounds", "1000")  # a checkpoint would refuse the state first
    assert code == 1
    assert formula in line and "use --algorithm." in line


@pytest.mark.usefixtures("few_test_rows")
def test_a_result_worse_than_the_zero_model_names_the_formula(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--data.num-examples", "400", "--data.num-features", "100", "--federation.clients", "10", "--rounds", "2", "--quiet"]
    rates = {"bad": "0.03", "good": "0.001"}
    for out, rate in rates.items():
        words = ["--algorithm", "flops", "--algorithm.recipe", "paper", "--algorithm.server-learning-rate", rate]
        assert main(["train", *words, *small, "--algorithm.exchanges", "4", "--out", out]) == 0
    bad, good = (json.loads((tmp_path / out / "result.json").read_text()) for out in rates)
    assert bad["value"] < -0.1 and bad["note"].startswith("worse than a model with all weights zero: the paper's step theta~ - eta g")
    assert "lower algorithm.server-learning-rate 0.03" in bad["note"]
    assert good["value"] > 0 and good["note"] is None


@pytest.mark.usefixtures("few_test_rows")
def test_a_formula_that_cannot_run_as_printed_is_reported(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, lines = lines_of(capsys, "--algorithm", "flops-pa", "--rounds", "2")
    assert code == 0
    assert any("log_alpha = beta' log(z / (1 - z)) (L171) is infinite at z = 0 and 1" in line for line in lines)


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("words", [["flops", "--algorithm.recipe", "paper"], ["fed-avg"]])
def test_a_result_has_its_metric_before_and_after_the_projection(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--data.num-examples", "400", "--data.num-features", "100", "--federation.clients", "10", "--rounds", "3"]
    assert main(["train", "--algorithm", *words, *small, "--out", "run", "--quiet"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    run = load_run(tmp_path / "run")
    *_, last = run_rounds(run)
    for key, parameters in (
        ("value", last.parameters),
        ("value_before_projection", run.algorithm.unprojected_parameters(last.result.server)),
    ):
        assert result[key] == pytest.approx(Simulation(run).evaluate(parameters)["r2"], rel=1e-6)
    assert result["value"] != result["value_before_projection"]


@pytest.mark.usefixtures("few_test_rows")
def test_every_entry_point_takes_the_recipe(tmp_path, monkeypatch):
    """Python with options or an object, Flower's run config, and a comparison, in which algorithms without recipes keep their defaults."""
    monkeypatch.chdir(tmp_path)
    from_options = resolve(RunConfig(algorithm_name="flops-pa", algorithm={"recipe": "paper", "bits": 16}, **SMALL)).algorithm
    assert (from_options.recipe, from_options.bits, from_options.log_alpha_limit) == (Recipe.PAPER, 16, inf)
    objective = Linear(loss=Loss.LOGISTIC, num_features=30)
    settings = {"clients": 3, "algorithm.name": "flops-pa", "algorithm.recipe": "paper", "algorithm.bits": 16}
    deployed = deployment_config(settings, objective).algorithm
    assert (deployed.learning_rate, deployed.bits, deployed.client_weighting) == (0.1, 16, ClientWeighting.UNIFORM)
    with pytest.raises(ValueError, match="flops, flops-pa"):
        deployment_config(settings | {"algorithm.name": "sieve"}, objective)
    x, y = torch.randn(40, 4), torch.randn(40, 1)
    _, fitted = fit(torch.nn.Linear(4, 1), torch.nn.functional.mse_loss, [(x, y)], density=0.5, algorithm=FlopsPA(recipe="paper"), rounds=1)
    assert fitted.nonzero == 2
    small = ["--data.num-examples", "100", "--data.num-features", "40", "--federation.clients", "5", "--federation.participation", "0.4"]
    words = ["compare", "--algorithms", "flops-pa,fed-avg", "--seeds", "0", "--rounds", "1", "--algorithm.recipe", "paper", "--quiet"]
    assert main([*words, *small, "--out", "both"]) == 0
    assert load_run(tmp_path / "both" / "flops-pa-seed0").algorithm.recipe is Recipe.PAPER
    assert load_run(tmp_path / "both" / "fed-avg-seed0").algorithm == resolve(RunConfig(algorithm_name="fed-avg")).algorithm


@pytest.mark.usefixtures("few_test_rows")
def test_a_comparison_says_which_algorithms_have_the_recipe(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--data.num-examples", "100", "--data.num-features", "40", "--federation.clients", "5", "--federation.participation", "0.4"]
    words = ["compare", "--algorithms", "sieve,flops-pa", "--seeds", "0", "--rounds", "1", *small]
    assert main([*words, "--algorithm.recipe", "paper"]) == 0
    said = capsys.readouterr().out
    assert "flops-pa (paper)" in said and "sieve (paper)" not in said
    assert "recipe paper in brackets; without recipes, with their defaults: sieve" in said
    assert main([*words, "--out", "plain"]) == 0
    assert "recipe" not in capsys.readouterr().out


def test_the_short_help_shows_the_recipe(capsys):
    assert main(["train", "--algorithm", "flops", "--help"]) == 0
    assert "--algorithm.recipe" in capsys.readouterr().out


def test_an_unknown_option_lists_those_whose_names_contain_it(capsys):
    assert main(["train", "--algorithm", "flops", "--algorithm.rate", "0.1"]) == 2
    listed = capsys.readouterr().err
    assert "--algorithm.server-learning-rate" in listed and "--algorithm.gate-rate" in listed and "--algorithm.bits" not in listed


@pytest.mark.parametrize("task", ["lr", "lg"])
def test_an_option_that_the_recipe_sets_needs_no_effect(task):
    """Prune start has no effect without scaling, and the recipe has another value for each kind of loss."""
    run = resolve(RunConfig(task=task, algorithm_name="flops", algorithm={"recipe": "paper", "log_alpha_scaling": "off"}))
    assert run.algorithm.log_alpha_scaling is LogAlphaScaling.OFF
    with pytest.raises(ValueError, match=r"algorithm\.scaling-start 0\.3 has no effect"):
        resolve(
            RunConfig(task=task, algorithm_name="flops", algorithm={"recipe": "paper", "log_alpha_scaling": "off", "scaling_start": 0.3})
        )
