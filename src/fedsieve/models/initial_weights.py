"""Weights to start from: a model this package wrote, or a module's own named tensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsieve.core.types import Objective
from fedsieve.models import sparse_model


def load_initial_weights(path: Path, objective: Objective) -> Tensor:
    """Weights to start from: a model this package wrote, or a module's state by parameter names."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise ValueError(f"--init-weights {path} cannot be read as safetensors: {problem}") from None
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"--init-weights {path} holds a value that is not a finite number")
    places = objective.slices
    if set(tensors) == {"index", "value"}:
        given, shapes = sparse_model.read_model(path), {name: tuple(shape) for name, (_, shape) in places.items()}
        if (given.tensor_shapes, given.num_ungated) != (shapes, objective.layout.num_ungated):
            raise ValueError(f"--init-weights {path} is a model of another shape: {given.tensor_shapes}; this one is {shapes}")
        return torch.from_numpy(given.to_dense())
    missing = [name for name in places if name not in tensors]
    if missing:
        raise ValueError(f"--init-weights {path} has no tensor {missing[0]}; the model needs {', '.join(places)}")
    wrong = [name for name, (_, shape) in places.items() if tuple(tensors[name].shape) != tuple(shape)]
    if wrong:
        raise ValueError(
            f"--init-weights {path}: {wrong[0]} has shape {tuple(tensors[wrong[0]].shape)}, the model needs {tuple(places[wrong[0]][1])}"
        )
    theta = torch.zeros(objective.layout.size)
    for name, (part, _) in places.items():
        theta[part] = tensors[name].reshape(-1).float()
    return theta
