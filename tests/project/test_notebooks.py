"""The notebooks run from top to bottom, in a kernel of their own; what must hold in them they assert themselves."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

BOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_notebooks_are_small_and_there_are_two():
    assert [path.stem for path in BOOKS] == ["own_module", "quickstart"]
    assert all(path.stat().st_size < 100_000 for path in BOOKS)
