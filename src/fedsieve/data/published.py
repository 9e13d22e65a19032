"""The data of other people's published experiments, on their clients. Each is one fixed draw; a run's seed decides only its batches."""

import numpy as np
from jaxtyping import Float, Int

from fedsieve.core.random import generator

Examples = tuple[np.ndarray, np.ndarray]
NUM_SIMULATED_CLIENTS, NUM_MNIST_CLIENTS, NUM_POWER_LAW_CLIENTS = 100, 100, 1000
NUM_TRUE = 100
"""Coefficients of each client that are not zero, in the simulations of Fed-HT."""
HELD_OUT_FRACTION = 0.1
FLOWER_SEED = 42


def simulate_fed_ht(num_samples: int, num_features: int, spread: float, *, logistic: bool) -> tuple[Examples, Examples, np.ndarray]:
    """Simulation I (linear) or II (logistic) of Tong et al. 2022, with the draws and the split of Flower's pull request 7076.

    Client i has its own coefficients, N(u_i, 1) in the first 100 places, u_i ~ N(.1, spread^2), and features N(v_i, diag(k^-1.2)) with
    v_i ~ N(B_i, 1), B_i ~ N(0, spread^2). In Simulation II its tenth with the highest scores has label 1. A tenth of each client's
    examples is not used. The test examples are a tenth of those of the last ten clients, most of which these clients train on.
    """
    rng = np.random.default_rng(FLOWER_SEED)
    scale = np.sqrt(1 / np.arange(1.0, num_features + 1) ** 1.2)
    x, y = [], []
    for _ in range(NUM_SIMULATED_CLIENTS):
        mean, shift = rng.normal(0.1, spread), rng.normal(0.0, spread)
        coefficients = np.zeros(num_features)
        coefficients[:NUM_TRUE] = rng.normal(mean, 1.0, NUM_TRUE)
        features = rng.normal(rng.normal(shift, 1.0, num_features), scale, (num_samples, num_features))
        scores = features @ coefficients + rng.normal(mean, 1.0, num_samples)
        x.append(features.astype(np.float32))
        y.append((np.argsort(np.argsort(scores)) >= num_samples - num_samples // 10 if logistic else scores).astype(np.float32))
    used = [np.random.default_rng(client).permutation(num_samples)[held_out(num_samples) :] for client in range(len(x))]
    train = np.concatenate([part[rows] for part, rows in zip(x, used, strict=True)])
    targets = np.concatenate([part[rows] for part, rows in zip(y, used, strict=True)])
    num_last = held_out(len(x) * num_samples)
    tested = np.random.default_rng(FLOWER_SEED).permutation(num_last)[: held_out(num_last)]
    last = slice(-num_last // num_samples, None)
    test = np.concatenate(x[last])[-num_last:][tested], np.concatenate(y[last])[-num_last:][tested]
    return (train, targets), test, np.repeat(np.arange(len(x)), list(map(len, used)))


def held_out(num_examples: int) -> int:
    """The number of examples in a tenth."""
    return max(1, int(num_examples * HELD_OUT_FRACTION))


def assign_two_classes(labels: Int[np.ndarray, " n"], num_clients: int, rng: np.random.Generator) -> Int[np.ndarray, " n"]:
    """The client of each example if every client holds two random classes and the examples of a class are shared evenly."""
    classes = np.unique(labels)
    held = np.stack([rng.choice(classes, 2, replace=False) for _ in range(num_clients)])
    owners = np.empty(len(labels), dtype=np.int64)
    for label in classes:
        holders = np.flatnonzero((held == label).any(1))
        parts = np.array_split(rng.permutation(np.flatnonzero(labels == label)), len(holders))
        owners[np.concatenate(parts)] = np.repeat(holders, list(map(len, parts)))
    return owners


def assign_by_power_law(labels: Int[np.ndarray, " n"], rng: np.random.Generator) -> Int[np.ndarray, " n"]:
    """The client of each example, or -1, if 1000 clients hold two neighbouring digits and their sizes follow a power law.

    FedProx's partition of MNIST (Li et al. 2020, arXiv 1812.06127): five examples of each of its digits for every client, the others
    in proportion to lognormal numbers with sigma 2; what rounding leaves over has no client.
    """
    owners = np.full(len(labels), -1)
    by_label = [rng.permutation(np.flatnonzero(labels == label)) for label in range(10)]
    weights = rng.lognormal(0, 2.0, (10, NUM_POWER_LAW_CLIENTS // 10, 2))
    for label, examples in enumerate(by_label):
        holders = [(client, place) for client in range(NUM_POWER_LAW_CLIENTS) for place in range(2) if (client + place) % 10 == label]
        shares = np.array([weights[label, client // 10, place] for client, place in holders])
        counts = 5 + np.floor((len(examples) - 5 * len(holders)) * shares / shares.sum()).astype(np.int64)
        owners[examples[: counts.sum()]] = np.repeat([client for client, _ in holders], counts)
    return owners


def split_power_law(x: Float[np.ndarray, "n f"], y: Int[np.ndarray, " n"]) -> tuple[Examples, Examples, np.ndarray]:
    """All 70,000 digits on FedProx's clients: each pixel standardized, a tenth of each client's digits for testing."""
    rng = generator(0, "power law")
    x = ((x - x.mean(0)) / (x.std(0) + np.float32(0.001 / 255))).astype(np.float32)
    owners = assign_by_power_law(y, rng)
    is_test = np.zeros(len(y), dtype=bool)
    for client in range(NUM_POWER_LAW_CLIENTS):
        held = rng.permutation(np.flatnonzero(owners == client))
        is_test[held[int(0.9 * len(held)) :]] = True
    is_train = (owners >= 0) & ~is_test
    return (x[is_train], y[is_train]), (x[is_test], y[is_test]), owners[is_train]
