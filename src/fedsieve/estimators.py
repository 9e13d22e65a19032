"""scikit-learn estimators: sparse linear models trained by a simulated federation."""

from dataclasses import replace
from inspect import cleandoc
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, check_random_state, column_or_1d
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from torch import Tensor

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.random import derive_key, generator
from fedsieve.data import standardization
from fedsieve.data.federated_dataset import Matrix, PartitionSpec, partition_indices
from fedsieve.data.partition import Partition
from fedsieve.formatting import ProgressBar, format_number
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.runtime.evaluation import measure_rounds
from fedsieve.runtime.metrics import METRICS_BY_LOSS
from fedsieve.runtime.simulate import simulate, single_threaded

DEFAULT_NUM_CLIENTS = 10
MAX_EVALUATED_EXAMPLES = 10_000
"""Maximum number of training examples on which each round is evaluated."""
DIRICHLET_ALPHA = 0.5
"""Dirichlet parameter of the skewed partitions."""
PARAMETERS = """density : float, default 0.5
    fraction of the weights that may be non-zero
algorithm : str or BaseAlgorithm, default "sieve"
    the algorithm, by name or as an object with your options, such as `Sieve(local_steps=20)`
n_clients : int, default 10
    number of clients among which the examples are divided if `fit` gets no groups; at most one per example
partition : {"iid", "quantity", "label", "clusters"}, default "iid"
    how the examples are divided if `fit` gets no groups; skewed partitions follow a Dirichlet(0.5)
participation : float, default 1.0
    fraction of clients in each round
rounds : int, default 50
    number of rounds
fit_intercept : bool, default True
    whether to fit one intercept per output, which has no gate and is not counted in the density
standardize : bool, default True
    whether the clients first compute the mean and scale of every feature; the bytes are counted. Which weights are largest depends on
    the units of the features, so they must be comparable. `coef_` is in the units of X. CSR matrices are never standardized
warm_start : bool, default False
    whether `fit` continues from the previous model, for `rounds` more rounds
random_state : int, RandomState or None, default None
    equal ints give equal bits
verbose : int, default 0
    show progress on standard error if above 0"""
ATTRIBUTES = """n_iter_ : int
    number of rounds trained
history_ : list of dict
    metrics of each round: quality on at most 10,000 training examples, densities, bytes, cohort
bytes_up_, bytes_down_ : int
    bytes that clients sent and received, including standardization
n_features_in_, feature_names_in_
    as in every scikit-learn estimator"""


