"""The examples of a user's file, distributed over clients."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedsieve.core.random import generator
from fedsieve.data import user_files
from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import FederatedDataset, PartitionSpec, partition_indices


def load_user_dataset(
    data: user_files.UserFiles,
    class_dtype: type[np.generic] | None,
    example_shape: tuple[int, ...] | None,
    spec: PartitionSpec,
    seed: int,
    num_server_examples: int = 0,
) -> FederatedDataset:
    """The examples on the clients named in the file, or distributed by `spec`, and a held-out test set.

    Classes become indices of type `class_dtype`, which is None for regression. Examples get the shape `example_shape` if it is set.
    """
    assert data.path is not None, "`file_task` checks it"
    table = user_files.read_table(data.path, data.target, data.client)
    if class_dtype is None:
        y, labels = table.y.astype(np.float32), None
    else:
        y = labels = np.searchsorted(user_files.distinct_classes(table.y), table.y).astype(class_dtype)
    order = generator(seed, "test rows").permutation(len(y))
    cut = max(1, round(data.test_fraction * len(y)))
    test, server, train = order[:cut], order[cut : cut + num_server_examples], np.sort(order[cut + num_server_examples :])
    if not len(train):
        raise DataError(
            f"{len(y)} examples leave none for training: {cut} are for testing and {num_server_examples} for the server; add examples"
        )
    if table.client is None:
        train_labels = None if labels is None else labels[train]
        parts, note = partition_indices(table.x[train], train_labels, spec, generator(seed, "partition")), None
    else:
        names = np.unique(table.client)
        rng = generator(seed, "own order")
        parts = [rng.permutation(np.flatnonzero(table.client[train] == name)) for name in names]
        note = "; ".join(client_warnings(names.tolist(), [y[train[part]] for part in parts], labels is not None)) or None
    by_client = train[np.concatenate(parts)]
    counts = np.array([len(part) for part in parts])
    source = f"{Path(data.path).name}, a random {data.test_fraction:.0%} for testing"
    x = table.x if example_shape is None else table.x.reshape(-1, *example_shape)
    return FederatedDataset(x[by_client], y[by_client], counts, x[test], y[test], x[server], y[server], source, note=note)


def client_warnings(names: list, targets: list[np.ndarray], is_classification: bool) -> Iterator[str]:
    """Warnings about clients without training examples, with only one class, or with almost the same name."""
    clients = list(zip(names, targets, strict=True))
    spellings: dict[str, list] = {}
    for name in names:
        spellings.setdefault(str(name).strip().casefold(), []).append(name)
    yield from _warn("no training examples", [name for name, y in clients if not len(y)])
    yield from _warn("examples of only one class", [name for name, y in clients if is_classification and len(y) and (y == y[0]).all()])
    yield from _warn(
        "a name that differs from another only in case or spaces", [name for same in spellings.values() if len(same) > 1 for name in same]
    )


def _warn(condition: str, names: list) -> Iterator[str]:
    """A warning about some clients, the first three by name."""
    if names:
        shown = ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")
        yield f"{len(names)} client{'s have' if len(names) > 1 else ' has'} {condition}: {shown}"
