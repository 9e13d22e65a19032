"""`python -m benchmarks.estimators`: the estimators, whose rows stay on ten clients, beside scikit-learn's l1 models, which see all rows.

Both get as many non-zero weights; of the l1 path the densest model with at most that many. Quality on a quarter of the rows held out.
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
    """scikit-learn's l1 model; a larger strength keeps more."""
    if num_classes is None:
        return make_pipeline(StandardScaler(), Lasso(alpha=1 / strength))
    solver = (
        {"solver": "saga", "max_iter": 100, "tol": 1e-3, "random_state": 0}
        if num_classes > 2
        else {"solver": "liblinear", "max_iter": 1000}
    )
    return make_pipeline(StandardScaler(), LogisticRegression(l1_ratio=1, C=strength, **solver))


def densest_l1_model(max_nonzero, x, y, num_classes):
    """The densest l1 model with at most `kept` non-zeros, by bisection of its strength."""
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
    """Scores of both over the seeds, the weights kept, and what crossed."""
    x, y = DATASETS[name](return_X_y=True)
    many = None if name == "diabetes" else len(np.unique(y))
    scores, kept, crossed = [], 0, []
    for seed in SEEDS:
        rows, held, target, truth = train_test_split(x, y, random_state=seed, stratify=None if many is None else y)
        cls = SparseFederatedRegressor if many is None else SparseFederatedClassifier
        ours = cls(density, random_state=seed).fit(rows, target)
        kept = int((ours.coef_ != 0).sum())
        scores.append((ours.score(held, truth), densest_l1_model(kept, rows, target, many).score(held, truth)))
        crossed.append(ours.bytes_up_ + ours.bytes_down_)
    return np.array(scores), kept, np.mean(crossed)


def main():
    """The table, as Markdown."""
    warnings.simplefilter("ignore", ConvergenceWarning)
    print(f"| held-out accuracy, R2 for diabetes ({len(SEEDS)} splits) | weights kept | fedsieve | l1, all rows in one place | kB sent |")
    print("|---|---|---|---|---|")
    for name in DATASETS:
        for density in DENSITIES:
            scores, kept, crossed = compare(name, density)
            ours, theirs = (f"{mean:.3f} +- {spread:.3f}" for mean, spread in zip(scores.mean(0), scores.std(0, ddof=1), strict=True))
            print(f"| {name} | {kept} | {ours} | {theirs} | {crossed / 1000:.0f} |", flush=True)


if __name__ == "__main__":
    main()
