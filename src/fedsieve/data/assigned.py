"""A user's own rows on their clients."""

import numpy as np

from fedsieve.core.streams import stream
from fedsieve.data import own
from fedsieve.data.sources import DataError
from fedsieve.data.spread import Drawn, Spread, split


def draw(data: own.Own, labels: bool, spread: Spread, seed: int, server_rows: int = 0) -> Drawn:
    """The rows on their own clients, or spread by the chosen partition; some held out as test rows."""
    table = own.read(data.path, data.target, data.client)
    y = np.searchsorted(own.classes(table.y), table.y) if labels else table.y.astype(np.float32)
    order = stream(seed, "test rows").permutation(len(y))
    cut = max(1, round(data.test_fraction * len(y)))
    test, mine, rest = order[:cut], order[cut : cut + server_rows], np.sort(order[cut + server_rows :])
    if not len(rest):
        raise DataError(f"{len(y)} rows leave none to train on after {cut} test rows and {server_rows} for the server")
    if table.owner is None:
        parts = split(table.x[rest], y[rest] if labels else None, spread, stream(seed, "partition"))
    else:
        names = np.unique(table.owner)
        rng = stream(seed, "own order")
        parts = [rng.permutation(np.flatnonzero(table.owner[rest] == name)) for name in names]
    placed = rest[np.concatenate(parts)]
    counts = np.array([len(part) for part in parts])
    return Drawn(table.x[placed], y[placed], counts, table.x[test], y[test], table.x[mine], y[mine])
