"""The notebooks run from top to bottom, in a kernel of their own; what must hold in them they assert themselves."""

import resource
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

MAX_SECONDS = 120
BOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
OFTEN_RUN = "quickstart"


@pytest.mark.parametrize("path", [pytest.param(path, marks=[pytest.mark.long] * (path.stem != OFTEN_RUN), id=path.stem) for path in BOOKS])
def test_a_notebook_runs_from_top_to_bottom_in_two_minutes(path, tmp_path):
    book, began = nbformat.read(path, as_version=4), resource.getrusage(resource.RUSAGE_CHILDREN)
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime - began.ru_utime < MAX_SECONDS, "time of the processor, which does not depend on other work of the machine"


def test_notebooks_are_small_and_there_is_one_for_each_way_in():
    assert [path.stem for path in BOOKS] == ["flower_app", "own_module", "quickstart"]
    assert all(path.stat().st_size < 100_000 for path in BOOKS)
