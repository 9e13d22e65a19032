"""`python -m benchmarks.estimators`: the estimators on eight hospitals and scikit-learn's l1 models on all examples in one place.

Both have the same number of non-zero weights: the l1 model is the densest with at most as many. "Refitted" models have the same features
and weights that are fitted again: what the option `refit` computes over the federation, and for the l1 model without its l1 penalty.
A quarter of the examples is held out; hospitals have random examples, or those of one class each.

Each split is a row of docs/data/estimators.csv; rows that it has are not computed again. Then the tables of docs/python.md are written.
"""

import warnings
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine, make_classification
from sklearn.linear_model import Lasso, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from benchmarks.stored_rows import DOCS, compute_rows, read_rows, write_section
from fedsieve import SparseFederatedClassifier, SparseFederatedRegressor

DATASETS = {"breast_cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits, "diabetes": load_diabetes}
CELLS = [
    *((name, density) for name in ("diabetes", "wine", "breast_cancer", "digits") for density in (0.1, 0.3, 0.5)),
    ("generated classes", 0.2),
    ("generated numbers", 0.2),
]
UNEVEN_CELLS = [("wine", 0.1), ("wine", 0.3), ("generated classes", 0.2), ("digits", 0.1)]
KEYS = ("table", "density", "hospitals", "split")
MODELS = ("sieve", "sieve, refitted", "fed-round-ht", "fed-round-ht, refitted", "l1", "l1, refitted")
DATA, PAGE = DOCS / "data" / "estimators.csv", DOCS / "python.md"
SPLITS = range(100, 103)
NUM_HOSPITALS = 8
EVEN, ONE_CLASS = "random", "one class each"
SECTIONS = {"estimators": EVEN, "uneven-estimators": ONE_CLASS}
"""Tables of the page, and the hospitals that they are about."""
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

    found = minimize(loss_and_gradient, np.zeros(size + len(mask)), jac=True, method="L-BFGS-B", options={"maxiter": 300, "gtol": 1e-4}).x
    coef[mask] = found[:size]
    return coef, found[size:]


def score(x, y, coef, intercept, classes):
    """Return the accuracy, or R2 if there are no classes."""
    outputs = x @ coef.T + intercept
    if classes is None:
        return 1 - ((y - outputs[:, 0]) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    return (classes[(outputs[:, 0] > 0).astype(int) if len(coef) == 1 else outputs.argmax(1)] == y).mean()


class Split(NamedTuple):
    """Standardized training and test examples of a split; `classes` is None for numbers."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: np.ndarray | None

    @property
    def num_classes(self):
        """The number of classes, or None."""
        return None if self.classes is None else len(self.classes)

    def scores(self, model):
        """Return the held-out scores of coefficients and intercepts, as they are and refitted."""
        models = (model, refit(*self.train, model[0] != 0, self.num_classes))
        return [f"{score(*self.test, *each, self.classes):.4f}" for each in models]


def make_split(name, seed):
    """Return the split of a table with this seed."""
    x, y = load(name)
    classes = None if name in ("diabetes", "generated numbers") else np.unique(y)
    train_x, test_x, train_y, test_y = train_test_split(x, y, random_state=seed, stratify=None if classes is None else y)
    scaler = StandardScaler().fit(train_x)
    return Split((scaler.transform(train_x), train_y), (scaler.transform(test_x), test_y), classes)


def train_estimator(split, density, hospitals, seed, algorithm):
    """Return coefficients and intercepts of an estimator without its refit."""
    cls = SparseFederatedRegressor if split.classes is None else SparseFederatedClassifier
    num_clients, groups = (None, split.train[1]) if hospitals == ONE_CLASS else (NUM_HOSPITALS, None)
    model = cls(density, algorithm=algorithm, random_state=seed, n_clients=num_clients, refit=False).fit(*split.train, groups=groups)
    return np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)


def compare(name, density, hospitals, seed):
    """Return the row of one split: weights kept, and held-out scores of our models and of the l1 models."""
    split = make_split(name, seed)
    models = [train_estimator(split, density, hospitals, seed, algorithm) for algorithm in ("sieve", "fed-round-ht")]
    kept = int((models[0][0] != 0).sum())
    models.append(densest_l1_model(kept, *split.train, split.num_classes))
    return {"weights": kept} | dict(zip(MODELS, [value for model in models for value in split.scores(model)], strict=True))


def summarize(rows):
    """Return for each cell its mean scores, and the mean difference of our models to "l1, refitted" with its standard error."""
    cells = []
    for key in dict.fromkeys((row["table"], row["density"]) for row in rows):
        found = [row for row in rows if (row["table"], row["density"]) == key]
        scores = {model: np.array([float(row[model]) for row in found]) for model in MODELS}
        differences = {model: scores[model] - scores[MODELS[-1]] for model in MODELS[:4]}
        errors = {model: (each.mean(), each.std(ddof=1) / np.sqrt(len(each))) for model, each in differences.items()}
        cells.append((*key, {model: each.mean() for model, each in scores.items()}, errors))
    return cells


def count_level_or_above(rows, model):
    """Return the number of cells in which a model is at most one standard error below "l1, refitted"."""
    return sum(mean >= -error - 1e-9 for *_, errors in summarize(rows) for name, (mean, error) in errors.items() if name == model)


def results_table(rows):
    """Return the table of one kind of hospitals in Markdown: mean scores; our models in bold if they are behind "l1, refitted"."""
    lines = ["| held-out accuracy, or R2 | density | " + " | ".join(MODELS) + " |", "|" + "---|" * 8]
    for name, density, scores, errors in summarize(rows):
        behind = {model for model, (mean, error) in errors.items() if mean < -error - 1e-9}
        cells = [f"**{value:.3f}**" if model in behind else f"{value:.3f}" for model, value in scores.items()]
        lines.append(f"| {name.replace('_', ' ')} | {density} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Compute the rows that are missing, and write the tables."""
    warnings.simplefilter("ignore")
    places = [(*cell, EVEN) for cell in CELLS] + [(*cell, ONE_CLASS) for cell in UNEVEN_CELLS]
    compute_rows(DATA, KEYS, [(*place, split) for split in SPLITS for place in places], compare)
    rows = read_rows(DATA)
    for section, hospitals in SECTIONS.items():
        write_section(PAGE, section, results_table([row for row in rows if row["hospitals"] == hospitals]))
    for model in MODELS[:4]:
        print(model, [count_level_or_above([row for row in rows if row["hospitals"] == each], model) for each in SECTIONS.values()])


if __name__ == "__main__":
    main()
