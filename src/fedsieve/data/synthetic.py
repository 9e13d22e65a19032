"""The paper's synthetic tasks: sparse linear regression, logistic regression, multi-class (L211), with shifted clients."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Float

from fedsieve.core.budgets import num_kept
from fedsieve.core.random import generator
from fedsieve.data.federated_dataset import FederatedDataset, PartitionSpec, partition_indices

NUM_TEST_EXAMPLES = 10_000


class Shift(StrEnum):
    """How the features of client c are shifted, with d_c ~ N(0, scale) (L603, decision F3)."""

    NONE = "none"
    SCALAR = "scalar"
    """add d_c to every feature, before the targets are computed"""
    VECTOR = "vector"
    """add a draw of N(d_c, 1) to each feature, before the targets are computed"""
    SCALAR_AFTER = "scalar-after"
    """add d_c after the targets are computed"""
    VECTOR_AFTER = "vector-after"
    """add N(d_c, 1) per feature after the targets are computed"""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Options of the synthetic tasks."""

    num_examples: int = 10_000
    """training examples of all clients together; the test set has 10,000 more"""
    num_features: int = 1000
    """number of features"""
    num_classes: int = 10
    """number of classes of task mc"""
    true_density: float = 0.05
    """fraction of the true coefficients that are not zero"""
    snr: float = 20.0
    """signal-to-noise ratio of the targets or logits"""
    correlation: float = 0.2
    """correlation rho of neighbouring features; features i and j have rho^|i-j|"""
    shift: Shift = Shift.SCALAR
    """how each client's features are shifted"""
    shift_scale: float = 1.0
    """standard deviation of the clients' shifts"""

    def __post_init__(self) -> None:
        """Validate the options."""
        counts = {"num-examples": (self.num_examples, 1), "num-features": (self.num_features, 1), "num-classes": (self.num_classes, 2)}
        for name, (count, minimum) in counts.items():
            if count < minimum:
                raise ValueError(f"data.{name} must be at least {minimum}; got {count}")
        if not self.snr > 0:
            raise ValueError(f"data.snr must be above 0, it divides the noise; got {self.snr}")
        if not 0 <= self.correlation < 1:
            raise ValueError(f"data.correlation must be at least 0 and below 1; got {self.correlation}")
        if not self.shift_scale >= 0:
            raise ValueError(f"data.shift-scale is a standard deviation and must be at least 0; got {self.shift_scale}")
        try:
            num_kept(self.true_density, self.num_features)
        except ValueError as error:
            raise ValueError(f"data.true-density: {error}") from None


def generate(task: str, data: Synthetic, spec: PartitionSpec, seed: int, num_server_examples: int = 0) -> FederatedDataset:
    """Generate the data of task `lr`, `lg` or `mc`. Test examples are never shifted (decision F1).

    Server examples have the distribution of the clients' examples: each is shifted like a client drawn in proportion to its examples.
    """
    num_outputs = data.num_classes if task == "mc" else 1
    truth = true_coefficients(num_outputs, data, generator(seed, "truth"))
    x = correlated_examples(data.num_examples, data.num_features, data.correlation, generator(seed, "rows"))
    signal = x @ truth.T
    sigma = float(np.sqrt((signal**2).mean() / data.snr))
    noise = generator(seed, "noise").standard_normal(signal.shape, dtype=np.float32) * sigma
    parts = partition_indices(x, None if task == "lr" else make_targets(task, signal + noise), spec, generator(seed, "partition"))
    order = np.concatenate(parts)
    counts = np.array([len(part) for part in parts])
    shifts = client_shifts(data, len(counts), generator(seed, "shift"))
    x, y = shift_examples(task, data.shift, truth, x[order], noise[order], np.repeat(shifts, counts, axis=0))
    test = unshifted_examples(data, truth, sigma, NUM_TEST_EXAMPLES, seed, "test")
    test_x, test_y = shift_examples(task, Shift.NONE, truth, *test, shifts[:1])
    server = unshifted_examples(data, truth, sigma, num_server_examples, seed, "server")
    clients = generator(seed, "server clients").choice(len(counts), num_server_examples, p=counts / counts.sum())
    server_x, server_y = shift_examples(task, data.shift, truth, *server, shifts[clients])
    return FederatedDataset(x, y, counts, test_x, test_y, server_x, server_y, "generated", truth)


