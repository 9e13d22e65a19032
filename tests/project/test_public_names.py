"""The public names, and that the documentation imports no others."""

import importlib
import re
from pathlib import Path

import nbformat
import pytest

import fedsieve

ROOT = Path(__file__).parents[2]
SUBMODULES = {
    "fedsieve.algorithms.sieve": {"Sieve"},
    "fedsieve.data.partition": {"partition_by_label"},
    "fedsieve.deployment.deployment_config": {"DeploymentConfig", "deployment_config"},
    "fedsieve.deployment.flower": {"make_client_app", "make_server_app"},
    "fedsieve.deployment.server": {"run_server"},
    "fedsieve.flower": {"SparseStrategy", "sparse_mod"},
    "fedsieve.objectives.module": {"Module"},
    "fedsieve.runtime.loop": {"LoopEngine"},
}
"""Public submodules and their public names. A Flower client imports from them, to load only what it needs."""


def read_code():
    """The text of all documentation, code of notebooks and of the Flower template in which a user reads imports."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src/fedsieve/deployment/template/app").glob("*.py")]
    notebooks = [nbformat.read(path, as_version=4) for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")]
    return "\n".join([*(page.read_text() for page in pages), *(cell.source for book in notebooks for cell in book.cells)])


def test_every_public_name_can_be_imported():
    for name in fedsieve.__all__:
        assert getattr(fedsieve, name) is not None


def test_a_name_that_is_not_public_is_refused():
    assert not hasattr(fedsieve, "nonsense")


def test_no_public_name_is_the_name_of_a_submodule():
    submodules = {path.stem for path in (ROOT / "src" / "fedsieve").iterdir()}
    assert not submodules & set(fedsieve.__all__)


@pytest.mark.parametrize("module", SUBMODULES)
def test_public_submodules_have_their_names(module):
    assert all(hasattr(importlib.import_module(module), name) for name in SUBMODULES[module])


def test_the_documentation_imports_only_public_names():
    imports = re.findall(r"^\+?from (fedsieve[\w.]*) import ([\w, ]+)$", read_code(), flags=re.MULTILINE)
    assert len(imports) > 8
    for module, names in imports:
        assert set(names.split(", ")) <= (set(fedsieve.__all__) if module == "fedsieve" else SUBMODULES.get(module, set())), module


def test_the_public_names_are_these():
    assert set(fedsieve.__all__) == {
        "ALGORITHMS",
        "Batch",
        "BatchedEngine",
        "BuiltinFiles",
        "ClientData",
        "Failures",
        "FederationConfig",
        "FitResult",
        "GateGranularity",
        "Linear",
        "LoopEngine",
        "Loss",
        "Module",
        "PacketError",
        "Population",
        "Privacy",
        "ResolvedRun",
        "RunConfig",
        "Simulation",
        "SparseFederatedClassifier",
        "SparseFederatedRegressor",
        "SparseModel",
        "Synthetic",
        "UserFiles",
        "__version__",
        "algorithm_class",
        "fit",
        "initial_server",
        "read_model",
        "resolve",
        "run_rounds",
        "train",
    }
