"""scikit-learn estimators: sparse linear models trained by a simulated federation."""

from inspect import cleandoc
from typing import Any, Self

import numpy as np
from scipy.sparse import issparse
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.data.federated_dataset import Matrix
from fedsieve.experiments.sparse_federated import ATTRIBUTES, PARAMETERS, SparseFederated
from fedsieve.objectives.linear import Loss

CLASS_WEIGHT = """class_weight : dict, "balanced" or None, default None
    weight of each class, by which examples count in addition to `sample_weight`; "balanced" makes all classes count equally"""


class SparseFederatedClassifier(ClassifierMixin, SparseFederated):
    """A linear classifier of two classes, many classes or many labels, with exactly max(1, floor(density p)) weights.

    Two classes have one logit, more classes a softmax; a 0/1 matrix as target means several labels per example. The examples belong to
    `n_clients` simulated clients, or to the clients that `groups` names in `fit`. Messages are encoded, and their bytes counted.

    Parameters
    ----------
    PARAMETERS

    Attributes
    ----------
    coef_ : (1, features) for two classes, (classes, features), or (labels, features)
        weights; all but max(1, floor(density p)) are zero
    intercept_ : (1,), (classes,) or (labels,)
        intercepts, without gates and not counted
    classes_ : (classes,)
        class labels; for several labels, their indices
    ATTRIBUTES
    """

    __doc__ = cleandoc(__doc__ or "").replace("PARAMETERS", f"{PARAMETERS}\n{CLASS_WEIGHT}").replace("ATTRIBUTES", ATTRIBUTES)

    def __init__(
        self,
        density: float = 0.5,
        *,
        algorithm: str | BaseAlgorithm = "sieve",
        class_weight: dict[Any, float] | str | None = None,
        n_clients: int | None = None,
        partition: str | None = None,
        participation: float = 1.0,
        rounds: int = 50,
        refit: bool | None = None,
        fit_intercept: bool = True,
        standardize: bool = True,
        warm_start: bool = False,
        random_state: int | np.random.RandomState | None = None,
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            density,
            algorithm=algorithm,
            n_clients=n_clients,
            partition=partition,
            participation=participation,
            rounds=rounds,
            refit=refit,
            fit_intercept=fit_intercept,
            standardize=standardize,
            warm_start=warm_start,
            random_state=random_state,
            n_jobs=n_jobs,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on examples X with classes or 0/1 labels y; `groups` names the client of each example."""
        X, y = self._validate_table(X, y)  # noqa: N806
        check_classification_targets(y)
        classes = find_classes(y)
        if self.warm_start and hasattr(self, "classes_") and not np.array_equal(classes, self.classes_):
            raise ValueError("warm_start needs the classes of the previous fit; y has others")
        self._train_classes(X, y, classes, groups, sample_weight)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, groups: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train for one more round on these examples; the first call needs `classes`, all classes that will occur."""
        is_first = not hasattr(self, "classes_")
        X, y = self._validate_table(X, y, reset=is_first)  # noqa: N806
        check_classification_targets(y)
        if is_first and classes is None:
            raise ValueError("the first call of partial_fit needs classes, all classes that will occur: classes=np.unique(y)")
        known = self.classes_ if classes is None else np.unique(classes)
        if len(known) < 2:
            raise ValueError(f"classes has only one class, {known[0]!r}; a classifier needs at least two")
        if not is_first and not np.array_equal(known, self.classes_):
            raise ValueError("classes are fixed by the first call of partial_fit, and these are others; leave them out")
        if others := sorted(set(np.unique(y)) - set(known)) if np.ndim(y) == 1 else []:
            raise ValueError(f"y has classes that are not among those of the first call of partial_fit: {', '.join(map(repr, others))}")
        self._train_classes(X, y, known, groups, sample_weight, rounds=1)
        return self

    def _train_classes(self, x: Matrix, y: Any, classes: np.ndarray, groups: Any, sample_weight: Any, rounds: int | None = None) -> None:
        """Train on targets as numbers: 0/1 for each label or for the second of two classes, or indices of classes."""
        if type_of_target(y) == "multilabel-indicator":
            target, loss = (y.toarray() if issparse(y) else np.asarray(y)).astype(np.float32), Loss.MULTILABEL
        else:
            y = column_or_1d(y, warn=True)
            loss = Loss.LOGISTIC if len(classes) == 2 else Loss.SOFTMAX
            target = np.searchsorted(classes, y).astype(np.float32 if loss is Loss.LOGISTIC else np.int64)
        if self.class_weight is not None:
            weights = compute_sample_weight(self.class_weight, y)
            sample_weight = weights if sample_weight is None else weights * _check_sample_weight(sample_weight, x)
        self.classes_, self._loss = classes, loss
        num_outputs = 1 if loss is Loss.LOGISTIC else len(classes)
        count_bytes = 4 * num_outputs if self.class_weight == "balanced" else 0
        self._train(x, target, loss, num_outputs, groups, sample_weight, rounds=rounds, class_count_bytes=count_bytes)

    def decision_function(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return logits: (examples,) for two classes, else (examples, classes) or (examples, labels)."""
        logits = self._linear_outputs(X)
        return logits[:, 0] if self._loss is Loss.LOGISTIC else logits

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the most likely class of each example; for several labels, a 0/1 matrix."""
        logits = self.decision_function(X)
        if self._loss is Loss.MULTILABEL:
            return (logits > 0).astype(np.int64)
        return self.classes_[(logits > 0).astype(np.int64) if logits.ndim == 1 else logits.argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the probabilities of the classes, or of each label."""
        logits = self.decision_function(X)
        if self._loss is Loss.MULTILABEL:
            return expit(logits)
        return np.stack((expit(-logits), expit(logits)), axis=1) if logits.ndim == 1 else softmax(logits, axis=1)

    def predict_log_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the logarithms of the probabilities of the classes, or of each label."""
        logits = self.decision_function(X)
        if self._loss is Loss.MULTILABEL:
            return log_expit(logits)
        return np.stack((log_expit(-logits), log_expit(logits)), axis=1) if logits.ndim == 1 else log_softmax(logits, axis=1)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class SparseFederatedRegressor(RegressorMixin, SparseFederated):
    """Linear regression of one or several targets with exactly max(1, floor(density p)) weights.

    The examples belong to `n_clients` simulated clients, or to the clients that `groups` names in `fit`. Messages are encoded, and
    their bytes counted.

    Parameters
    ----------
    PARAMETERS

    Attributes
    ----------
    coef_ : (features,), or (targets, features)
        weights; all but max(1, floor(density p)) are zero
    intercept_ : float, or (targets,)
        intercepts, without gates and not counted
    ATTRIBUTES
    """

    __doc__ = cleandoc(__doc__ or "").replace("PARAMETERS", PARAMETERS).replace("ATTRIBUTES", ATTRIBUTES)

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train on examples X with one or several targets y; `groups` names the client of each example."""
        X, y = self._validate_table(X, y, y_numeric=True)  # noqa: N806
        self._train_targets(X, y, groups, sample_weight)
        return self

    def partial_fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train for one more round on these examples, from the present model."""
        X, y = self._validate_table(X, y, y_numeric=True, reset=not hasattr(self, "coef_"))  # noqa: N806
        self._train_targets(X, y, groups, sample_weight, rounds=1)
        return self

    def _train_targets(self, x: Matrix, y: np.ndarray, groups: Any, sample_weight: Any, rounds: int | None = None) -> None:
        """Train, and give the coefficients of one target the shapes of scikit-learn: (features,) and a number."""
        target = np.asarray(y, dtype=np.float64)
        target = target[:, 0] if target.shape[1:] == (1,) else target
        self._train(x, target, Loss.SQUARED, 1 if target.ndim == 1 else target.shape[1], groups, sample_weight, rounds=rounds)
        assert isinstance(self.intercept_, np.ndarray)
        if target.ndim == 1:
            self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the predicted targets of each example."""
        outputs = self._linear_outputs(X)
        return outputs[:, 0] if np.ndim(self.intercept_) == 0 else outputs

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def find_classes(y: Any) -> np.ndarray:
    """Return the classes of a target; of a 0/1 matrix the numbers of its labels."""
    kind = type_of_target(y)
    if kind == "multilabel-indicator":
        return np.arange(y.shape[1])
    if kind == "multiclass-multioutput":
        raise ValueError("y has several columns of classes; use one class per example, or a 0/1 column for each label")
    classes = np.unique(column_or_1d(y))
    if len(classes) < 2:
        raise ValueError(f"y has only one class, {classes[0]!r}; a classifier needs at least two")
    return classes