class SparseFederated(BaseEstimator):
    """Base class of the classifier and the regressor."""

    def __init__(
        self,
        density: float = 0.5,
        *,
        algorithm: str | BaseAlgorithm = "sieve",
        n_clients: int | None = None,
        partition: str | None = None,
        participation: float = 1.0,
        rounds: int = 50,
        fit_intercept: bool = True,
        standardize: bool = True,
        warm_start: bool = False,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.density = density
        self.algorithm = algorithm
        self.n_clients = n_clients
        self.partition = partition
        self.participation = participation
        self.rounds = rounds
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    def get_support(self, indices: bool = False) -> np.ndarray:
        """Return the features with a non-zero weight, as a mask or as indices."""
        check_is_fitted(self)
        mask = np.asarray((self._dense_coef() != 0).any(axis=0)).reshape(-1)
        return np.flatnonzero(mask) if indices else mask

    def sparsify(self) -> Self:
        """Convert `coef_` to a SciPy CSR matrix: less memory, and faster predictions if few weights are kept."""
        check_is_fitted(self)
        self.coef_ = csr_matrix(self.coef_)
        return self

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # Prediction

    def _dense_coef(self) -> np.ndarray:
        """Return `coef_` as a dense array (outputs, features)."""
        return self.coef_.toarray() if isinstance(self.coef_, csr_matrix) else np.atleast_2d(self.coef_)

    def _linear_outputs(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the outputs of the linear model (examples, outputs)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", reset=False)  # noqa: N806
        coef = self.coef_ if isinstance(self.coef_, csr_matrix) else np.atleast_2d(self.coef_)
        return safe_sparse_dot(X, coef.T, dense_output=True) + self.intercept_

    # Training

    def _train(self, x: Matrix, y: np.ndarray, loss: Loss, num_outputs: int, groups: Any) -> None:
        """Divide the examples among clients, standardize, run the rounds, and store the model in the user's units."""
        self._check_parameters()
        resumes = self.warm_start and hasattr(self, "coef_")
        rounds_before = self.n_iter_ if resumes else 0
        seed = derive_key(int(check_random_state(self.random_state).randint(2**31 - 1)), "rounds", rounds_before) >> 1
        num_features: int = x.shape[1]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
        objective = Linear(loss=loss, num_features=num_features, num_outputs=num_outputs, intercept=self.fit_intercept)
        algorithm = self._build_algorithm(objective)
        order, counts = self._assign_clients(x, y if loss in (Loss.LOGISTIC, Loss.SOFTMAX) else None, groups, seed)
        x, y = x[order], y[order]
        standardizer = standardization.fit_standardizer(
            x, y, counts, scale_features=self.standardize, scale_target=loss is Loss.SQUARED, center=self.fit_intercept
        )
        inputs, targets = standardizer.apply(x, y)
        sample = generator(seed, "measured").permutation(len(y))[:MAX_EVALUATED_EXAMPLES]
        examples, evaluated = (part if isinstance(part, csr_matrix) else torch.from_numpy(part) for part in (inputs, inputs[sample]))
        targets, evaluated_targets = torch.from_numpy(targets), torch.from_numpy(targets[sample])
        compute_metrics, metric = METRICS_BY_LOSS[loss]
        rounds = simulate(
            algorithm,
            objective,
            examples,
            targets,
            counts,
            participation=self.participation,
            rounds=self.rounds,
            seed=seed,
            weights=standardizer.to_standardized(self._dense_coef(), self.intercept_ if self.fit_intercept else None) if resumes else None,
        )
        history = self.history_ if resumes else []

        def evaluate(parameters: Tensor) -> dict[str, float]:
            return compute_metrics(objective.predict(parameters, evaluated), evaluated_targets)

        with single_threaded(), ProgressBar(self.rounds, type(self).__name__, "round", quiet=not self.verbose) as bar:
            for measured in measure_rounds(algorithm, rounds, evaluate):
                history = [*history, measured.metrics | {"round": rounds_before + measured.metrics["round"]}]
                bar.advance(f"{metric} {format_number(measured.metrics[metric])}")
        self.coef_, self.intercept_ = standardizer.to_original(*objective.unflatten(measured.parameters))
        self.history_, self.n_iter_ = history, rounds_before + self.rounds
        bytes_before = self.standardization_bytes_ if resumes else 0
        self.standardization_bytes_ = bytes_before + standardizer.bytes_each_way * int((counts > 0).sum())
        self.bytes_up_, self.bytes_down_ = (
            self.standardization_bytes_ + sum(row[f"bytes_{direction}"] for row in history) for direction in ("up", "down")
        )

    def _check_parameters(self) -> None:
        """Validate the constructor's arguments."""
        if not (isinstance(self.density, Real) and 0 < self.density <= 1):
            raise ValueError(f"density is the fraction of weights kept, above 0 and at most 1; got {self.density!r}")
        if not (isinstance(self.participation, Real) and 0 < self.participation <= 1):
            raise ValueError(f"participation is the fraction of clients in a round, above 0 and at most 1; got {self.participation!r}")
        for name, value in (("rounds", self.rounds), ("n_clients", 1 if self.n_clients is None else self.n_clients)):
            if not (isinstance(value, Integral) and value >= 1):
                raise ValueError(f"{name} must be a whole number, at least 1; got {value!r}")
        if not isinstance(self.algorithm, BaseAlgorithm) and self.algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {self.algorithm!r}; there are {', '.join(ALGORITHMS)}")
        if self.partition is not None and self.partition not in list(Partition):
            raise ValueError(f"unknown partition {self.partition!r}; there are {', '.join(Partition)}")

    def _build_algorithm(self, objective: Linear) -> BaseAlgorithm:
        """Return the algorithm, which keeps max(1, floor(density p)) weights; a named one has the defaults for user data."""
        weights = objective.layout.num_gated
        density = self.density if floor_of_decimal(self.density, weights) else min(1.5 / weights, 1.0)
        if isinstance(self.algorithm, BaseAlgorithm):
            return replace(self.algorithm, density=density)
        cls = algorithm_class(self.algorithm)
        return cls(density=density)

    def _assign_clients(self, x: Matrix, labels: np.ndarray | None, groups: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the examples by client, and the number of examples of each client."""
        if groups is None:
            partition = Partition(self.partition or Partition.IID)
            if partition is Partition.LABEL and labels is None:
                raise ValueError(
                    "partition 'label' needs one class per example, which this target does not have; use 'quantity', 'iid' or 'clusters'"
                )
            num_examples: int = x.shape[0]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
            clients = min(self.n_clients or DEFAULT_NUM_CLIENTS, num_examples)
            parts = partition_indices(x, labels, PartitionSpec(clients, partition, DIRICHLET_ALPHA), generator(seed, "partition"))
            return np.concatenate(parts), np.array([len(part) for part in parts])
        for name in ("n_clients", "partition"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} contradicts groups, which assigns each example to a client; leave one of them out"
                )
        groups = column_or_1d(groups)
        check_consistent_length(x, groups)
        missing = [index for index, group in enumerate(groups) if group is None or group != group]  # NaN differs from itself
        if missing:
            raise ValueError(
                f"groups must name a client for each example; {len(missing)} are missing, first example {missing[0]}; fill them in"
            )
        _, client = np.unique(groups, return_inverse=True)
        return np.argsort(client, kind="stable"), np.bincount(client)


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

    __doc__ = cleandoc(__doc__ or "").replace("PARAMETERS", PARAMETERS).replace("ATTRIBUTES", ATTRIBUTES)

    def fit(self, X: Any, y: Any, groups: Any = None, **others: Any) -> Self:  # noqa: N803
        """Train on examples X with classes or 0/1 labels y; `groups` names the client of each example."""
        reject_fit_arguments(others)
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], multi_output=True)  # noqa: N806
        check_classification_targets(y)
        kind = type_of_target(y)
        if kind == "multilabel-indicator":
            target = (y.toarray() if issparse(y) else np.asarray(y)).astype(np.float32)
            classes, loss, outputs = np.arange(target.shape[1]), Loss.MULTILABEL, target.shape[1]
        elif kind == "multiclass-multioutput":
            raise ValueError("y has several columns of classes; use one class per example, or a 0/1 column for each label")
        else:
            classes, target = np.unique(column_or_1d(y, warn=True), return_inverse=True)
            if len(classes) < 2:
                raise ValueError(f"y has only one class, {classes[0]!r}; a classifier needs at least two")
            loss, outputs = (Loss.LOGISTIC, 1) if len(classes) == 2 else (Loss.SOFTMAX, len(classes))
            target = target.astype(np.float32 if loss is Loss.LOGISTIC else np.int64)
        if self.warm_start and hasattr(self, "classes_") and not np.array_equal(classes, self.classes_):
            raise ValueError("warm_start needs the classes of the previous fit; y has others")
        self.classes_, self._loss = classes, loss
        self._train(X, target, loss, outputs, groups)
        return self

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

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class SparseFederatedRegressor(RegressorMixin, SparseFederated):
    """Linear regression with exactly max(1, floor(density p)) weights.

    The examples belong to `n_clients` simulated clients, or to the clients that `groups` names in `fit`. Messages are encoded, and
    their bytes counted.

    Parameters
    ----------
    PARAMETERS

    Attributes
    ----------
    coef_ : (features,)
        weights; all but max(1, floor(density p)) are zero
    intercept_ : float
        intercepts, without gates and not counted
    ATTRIBUTES
    """

    __doc__ = cleandoc(__doc__ or "").replace("PARAMETERS", PARAMETERS).replace("ATTRIBUTES", ATTRIBUTES)

    def fit(self, X: Any, y: Any, groups: Any = None, **others: Any) -> Self:  # noqa: N803
        """Train on examples X with targets y; `groups` names the client of each example."""
        reject_fit_arguments(others)
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], y_numeric=True)  # noqa: N806
        self._train(X, y.astype(np.float64), Loss.SQUARED, 1, groups)
        assert isinstance(self.intercept_, np.ndarray)
        self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])
        return self

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the predicted target of each example."""
        return self._linear_outputs(X)[:, 0]


def reject_fit_arguments(arguments: dict[str, Any]) -> None:
    """Refuse sample_weight and unknown arguments of fit."""
    if "sample_weight" in arguments:
        raise TypeError(
            "fit takes no sample_weight, because clients draw whole examples into batches; repeat the examples that should count more"
        )
    if arguments:
        raise TypeError(f"fit takes X, y and groups; got {', '.join(arguments)} as well")
