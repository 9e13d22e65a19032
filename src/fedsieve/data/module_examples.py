"""The examples of clients for a module: pairs, data sets and loaders as one tensor of inputs and one of targets."""

from collections.abc import Mapping, Sequence, Sized
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Keys of the target in an example that is a dict."""
ClientExamples = tuple[Any, Any] | Mapping[str, Any] | Dataset | DataLoader
"""A client's examples: (x, y), a dict with the key `labels`, a Dataset, or a DataLoader; what is iterated is read once.

x is a tensor or an array, or several of them: a tuple of the module's arguments, or a dict of its keyword arguments.
"""


class InputFormat(NamedTuple):
    """How the inputs of one example are stored as one row of a tensor."""

    names: tuple[str, ...] | None
    """keyword arguments of the module; None: positional arguments"""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def pack(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return all inputs as one matrix; numbers of different types as double precision, which holds integers below 2^53."""
        dtype = self.dtypes[0] if len(set(self.dtypes)) == 1 else torch.float64
        return torch.cat([part.reshape(len(part), -1).to(dtype) for part in inputs], dim=1)

    def call(self, module: nn.Module, rows: Tensor) -> Any:
        """Return what the module returns for packed inputs."""
        columns = rows.split([prod(shape) for shape in self.shapes], dim=1)
        inputs = [column.reshape(-1, *shape).to(dtype) for column, shape, dtype in zip(columns, self.shapes, self.dtypes, strict=True)]
        return module(*inputs) if self.names is None else module(**dict(zip(self.names, inputs, strict=True)))


class ModuleExamples(NamedTuple):
    """The examples of all clients in the order of the clients."""

    x: Tensor
    y: Tensor
    counts: np.ndarray
    """the number of examples of each client"""
    input_format: InputFormat | None = None
    """None if the module has one input"""

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the outputs of the module: a tensor, or the `logits` of an object or dict."""
        outputs = module(x) if self.input_format is None else self.input_format.call(module, x)
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits", outputs)
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"the module returns a {type(outputs).__name__}; fit needs a tensor, or an object or dict with `logits`: "
                f"wrap the module in one whose forward returns the tensor that the loss compares with the targets"
            )
        return outputs

    def to(self, device: torch.device, dtype: torch.dtype) -> "ModuleExamples":
        """Return the examples on a device; a single input of real numbers has the precision of the module."""
        convert = self.input_format is None and self.x.is_floating_point()
        return self._replace(x=self.x.to(device, dtype if convert else self.x.dtype), y=self.y.to(device))


def stack_clients(clients: Any) -> ModuleExamples:
    """Return the examples of all clients as tensors."""
    if isinstance(clients, (Dataset, DataLoader, Tensor, np.ndarray)) or not isinstance(clients, Sequence):
        raise ValueError(
            f"clients must be a list with the examples of each client; got a {type(clients).__name__}; put a single client into a list"
        )
    if not clients:
        raise ValueError("clients is empty; give the examples of at least one client")
    read = [read_client(client, client_id) for client_id, client in enumerate(clients)]
    counts = np.array([0 if pair is None else len(pair[1]) for pair in read])
    pairs = [pair for pair, count in zip(read, counts, strict=True) if pair is not None and count]
    if not pairs:
        raise ValueError("no client has an example; give at least one client some examples")
    formats = [input_format(x) for x, _ in pairs]
    for name, kinds in (("x", set(formats)), ("y", {input_format(y) for _, y in pairs})):
        if len(kinds) > 1:
            shown = sorted(str([*zip(kind.shapes, kind.dtypes, strict=True)]) for kind in kinds)
            raise ValueError(f"examples must have one shape and type at all clients; {name} has {' and '.join(shown)}")
    y = torch.cat([y for _, y in pairs])
    if isinstance(pairs[0][0], Tensor):
        return ModuleExamples(torch.cat([x for x, _ in pairs]), y, counts)
    return ModuleExamples(torch.cat([formats[0].pack(list_inputs(x)) for x, _ in pairs]), y, counts, formats[0])


def list_inputs(x: Any) -> list[Tensor]:
    """Return the inputs of a module: one tensor, several, or those of a dict."""
    return [x] if isinstance(x, Tensor) else list(x.values()) if isinstance(x, Mapping) else list(x)


def input_format(x: Any) -> InputFormat:
    """Return names, shapes and types of the inputs of one example."""
    inputs = list_inputs(x)
    names = tuple(x) if isinstance(x, Mapping) else None
    return InputFormat(names, tuple(tuple(part.shape[1:]) for part in inputs), tuple(part.dtype for part in inputs))


def read_client(client: Any, client_id: int) -> tuple[Any, Tensor] | None:
    """Return a client's inputs (a tensor, several, or a dict of them) and targets, or None if it has no example."""
    if isinstance(client, DataLoader):
        batches = [split_target(batch, client_id) for batch in client]
        if not batches:
            return None
        x, y = merge([x for x, _ in batches]), torch.cat([as_tensor(y, client_id) for _, y in batches])
    elif isinstance(client, Dataset):
        if not isinstance(client, IterableDataset) and not isinstance(client, Sized):
            raise ValueError(f"client {client_id} is a Dataset without a length; give it __len__, or make it an IterableDataset")
        examples = list(client) if isinstance(client, IterableDataset) else [client[i] for i in range(len(client))]
        if not examples:
            return None
        x, y = split_target(default_collate(examples), client_id)
    else:
        x, y = split_target(client, client_id)
    x, y = convert_inputs(x, client_id), as_tensor(y, client_id)
    lengths = {len(part) for part in list_inputs(x)}
    if lengths != {len(y)}:
        raise ValueError(f"client {client_id} has {' and '.join(map(str, sorted(lengths)))} examples in x but {len(y)} targets in y")
    return x, y


def split_target(batch: Any, client_id: int) -> tuple[Any, Any]:
    """Return inputs and targets of a pair, or of a dict by its key `labels`."""
    if isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if key in batch), None)
        if key is None:
            raise ValueError(f"client {client_id} has dicts without a target: they have {', '.join(map(str, batch))}; name it labels")
        inputs = {name: part for name, part in batch.items() if name != key}
        return inputs, batch[key]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    number = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise ValueError(
        f"client {client_id} must be a pair (x, y), a dict with labels, a Dataset or a DataLoader; got {type(batch).__name__}{number}; "
        f"put several inputs into one tuple: ((x1, x2), y)"
    )


def merge(parts: list[Any]) -> Any:
    """Return the inputs of several batches as those of one."""
    if isinstance(parts[0], Mapping):
        return {name: torch.cat([torch.as_tensor(part[name]) for part in parts]) for name in parts[0]}
    if isinstance(parts[0], (tuple, list)):
        return tuple(torch.cat([torch.as_tensor(each) for each in column]) for column in zip(*parts, strict=True))
    return torch.cat([torch.as_tensor(part) for part in parts])


def convert_inputs(x: Any, client_id: int) -> Any:
    """Return inputs as tensors. A dict or tuple of one input stays one, as it says how the module is called."""
    if isinstance(x, Mapping):
        return {str(name): as_tensor(part, client_id) for name, part in x.items()}
    if isinstance(x, tuple) and any(isinstance(part, (Tensor, np.ndarray)) for part in x):
        return tuple(as_tensor(part, client_id) for part in x)
    return as_tensor(x, client_id)


def as_tensor(values: Any, client_id: int) -> Tensor:
    """Return numbers as a tensor; raise ValueError for words, ragged lists and other objects."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"client {client_id} has examples that are no tensor: {str(error).splitlines()[0]}") from None
