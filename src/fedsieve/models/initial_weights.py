"""Initial weights from a file."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsieve.core.protocols import Objective
from fedsieve.models import sparse_model


def load_initial_weights(path: Path, objective: Objective) -> Tensor:
    """The initial parameters and buffers from a model of this package, or from a safetensors file of a module's state dict."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--init-weights {path} cannot be read as safetensors: {error}") from None
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"--init-weights {path} has a value that is not a finite number")
    slices = objective.slices
    size = max(part.stop for part, _ in slices.values())
    if set(tensors) == {"index", "value"}:
        model, shapes = sparse_model.read_model(path), {name: tuple(shape) for name, (_, shape) in slices.items()}
        if (model.tensor_shapes, model.num_ungated) != (shapes, size - objective.layout.num_gated):
            raise ValueError(f"--init-weights {path} is a model of shapes {model.tensor_shapes}; the model to train has {shapes}")
        return torch.from_numpy(model.to_dense())
    missing = [name for name in slices if name not in tensors]
    if missing:
        raise ValueError(f"--init-weights {path} has no tensor {missing[0]}; the model needs {', '.join(slices)}")
    mismatched = [name for name, (_, shape) in slices.items() if tuple(tensors[name].shape) != tuple(shape)]
    if mismatched:
        raise ValueError(
            f"--init-weights {path}: {mismatched[0]} has shape {tuple(tensors[mismatched[0]].shape)}, "
            f"the model needs {tuple(slices[mismatched[0]][1])}"
        )
    parameters = torch.zeros(size)
    for name, (part, _) in slices.items():
        parameters[part] = tensors[name].reshape(-1).float()
    return parameters
