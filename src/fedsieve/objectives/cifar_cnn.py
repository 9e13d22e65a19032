"""A CNN for 32 x 32 colour images with 471,338 parameters, the one of Natasha-R's published CIFAR-10 results."""

from torch import nn


def cifar_cnn() -> nn.Module:
    """3 x 3 convolutions (32, 64 / 64 / 32 channels) with 2 x 2 max pooling after each group, then 512 - 512 - 256 - 10 with dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(256, 10),
    )
