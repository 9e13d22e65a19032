"""Compiled kernels are kept for later runs, and work if they cannot be kept."""

import os
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest

from fedsieve.kernels import compilation

SOURCE = """
from numba import float64
from fedsieve.kernels.compilation import compile_kernel


@compile_kernel(float64[::1])
def double(x):
    for i in range(len(x)):
        x[i] *= 2
"""


@pytest.fixture
def install(tmp_path):
    """A function that writes a module with a kernel, as an installation at some time does, and imports it."""
    path = tmp_path / "site" / "kernel_of_test.py"
    path.parent.mkdir()

    def write_and_import(time):
        path.unlink(missing_ok=True)
        path.write_text(SOURCE)
        os.utime(path, (time, time))
        spec = spec_from_file_location("kernel_of_test", path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double.dispatcher

    return write_and_import


def doubled(kernel):
    x = np.array([1.0, 3.0])
    kernel(x)
    return x.tolist()


def test_a_reinstalled_kernel_is_not_compiled_again(install):
    assert sum(install(1e9).stats.cache_misses.values()) == 1
    again = install(1.1e9)
    assert sum(again.stats.cache_hits.values()) == 1 and not again.stats.cache_misses
    assert doubled(again) == [2.0, 6.0]


def test_a_change_of_shared_functions_compiles_a_kernel_again(install, monkeypatch):
    install(1e9)
    monkeypatch.setattr(compilation, "DIGEST", "other")
    assert sum(install(1e9).stats.cache_misses.values()) == 1


def test_kernels_work_without_a_writable_cache_folder(install, tmp_path, monkeypatch):
    (tmp_path / "site" / "__pycache__").write_text("a file in place of the folder")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "site" / "__pycache__" / "cache"))
    kernel = install(1e9)
    assert not kernel.stats.cache_path
    assert doubled(kernel) == [2.0, 6.0]
