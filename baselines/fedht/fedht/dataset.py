"""fedht: the clients of Simulation I of the paper."""

from functools import cache

import numpy as np

from fedsieve.data.published import simulate_fed_ht

NUM_EXAMPLES, NUM_FEATURES, SPREAD = 100, 1000, 0.1


@cache
def _simulation() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]:
    return simulate_fed_ht(NUM_EXAMPLES, NUM_FEATURES, SPREAD, logistic=False)


def load_client(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the training examples of a client."""
    (x, y), _, owners = _simulation()
    return x[owners == client], y[owners == client]


def load_test() -> tuple[np.ndarray, np.ndarray]:
    """Return the test examples."""
    return _simulation()[1]
