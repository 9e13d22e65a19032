"""What is learned: put your own module, your own rows and your own measure here. Server and clients both import this file."""

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.objectives.module import Module

FEATURES, CLASSES = 60, 4


def network() -> nn.Module:
    """YOUR MODULE: any nn.Module; its weights are drawn from the run's seed, the same on every machine."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def rows(client: int, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """YOUR ROWS: features and labels of one client, read from where its node keeps them. Here all are generated and dealt out."""
    x, y = generated(seed=1, count=2000)
    return x[client::clients], y[client::clients]


def held_out_rows() -> tuple[np.ndarray, np.ndarray]:
    """YOUR TEST ROWS: what the server measures the model on."""
    return generated(seed=2, count=2000)


def generated(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Classes that depend on ten of the features."""
    directions = np.random.default_rng(0).normal(size=(10, CLASSES))
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype(np.float32)
    return x, (x[:, :10] @ directions).argmax(1)


OBJECTIVE = Module(module=network(), build=network)


def measure(theta: Tensor) -> dict[str, float]:
    """What the server says of the model after every round."""
    x, y = (torch.from_numpy(part) for part in held_out_rows())
    correct = OBJECTIVE.predict(theta.float(), x).argmax(-1) == y
    return {"accuracy": float(correct.float().mean())}