def true_coefficients(num_outputs: int, data: Synthetic, rng: np.random.Generator) -> Float[np.ndarray, "c f"]:
    """Coefficients that are -1 or +1 at m = floor(rho f c) random positions and else 0 (decision F1)."""
    size = num_outputs * data.num_features
    truth = np.zeros(size, dtype=np.float32)
    support = rng.choice(size, num_kept(data.true_density, size), replace=False)
    truth[support] = rng.choice(np.array([-1, 1], dtype=np.float32), len(support))
    return truth.reshape(num_outputs, data.num_features)


def correlated_examples(num_examples: int, num_features: int, correlation: float, rng: np.random.Generator) -> Float[np.ndarray, "n f"]:
    """Examples of N(0, Sigma), Sigma_ij = rho^|i-j|, by the AR(1) recursion x_j = rho x_{j-1} + sqrt(1 - rho^2) e_j in O(n f)."""
    columns = rng.standard_normal((num_features, num_examples), dtype=np.float32)
    columns[1:] *= np.float32(np.sqrt(1 - correlation**2))
    if correlation:
        for previous, current in zip(columns[:-1], columns[1:], strict=True):
            current += np.float32(correlation) * previous
    return np.ascontiguousarray(columns.T)


def make_targets(task: str, noisy_logits: Float[np.ndarray, "n c"]) -> np.ndarray:
    """The targets of noisy logits: the logit (lr), whether it is positive (lg), or the largest one (mc) (L211)."""
    if task == "lr":
        return noisy_logits[:, 0]
    if task == "lg":
        return (noisy_logits[:, 0] > 0).astype(np.float32)
    return noisy_logits.argmax(1)


def client_shifts(data: Synthetic, num_clients: int, rng: np.random.Generator) -> Float[np.ndarray, "c _f"]:
    """The shift of each client's features: one number, or one per feature."""
    shift = rng.standard_normal((num_clients, 1), dtype=np.float32) * np.float32(data.shift_scale)
    if data.shift in (Shift.VECTOR, Shift.VECTOR_AFTER):
        shift = shift + rng.standard_normal((num_clients, data.num_features), dtype=np.float32)
    return shift


def shift_examples(
    task: str,
    kind: Shift,
    truth: Float[np.ndarray, "c f"],
    x: Float[np.ndarray, "n f"],
    noise: Float[np.ndarray, "n c"],
    shift: Float[np.ndarray, "_n _f"],
) -> tuple[Float[np.ndarray, "n f"], np.ndarray]:
    """Shifted examples, and their targets before or after the shift."""
    if kind is Shift.NONE:
        return x, make_targets(task, x @ truth.T + noise)
    if kind in (Shift.SCALAR_AFTER, Shift.VECTOR_AFTER):
        return x + shift, make_targets(task, x @ truth.T + noise)
    x = x + shift
    return x, make_targets(task, x @ truth.T + noise)


def unshifted_examples(
    data: Synthetic, truth: Float[np.ndarray, "c f"], noise_std: float, num_examples: int, seed: int, purpose: str
) -> tuple[Float[np.ndarray, "n f"], Float[np.ndarray, "n c"]]:
    """Examples of the same distribution without a shift, and the noise of their logits."""
    x = correlated_examples(num_examples, data.num_features, data.correlation, generator(seed, f"{purpose} rows"))
    return x, generator(seed, f"{purpose} noise").standard_normal((num_examples, len(truth)), dtype=np.float32) * noise_std
