"""A user's own rows on their clients."""

from collections.abc import Iterator

import numpy as np

from fedsieve.core.random import stream
from fedsieve.data import user_files
from fedsieve.data.downloads import DataError
from fedsieve.data.federated_dataset import Drawn, Spread, split


def draw(
    data: user_files.Own, kind: type[np.generic] | None, row: tuple[int, ...] | None, spread: Spread, seed: int, server_rows: int = 0
) -> Drawn:
    """The rows on their own clients, or spread by the chosen partition; some held out as test rows.

    Classes become numbers of a `kind`; rows have the shape `row`, or lie flat.
    """
    table = user_files.read(data.path, data.target, data.client)
    labels = kind is not None
    y = np.searchsorted(user_files.classes(table.y), table.y).astype(kind) if labels else table.y.astype(np.float32)
    order = stream(seed, "test rows").permutation(len(y))
    cut = max(1, round(data.test_fraction * len(y)))
    test, mine, rest = order[:cut], order[cut : cut + server_rows], np.sort(order[cut + server_rows :])
    if not len(rest):
        raise DataError(f"{len(y)} rows leave none to train on after {cut} test rows and {server_rows} for the server")
    if table.owner is None:
        parts, note = split(table.x[rest], y[rest] if labels else None, spread, stream(seed, "partition")), None
    else:
        names = np.unique(table.owner)
        rng = stream(seed, "own order")
        parts = [rng.permutation(np.flatnonzero(table.owner[rest] == name)) for name in names]
        note = "; ".join(remarks(names.tolist(), [y[rest[part]] for part in parts], labels)) or None
    placed = rest[np.concatenate(parts)]
    counts = np.array([len(part) for part in parts])
    x = table.x if row is None else table.x.reshape(-1, *row)
    return Drawn(x[placed], y[placed], counts, x[test], y[test], x[mine], y[mine], note=note)


def remarks(names: list, targets: list[np.ndarray], labels: bool) -> Iterator[str]:
    """What can be trained on but is worth a look: clients without rows, with one class only, or perhaps the same under two names."""
    held = list(zip(names, targets, strict=True))
    spellings: dict[str, list] = {}
    for name in names:
        spellings.setdefault(str(name).strip().casefold(), []).append(name)
    yield from listed("no training row", [name for name, y in held if not len(y)])
    yield from listed("rows of one class only", [name for name, y in held if labels and len(y) and (y == y[0]).all()])
    yield from listed("a name that differs only in case or blanks", [name for same in spellings.values() if len(same) > 1 for name in same])


def listed(what: str, names: list) -> Iterator[str]:
    """A remark about some clients, a few of them by name."""
    if names:
        shown = ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")
        yield f"{len(names)} client{'s have' if len(names) > 1 else ' has'} {what}: {shown}"
