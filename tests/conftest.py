"""Shapes in annotations are checked while the suite runs; one thread, so that runs repeat bit for bit."""

from jaxtyping import install_import_hook

CHECKED = ["core", "objectives", "algorithms", "data", "metrics", "train", "wire", "checkpoint", "engines"]
install_import_hook([f"fedsieve.{part}" for part in CHECKED], "shapes.check")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def few_test_rows(monkeypatch):
    """Synthetic tasks with a small test set, for tests that train but do not judge."""
    monkeypatch.setattr("fedsieve.data.synthetic.TEST_ROWS", 200)
