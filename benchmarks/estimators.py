"""`python -m benchmarks.estimators`: the estimators on eight hospitals and scikit-learn's l1 models on all examples in one place.

Both have the same number of non-zero weights: the l1 model is the densest with at most as many. "l1, refitted" fits its features again
without the l1 penalty. A quarter of the examples is held out. `--uneven` gives each hospital the examples of one class.
"""

import sys
import warnings

import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine, make_classification
from sklearn.linear_model import Lasso, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from fedsieve import SparseFederatedClassifier, SparseFederatedRegressor

DATASETS = {"breast_cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits, "diabetes": load_diabetes}
CELLS = [
    *((name, density) for name in ("diabetes", "wine", "breast_cancer", "digits") for density in (0.1, 0.3, 0.5)),
    ("generated classes", 0.2),
    ("generated numbers", 0.2),
]
UNEVEN_CELLS = [("wine", 0.1), ("wine", 0.3), ("generated classes", 0.2), ("digits", 0.1)]
SEEDS = range(100, 103)
NUM_HOSPITALS = 8
NUM_BISECTIONS = 10


def load(name):
    """Return examples and targets; the generated tables have 60 features, of which 8 and 10 matter, and correlated ones."""
    if name in DATASETS:
        return DATASETS[name](return_X_y=True)
    if name == "generated classes":
        shape = {"n_samples": 800, "n_features": 60, "n_informative": 8, "n_redundant": 12, "n_classes": 3, "n_clusters_per_class": 1}
        return make_classification(**shape, flip_y=0.05, class_sep=1.0, random_state=7)
    rng = np.random.default_rng(7)
    noise = rng.normal(size=(400, 60))
    x = np.empty_like(noise)
    x[:, 0] = noise[:, 0]
    for j in range(1, 60):
        x[:, j] = 0.7 * x[:, j - 1] + np.sqrt(1 - 0.7**2) * noise[:, j]
    true = np.zeros(60)
    true[::6] = rng.normal(size=10) + np.sign(rng.normal(size=10))
    return x, x @ true + 2 * rng.normal(size=400)


def densest_l1_model(max_nonzero, x, y, num_classes):
    """Return coefficients and intercepts of the densest l1 model with at most `max_nonzero` weights, by bisection of its strength."""
    low, high, found = 1e-3, 1e2, None
    for _ in range(NUM_BISECTIONS):
        middle = np.sqrt(low * high)
        if num_classes is None:
            model = Lasso(alpha=np.std(y) / middle).fit(x, y)
        elif num_classes == 2:
            model = LogisticRegression(l1_ratio=1, C=middle, solver="liblinear", max_iter=1000).fit(x, y)
        else:
            model = LogisticRegression(l1_ratio=1, C=middle, solver="saga", max_iter=100, tol=1e-3, random_state=0).fit(x, y)
        if (model.coef_ != 0).sum() <= max_nonzero:
            low, found = middle, model
        else:
            high = middle
    return np.atleast_2d(found.coef_), np.atleast_1d(found.intercept_)


def refit(x, y, mask, num_classes):
    """Return the coefficients on a mask (outputs, features), and intercepts, with the penalty |w|^2 / 2n on the mean loss."""
    n, coef = len(x), np.zeros(mask.shape)
    if num_classes is None:
        kept = x[:, mask[0]]
        coef[mask] = np.linalg.solve(kept.T @ kept / n + np.eye(kept.shape[1]) / n, kept.T @ (y - y.mean()) / n)
        return coef, np.array([y.mean()])
    target = (y[:, None] == np.unique(y)[1:] if num_classes == 2 else y[:, None] == np.unique(y)).astype(float)
    size = int(mask.sum())

    def loss_and_gradient(theta):
        weights = np.zeros(mask.shape)
        weights[mask] = theta[:size]
        logits = x @ weights.T + theta[size:]
        if num_classes == 2:
            loss, slope = (np.logaddexp(0, logits) - target * logits).sum() / n, (1 / (1 + np.exp(-logits)) - target) / n
        else:
            top = logits.max(1, keepdims=True)
            total = np.exp(logits - top).sum(1, keepdims=True)
            loss = (np.log(total) + top - (logits * target).sum(1, keepdims=True)).sum() / n
            slope = (np.exp(logits - top) / total - target) / n
        penalty = theta[:size] @ theta[:size] / (2 * n)
        return loss + penalty, np.concatenate(((slope.T @ x)[mask] + theta[:size] / n, slope.sum(0)))

    found = minimize(loss_and_gradient, np.zeros(size + len(mask)), jac=True, method="L-BFGS-B", options={"maxiter": 1000, "gtol": 1e-7}).x
    coef[mask] = found[:size]
    return coef, found[size:]


def score(x, y, coef, intercept, classes):
    """Return the accuracy, or R2 if there are no classes."""
    outputs = x @ coef.T + intercept
    if classes is None:
        return 1 - ((y - outputs[:, 0]) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    return (classes[(outputs[:, 0] > 0).astype(int) if len(coef) == 1 else outputs.argmax(1)] == y).mean()


def compare(name, density, seed, *, uneven):
    """Return held-out scores of our models and of the l1 models for one split, the weights kept, and the kB sent."""
    x, y = load(name)
    classes = None if name in ("diabetes", "generated numbers") else np.unique(y)
    num_classes = None if classes is None else len(classes)
    train_x, test_x, train_y, test_y = train_test_split(x, y, random_state=seed, stratify=None if classes is None else y)
    scaler = StandardScaler().fit(train_x)
    train_x, test_x = scaler.transform(train_x), scaler.transform(test_x)
    cls = SparseFederatedRegressor if classes is None else SparseFederatedClassifier
    hospitals = {} if uneven else {"n_clients": NUM_HOSPITALS}
    scores = []
    for options in ({}, {"refit": True}, {"algorithm": "fed-round-ht"}):
        ours = cls(density, random_state=seed, **hospitals, **options).fit(train_x, train_y, groups=train_y if uneven else None)
        scores.append((ours.score(test_x, test_y), (ours.bytes_up_ + ours.bytes_down_) / 1000))
    kept = int((ours.coef_ != 0).sum())
    coef, intercept = densest_l1_model(kept, train_x, train_y, num_classes)
    l1 = score(test_x, test_y, coef, intercept, classes)
    refitted = score(test_x, test_y, *refit(train_x, train_y, coef != 0, num_classes), classes)
    return [value for value, _ in scores] + [l1, refitted], kept, [sent for _, sent in scores[:2]]


def main():
    """Print a table in Markdown."""
    warnings.simplefilter("ignore")
    uneven = "--uneven" in sys.argv
    print("| accuracy or R2, 3 splits | weights | sieve | sieve, refitted | fed-round-ht | l1 | l1, refitted | kB, kB with refit |")
    print("|---|---|---|---|---|---|---|---|")
    for name, density in UNEVEN_CELLS if uneven else CELLS:
        found = [compare(name, density, seed, uneven=uneven) for seed in SEEDS]
        values, sent = np.array([each[0] for each in found]), np.mean([each[2] for each in found], axis=0)
        cells = " | ".join(f"{mean:.3f} +- {sd:.3f}" for mean, sd in zip(values.mean(0), values.std(0, ddof=1), strict=True))
        print(f"| {name} | {found[0][1]} | {cells} | {sent[0]:.0f}, {sent[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
