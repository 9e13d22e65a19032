"""A user's own rows on their clients."""

from collections.abc import Iterator

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
    """The rows on their own clients, or spread by the chosen partition; some held out as test rows.

    Classes become numbers of a `kind`; rows have the shape `row`, or lie flat.
    """
    table = user_files.read_table(data.path, data.target, data.client)
    labels = class_dtype is not None
    y = np.searchsorted(user_files.distinct_classes(table.y), table.y).astype(class_dtype) if labels else table.y.astype(np.float32)
    order = generator(seed, "test rows").permutation(len(y))
    cut = max(1, round(data.test_fraction * len(y)))
    test, mine, rest = order[:cut], order[cut : cut + num_server_examples], np.sort(order[cut + num_server_examples :])
    if not len(rest):
        raise DataError(f"{len(y)} rows leave none to train on after {cut} test rows and {num_server_examples} for the server")
    if table.client is None:
        parts, note = partition_indices(table.x[rest], y[rest] if labels else None, spec, generator(seed, "partition")), None
    else:
        names = np.unique(table.client)
        rng = generator(seed, "own order")
        parts = [rng.permutation(np.flatnonzero(table.client[rest] == name)) for name in names]
        note = "; ".join(client_warnings(names.tolist(), [y[rest[part]] for part in parts], labels)) or None
    placed = rest[np.concatenate(parts)]
    counts = np.array([len(part) for part in parts])
    x = table.x if example_shape is None else table.x.reshape(-1, *example_shape)
    return FederatedDataset(x[placed], y[placed], counts, x[test], y[test], x[mine], y[mine], note=note)


def client_warnings(names: list, targets: list[np.ndarray], is_classification: bool) -> Iterator[str]:
    """What can be trained on but is worth a look: clients without rows, with one class only, or perhaps the same under two names."""
    held = list(zip(names, targets, strict=True))
    spellings: dict[str, list] = {}
    for name in names:
        spellings.setdefault(str(name).strip().casefold(), []).append(name)
    yield from _warn("no training row", [name for name, y in held if not len(y)])
    yield from _warn("rows of one class only", [name for name, y in held if is_classification and len(y) and (y == y[0]).all()])
    yield from _warn("a name that differs only in case or blanks", [name for same in spellings.values() if len(same) > 1 for name in same])


def _warn(condition: str, names: list) -> Iterator[str]:
    """A remark about some clients, a few of them by name."""
    if names:
        shown = ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")
        yield f"{len(names)} client{'s have' if len(names) > 1 else ' has'} {condition}: {shown}"
