"""Resolve and train a small run of a task."""

from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import FederationConfig, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.training import run_rounds
from helpers.algorithms import make_algorithm

SMALL_DATA = Synthetic(num_examples=300, num_features=40, num_classes=4, true_density=0.1)


def small_run(algorithm_name="sieve", **settings):
    """Return a resolved run of a few rounds, on task lr by default; `settings` replace those of RunConfig."""
    defaults = {"density": 0.1, "rounds": 4, "seed": 11, "data": SMALL_DATA}
    defaults |= {"federation": FederationConfig(clients=12, participation=0.5)}
    if "algorithm" not in settings:
        defaults["algorithm"] = make_algorithm(algorithm_name)
    return resolve(RunConfig(algorithm_name=algorithm_name, **(defaults | settings)))


def train_run(run, secret=bytes(32)):
    """Return all rounds of a run; noise and cohorts of a private one follow from the secret."""
    return list(run_rounds(run, secret=secret))
