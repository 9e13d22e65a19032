"""The gates of FLoPS and FLoPS-PA end at the target density, however many rounds a run has (decision C1)."""

import pytest

from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import run_rounds

ALGORITHMS = ("flops", "flops-pa")


def final_densities(config):
    """Return expected and test-time density over the target after the last round, without the final projection."""
    run = resolve(config)
    last = list(run_rounds(run, Simulation(run)))[-1].metrics
    return last["expected_density"] / run.density, last["test_density"] / run.density


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("density", [0.5, 0.1, 0.02])
@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [
        *((name, rounds) for name in ALGORITHMS for rounds in (1, 2, 3)),
        ("flops-pa", 10),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("flops", 10), ("flops", 40), ("flops-pa", 40))),
    ],
)
def test_the_density_reached_does_not_depend_on_the_number_of_rounds(algorithm, rounds, density):
    data, federation = Synthetic(num_examples=400, num_features=100), FederationConfig(clients=10, participation=0.4)
    config = RunConfig(task="lr", algorithm_name=algorithm, rounds=rounds, density=density, data=data, federation=federation)
    expected, at_test = final_densities(config)
    assert expected == pytest.approx(1, rel=0.05)
    assert at_test == pytest.approx(1, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("density", [0.5, 0.05, 0.01])
@pytest.mark.parametrize("rounds", [10, 50, 100, 200])
@pytest.mark.parametrize("task", ["lr", "lg", "mc", "mnist"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_density_is_reached_on_the_tasks_of_the_paper(algorithm, task, rounds, density):
    expected, at_test = final_densities(RunConfig(task=task, algorithm_name=algorithm, rounds=rounds, density=density, seed=100))
    assert expected == pytest.approx(1, rel=0.05)
    assert at_test == pytest.approx(1, rel=0.02)
