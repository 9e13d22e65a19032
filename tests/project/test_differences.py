"""docs/differences.md lists exactly the options in which the recommended recipe and the paper's differ."""

import re
from pathlib import Path

import pytest

from fedsieve.core.settings import flatten
from fedsieve.experiments.config import RunConfig
from fedsieve.experiments.resolve import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `--")]
ALGORITHMS = {"flops": "FLoPS", "flops-pa": "FLoPS-PA"}


def settings(algorithm, recipe):
    run = resolve(RunConfig(task="lr", algorithm_name=algorithm, algorithm={"recipe": recipe}))
    return {f"--{key.replace('_', '-')}": value for key, value in flatten(run.settings_dict).items() if key != "algorithm.recipe"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_table_lists_the_options_in_which_the_recipes_differ(algorithm):
    paper, recommended = settings(algorithm, "paper"), settings(algorithm, "recommended")
    differing = {key for key in paper | recommended if paper.get(key) != recommended.get(key)}
    listed = [re.findall(r"`(--[\w.-]+)", row[0])[0] for row in ROWS if ALGORITHMS[algorithm] in row[1].split(", ")]
    assert sorted(listed) == sorted(differing)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_option_of_a_row_restores_the_papers_value(algorithm):
    paper = settings(algorithm, "paper")
    for row in ROWS:
        key, *value = row[0].strip("`").split()
        if ALGORITHMS[algorithm] in row[1].split(", ") and value:
            assert value == [str(paper[key])]
