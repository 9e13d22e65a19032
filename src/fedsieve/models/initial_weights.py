"""Weights to start from: a model this package wrote, or a module's own named tensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsieve.core.types import Objective
from fedsieve.models import sparse_model


def load_start(path: Path, objective: Objective) -> Tensor:
    """Weights to start from: a model this package wrote, or a module's state by parameter names."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise ValueError(f"--start {path} cannot be read as safetensors: {problem}") from None
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"--start {path} holds a value that is not a finite number")
    places = objective.places
    if set(tensors) == {"index", "value"}:
        given, shapes = sparse_model.read(path), {name: tuple(shape) for name, (_, shape) in places.items()}
        if (given.tensors, given.free) != (shapes, objective.layout.free):
            raise ValueError(f"--start {path} is a model of another shape: {given.tensors}; this one is {shapes}")
        return torch.from_numpy(given.dense())
    missing = [name for name in places if name not in tensors]
    if missing:
        raise ValueError(f"--start {path} has no tensor {missing[0]}; the model needs {', '.join(places)}")
    wrong = [name for name, (_, shape) in places.items() if tuple(tensors[name].shape) != tuple(shape)]
    if wrong:
        raise ValueError(
            f"--start {path}: {wrong[0]} has shape {tuple(tensors[wrong[0]].shape)}, the model needs {tuple(places[wrong[0]][1])}"
        )
    theta = torch.zeros(objective.layout.size)
    for name, (part, _) in places.items():
        theta[part] = tensors[name].reshape(-1).float()
    return theta
