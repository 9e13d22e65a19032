"""The learning task: replace the module, the examples and the metrics with your own. Server and clients import this file."""

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.objectives.module import Module

NUM_FEATURES, NUM_CLASSES = 60, 4


def build_network() -> nn.Module:
    """YOUR MODULE: any nn.Module. Its initial weights follow from the run's seed and are equal on every machine."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))


def load_examples(client: int, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """YOUR EXAMPLES: features and labels of one client, read from where its node stores them. Here they are generated."""
    x, y = generate_examples(seed=1, num_examples=2000)
    return x[client::num_clients], y[client::num_clients]


def load_test_examples() -> tuple[np.ndarray, np.ndarray]:
    """YOUR TEST EXAMPLES: the server evaluates the model on them."""
    return generate_examples(seed=2, num_examples=2000)


def generate_examples(seed: int, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate examples whose class depends on ten of the features."""
    directions = np.random.default_rng(0).normal(size=(10, NUM_CLASSES))
    x = np.random.default_rng(seed).normal(size=(num_examples, NUM_FEATURES)).astype(np.float32)
    return x, (x[:, :10] @ directions).argmax(1)


OBJECTIVE = Module(module=build_network(), factory=build_network)


def evaluate(parameters: Tensor) -> dict[str, float]:
    """Return the metrics of the model on the test examples."""
    x, y = (torch.from_numpy(array) for array in load_test_examples())
    correct = OBJECTIVE.predict(parameters.float(), x).argmax(-1) == y
    return {"accuracy": float(correct.float().mean())}
