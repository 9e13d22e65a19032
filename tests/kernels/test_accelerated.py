"""The decorator that chooses between a kernel and its reference."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fedsieve import kernels
from fedsieve.kernels import MIN_SIZE, accelerated


@pytest.fixture
def attach(monkeypatch):
    """A reference that returns "reference", with a kernel that returns "kernel"."""
    monkeypatch.setattr(kernels, "KERNELS", {})
    monkeypatch.setattr(kernels, "load", lambda module: SimpleNamespace(name=lambda *args: "kernel"))

    def decorate(**options):
        @accelerated("vector", "name", **options)
        def function(vector, other=None, factor=2.0):
            return "reference"

        return function

    return decorate


LONG = torch.zeros(3, MIN_SIZE)


def test_the_kernel_runs_on_long_single_precision_tensors(attach):
    assert attach(tensors=("vector", "other"))(LONG, LONG) == "kernel"


@pytest.mark.parametrize(
    "vector", [LONG.double(), LONG[:, 1:], LONG.half(), torch.zeros(MIN_SIZE, 3).T, torch.empty(MIN_SIZE, device="meta")]
)
def test_the_reference_runs_on_all_other_tensors(attach, vector):
    assert attach(tensors=("vector", "other"))(vector, LONG) == "reference"
    assert attach(tensors=("vector", "other"))(LONG, vector) == "reference"


def test_the_length_of_one_vector_counts_and_not_the_number_of_clients(attach):
    assert attach(tensors=("vector",))(torch.zeros(MIN_SIZE, 10)) == "reference"


def test_a_tensor_may_be_missing(attach):
    assert attach(tensors=("vector", "other"))(LONG) == "kernel"


@pytest.mark.parametrize("call", [lambda f: f(), lambda f: f(LONG, missing=1), lambda f: f(LONG, vector=LONG), lambda f: f(other=LONG)])
def test_a_wrong_call_is_the_error_of_the_reference(attach, call):
    with pytest.raises(TypeError, match="argument"):
        call(attach(tensors=("vector",)))


def test_arguments_by_name_are_those_by_position(attach):
    function = attach(tensors=("vector", "other"), condition=lambda vector, other, factor: factor == 3.0)
    assert function(LONG, factor=3.0) == function(other=LONG, factor=3.0, vector=LONG) == function(LONG, None, 3.0) == "kernel"
    assert function(LONG, factor=2.0) == function(LONG) == "reference"


def test_the_length_may_be_computed_from_the_arguments(attach):
    function = attach(tensors=("vector",), size=lambda vector, other, factor: vector.numel(), min_size=50)
    assert function(torch.zeros(5, 10)) == "kernel"
    assert function(torch.zeros(4, 10)) == "reference"


def test_an_exact_kernel_runs_on_short_vectors_once_the_compiler_is_loaded(attach, monkeypatch):
    function = attach(tensors=("vector",), exact=True)
    monkeypatch.delitem(sys.modules, "fedsieve.kernels.vector", raising=False)
    assert function(torch.zeros(5)) == "reference"
    monkeypatch.setitem(sys.modules, "fedsieve.kernels.vector", kernels)
    assert function(torch.zeros(5)) == "kernel"


def test_a_condition_sees_defaults_and_keywords(attach):
    function = attach(tensors=("vector",), condition=lambda vector, other, factor: factor == 2.0)
    assert function(LONG) == function(vector=LONG) == function(LONG, factor=2.0) == "kernel"
    assert function(LONG, None, 3.0) == function(LONG, factor=3.0) == "reference"


def test_the_reference_runs_without_numba(attach, monkeypatch):
    monkeypatch.setattr(kernels, "load", lambda module: None)
    assert attach(tensors=("vector",))(LONG) == "reference"


def test_importing_the_core_does_not_load_numba():
    code = "import sys, fedsieve.core.constraint, fedsieve.objectives.linear; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
