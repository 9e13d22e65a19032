"""Shapes in annotations are checked while the suite runs; one thread, so that runs repeat bit for bit."""

from jaxtyping import install_import_hook

from helpers import typecheck

CHECKED = ["core", "objectives", "algorithms", "data", "runtime", "wire", "storage.checkpoint"]
install_import_hook([f"fedsieve.{part}" for part in CHECKED], "helpers.typecheck.check")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_configure(config):
    """The normal suite checks some calls of each function; other runs check every call."""
    typecheck.checks_all_calls = config.option.markexpr != "not long"


def pytest_runtest_setup():
    typecheck.start_test()


@pytest.fixture
def few_test_rows(monkeypatch):
    """Synthetic tasks with a small test set, for tests that train but do not judge."""
    monkeypatch.setattr("fedsieve.data.synthetic.NUM_TEST_EXAMPLES", 200)


@pytest.fixture
def write_model(tmp_path, monkeypatch):
    """A function that writes a model into the folder of the test."""
    from fedsieve.models.export import SUFFIXES, Format, export

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def write(model, format=Format.SAFETENSORS, name="model"):
        path = tmp_path / (name + SUFFIXES[format])
        path.write_bytes(export(model, format))
        return path

    return write
