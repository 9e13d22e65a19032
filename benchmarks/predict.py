"""What sparsity is worth when a linear model predicts sparse rows: CPU time of one row, fedsieve's own way against others, side by side."""

import numpy as np
import torch
from scipy import sparse

from benchmarks.wire import min_cpu_seconds
from fedsieve.models.sparse_model import ModelMetadata, SparseModel
from fedsieve.objectives.losses import Loss

NUM_FEATURES, NUM_OUTPUTS, NONZERO_PER_EXAMPLE = 47_236, 34, 76
"""RCV1's; numbers in a row."""
NUM_EXAMPLES, NUM_DENSE_EXAMPLES, NUM_REPEATS = 5_000, 200, 15


def random_model(density: float, rng: np.random.Generator) -> SparseModel:
    """Random weights at random places."""
    size = NUM_FEATURES * NUM_OUTPUTS
    index = np.sort(rng.choice(size, round(density * size), replace=False)).astype(np.int32)
    card = ModelMetadata(
        task="rcv1", algorithm="sieve", loss=Loss.MULTILABEL, input_shape=(NUM_FEATURES,), classes=tuple(map(str, range(NUM_OUTPUTS)))
    )
    value = rng.standard_normal(len(index)).astype(np.float32)
    return SparseModel(indices=index, values=value, tensor_shapes={"weights": (NUM_OUTPUTS, NUM_FEATURES)}, num_ungated=0, metadata=card)


def random_examples(rng: np.random.Generator) -> sparse.csr_matrix:
    """Rows like those of a text collection: few numbers each, some features far more often than others (Zipf)."""
    chance = 1 / np.arange(10, NUM_FEATURES + 10)
    columns = [np.unique(rng.choice(NUM_FEATURES, NONZERO_PER_EXAMPLE, p=chance / chance.sum())) for _ in range(NUM_EXAMPLES)]
    ends = np.concatenate(([0], np.cumsum([len(part) for part in columns])))
    return sparse.csr_matrix((rng.random(ends[-1], dtype=np.float32), np.concatenate(columns), ends), (NUM_EXAMPLES, NUM_FEATURES))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = random_examples(rng)
    few = torch.from_numpy(x[:NUM_DENSE_EXAMPLES].toarray())
    print(f"{'density':>8} {'ours, us a row':>15} {'times slower: dense weights':>28} {'dense rows in torch':>20}")
    for density in (0.001, 0.005, 0.05):
        model = random_model(density, rng)
        dense = np.ascontiguousarray(model.coef.toarray().T)
        weights = torch.from_numpy(dense)
        ways = {"ours": lambda m=model: m.predict(x), "dense": lambda w=dense: x @ w, "torch": lambda w=weights: few @ w}
        assert np.allclose(ways["ours"](), ways["dense"](), atol=1e-3)
        cost = dict.fromkeys(ways, np.inf)
        for _ in range(NUM_REPEATS):  # interleaved: other work on the machine hits all alike
            cost = {
                key: min(cost[key], min_cpu_seconds(way, 1) / (NUM_DENSE_EXAMPLES if key == "torch" else NUM_EXAMPLES))
                for key, way in ways.items()
            }
        print(f"{density:>8} {1e6 * cost['ours']:>15.2f} {cost['dense'] / cost['ours']:>28.1f} {cost['torch'] / cost['ours']:>20.0f}")


if __name__ == "__main__":
    main()
