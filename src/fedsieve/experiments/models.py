"""A model on disk: indices and values in a safetensors file, or a module's own named tensors to start from."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedsieve.core.types import Layout, Objective


def packed(theta: Tensor, layout: Layout) -> bytes:
    """The weights that are not zero, by index and value; the layout as one line of JSON (several keys would have no fixed order)."""
    kept = theta.nonzero()[:, 0]
    return save({"index": kept.int(), "value": theta[kept].float()}, {"layout": described(layout)})


def described(layout: Layout) -> str:
    """A layout as one line of JSON."""
    return json.dumps({"size": layout.size, "free": layout.free, "layers": {name: shape for name, (_, shape) in layout.layers.items()}})


def load_start(path: Path, objective: Objective) -> Tensor:
    """Weights to start from: a model this package wrote, or a module's state by parameter names."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            written = (file.metadata() or {}).get("layout")
    except (OSError, SafetensorError) as problem:
        raise ValueError(f"--start {path} cannot be read as safetensors: {problem}") from None
    size = objective.layout.size
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"--start {path} holds a value that is not a finite number")
    if set(tensors) == {"index", "value"}:
        if written != described(objective.layout):
            raise ValueError(f"--start {path} is a model of another shape: {written}; this one is {described(objective.layout)}")
        index = tensors["index"].long()
        return torch.zeros(size).index_put((index,), tensors["value"])
    places = objective.places
    missing = [name for name in places if name not in tensors]
    if missing:
        raise ValueError(f"--start {path} has no tensor {missing[0]}; the model needs {', '.join(places)}")
    wrong = [name for name, (_, shape) in places.items() if tuple(tensors[name].shape) != tuple(shape)]
    if wrong:
        raise ValueError(
            f"--start {path}: {wrong[0]} has shape {tuple(tensors[wrong[0]].shape)}, the model needs {tuple(places[wrong[0]][1])}"
        )
    theta = torch.zeros(size)
    for name, (part, _) in places.items():
        theta[part] = tensors[name].reshape(-1).float()
    return theta
