"""`python -m benchmarks.estimators`: the estimators on ten clients and scikit-learn's l1 models on all examples in one place.

Both have the same number of non-zero weights: the l1 model is the densest with at most as many. A quarter of the examples is held out.
"""

import warnings

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedsieve import SparseFederatedClassifier, SparseFederatedRegressor

DATASETS = {"breast_cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits, "diabetes": load_diabetes}
DENSITIES = (0.1, 0.3, 0.5)
SEEDS = range(3)
NUM_BISECTIONS = 10


def l1_model(strength, num_classes):
    """Return scikit-learn's l1 model; a larger strength keeps more weights."""
    if num_classes is None:
        return make_pipeline(StandardScaler(), Lasso(alpha=1 / strength))
    solver = (
        {"solver": "saga", "max_iter": 100, "tol": 1e-3, "random_state": 0}
        if num_classes > 2
        else {"solver": "liblinear", "max_iter": 1000}
    )
    return make_pipeline(StandardScaler(), LogisticRegression(l1_ratio=1, C=strength, **solver))


def densest_l1_model(max_nonzero, x, y, num_classes):
    """Return the densest l1 model with at most `max_nonzero` weights, by bisection of its strength."""
    low, high, found = 1e-3, 1e2, None
    for _ in range(NUM_BISECTIONS):
        middle = np.sqrt(low * high)
        model = l1_model(middle, num_classes).fit(x, y)
        if (model[-1].coef_ != 0).sum() <= max_nonzero:
            low, found = middle, model
        else:
            high = middle
    return found


def compare(name, density):
    """Return the scores of both models for each seed, the number of weights, and the mean bytes sent."""
    x, y = DATASETS[name](return_X_y=True)
    num_classes = None if name == "diabetes" else len(np.unique(y))
    scores, kept, num_bytes = [], 0, []
    for seed in SEEDS:
        train_x, test_x, train_y, test_y = train_test_split(x, y, random_state=seed, stratify=None if num_classes is None else y)
        cls = SparseFederatedRegressor if num_classes is None else SparseFederatedClassifier
        ours = cls(density, random_state=seed).fit(train_x, train_y)
        kept = int((ours.coef_ != 0).sum())
        scores.append((ours.score(test_x, test_y), densest_l1_model(kept, train_x, train_y, num_classes).score(test_x, test_y)))
        num_bytes.append(ours.bytes_up_ + ours.bytes_down_)
    return np.array(scores), kept, np.mean(num_bytes)


def main():
    """Print a table in Markdown."""
    warnings.simplefilter("ignore", ConvergenceWarning)
    print(
        f"| held-out accuracy, R2 for diabetes ({len(SEEDS)} splits) | weights kept | fedsieve | l1, all examples in one place | kB sent |"
    )
    print("|---|---|---|---|---|")
    for name in DATASETS:
        for density in DENSITIES:
            scores, kept, num_bytes = compare(name, density)
            ours, theirs = (f"{mean:.3f} +- {spread:.3f}" for mean, spread in zip(scores.mean(0), scores.std(0, ddof=1), strict=True))
            print(f"| {name} | {kept} | {ours} | {theirs} | {num_bytes / 1000:.0f} |", flush=True)


if __name__ == "__main__":
    main()
