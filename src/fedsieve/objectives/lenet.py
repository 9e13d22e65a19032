"""The CNN of the paper: 44,426 parameters including biases (L398)."""

from torch import nn


def lenet() -> nn.Module:
    """Two 5 x 5 convolutions (6 and 16 channels) with 2 x 2 max pooling, then 256 - 120 - 84 - 10."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
