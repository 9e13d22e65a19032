"""Runs of the paper's studies have the options that their settings name."""

from itertools import product
from math import inf

import pytest

from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.defaults import recipe_options
from fedsieve.algorithms.recipes import Recipe
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.tasks import TASKS
from fedsieve.studies import paper
from fedsieve.studies.results import IID, NON_IID, PUBLISHED
from fedsieve.studies.scale import SCALES, ScaleName

SHORT = SCALES[ScaleName.SHORT]


def published_run(task, algorithm_name, **settings):
    return resolve(paper.synthetic_run_factory(SHORT, task, algorithm_name, setting=PUBLISHED, **settings)(0))


@pytest.mark.parametrize(("task", "skew"), [*product(paper.SYNTHETIC_TASKS, (IID, NON_IID))])
@pytest.mark.parametrize("density", [paper.SPARSE, paper.DENSE])
@pytest.mark.parametrize("algorithm_name", ["fed-iter-ht", "flops", "flops-pa"])
def test_a_run_as_published_has_every_published_option(algorithm_name, task, skew, density):
    run = published_run(task, algorithm_name, skew=skew, target_density=density)
    published = paper.published_options(task, algorithm_name, density, skew)
    assert {name: getattr(run.algorithm, name) for name in published} == published
    assert (run.federation.client_weighting, run.federation.max_norm_ratio) == ("uniform", inf)


@pytest.mark.parametrize(("task", "algorithm_name"), [*product(paper.SYNTHETIC_TASKS, ("flops", "flops-pa"))])
def test_flops_as_published_is_the_papers_recipe(task, algorithm_name):
    run, stated = published_run(task, algorithm_name), recipe_options(algorithm_class(algorithm_name), Recipe.PAPER, TASKS[task].loss)
    stated |= {"dual_rate": run.algorithm.dual_rate}  # depends on the number of weights
    assert {name: getattr(run.algorithm, name) for name in stated} == stated
    assert run.algorithm.recipe is Recipe.PAPER


def test_a_study_refuses_an_option_that_the_algorithm_does_not_have():
    with pytest.raises(TypeError, match="gate_rate"):
        published_run("lr", "fed-iter-ht", gate_rate=0.1)
