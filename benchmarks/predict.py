"""`python -m benchmarks.predict`: CPU time per sparse example of a sparse linear model, of dense weights, of dense examples in torch."""

import numpy as np
import torch
from scipy import sparse

from benchmarks.wire import min_cpu_seconds
from fedsieve.models.sparse_model import ModelMetadata, SparseModel
from fedsieve.objectives.losses import Loss

NUM_FEATURES, NUM_OUTPUTS, NONZERO_PER_EXAMPLE = 47_236, 34, 76
"""The sizes of RCV1."""
NUM_EXAMPLES, NUM_DENSE_EXAMPLES, NUM_REPEATS = 5_000, 200, 15


def random_model(density: float, rng: np.random.Generator) -> SparseModel:
    """Return a model with random weights at random positions."""
    size = NUM_FEATURES * NUM_OUTPUTS
    index = np.sort(rng.choice(size, round(density * size), replace=False)).astype(np.int32)
    metadata = ModelMetadata(
        task="rcv1", algorithm="sieve", loss=Loss.MULTILABEL, input_shape=(NUM_FEATURES,), classes=tuple(map(str, range(NUM_OUTPUTS)))
    )
    value = rng.standard_normal(len(index)).astype(np.float32)
    return SparseModel(
        indices=index, values=value, tensor_shapes={"weights": (NUM_OUTPUTS, NUM_FEATURES)}, num_ungated=0, metadata=metadata
    )


def random_examples(rng: np.random.Generator) -> sparse.csr_matrix:
    """Return examples like those of a text collection: few features each, whose frequencies follow Zipf's law."""
    frequency = 1 / np.arange(10, NUM_FEATURES + 10)
    columns = [np.unique(rng.choice(NUM_FEATURES, NONZERO_PER_EXAMPLE, p=frequency / frequency.sum())) for _ in range(NUM_EXAMPLES)]
    ends = np.concatenate(([0], np.cumsum([len(part) for part in columns])))
    return sparse.csr_matrix((rng.random(ends[-1], dtype=np.float32), np.concatenate(columns), ends), (NUM_EXAMPLES, NUM_FEATURES))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = random_examples(rng)
    few = torch.from_numpy(x[:NUM_DENSE_EXAMPLES].toarray())
    print(f"{'density':>8} {'ours, us/example':>16} {'times slower: dense weights':>28} {'dense examples in torch':>24}")
    for density in (0.001, 0.005, 0.05):
        model = random_model(density, rng)
        dense = np.ascontiguousarray(model.coef.toarray().T)
        weights = torch.from_numpy(dense)
        methods = {"ours": lambda m=model: m.predict(x), "dense": lambda w=dense: x @ w, "torch": lambda w=weights: few @ w}
        assert np.allclose(methods["ours"](), methods["dense"](), atol=1e-3)
        cost = dict.fromkeys(methods, np.inf)
        for _ in range(NUM_REPEATS):  # interleaved: other work on the machine slows all of them
            cost = {
                key: min(cost[key], min_cpu_seconds(predict, 1) / (NUM_DENSE_EXAMPLES if key == "torch" else NUM_EXAMPLES))
                for key, predict in methods.items()
            }
        print(f"{density:>8} {1e6 * cost['ours']:>16.2f} {cost['dense'] / cost['ours']:>28.1f} {cost['torch'] / cost['ours']:>24.0f}")


if __name__ == "__main__":
    main()
