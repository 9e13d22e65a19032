"""What the scikit-learn estimators share: parameters, validation of tables, clients, and training by a simulated federation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from scipy.sparse import csr_matrix
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectorMixin
from sklearn.utils import Tags, check_random_state, column_or_1d
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted, validate_data
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
from fedsieve.runtime.refit import can_refit, require_refit
from fedsieve.runtime.simulate import simulate, single_threaded

DEFAULT_NUM_CLIENTS = 10
MAX_EVALUATED_EXAMPLES = 10_000
"""Maximum number of training examples on which each round is evaluated."""
DIRICHLET_ALPHA = 0.5
"""Dirichlet parameter of the skewed partitions."""
MAX_DENSE_VALUES = 2**25
"""Sparse tables with at most this many values (128 MB) are trained as dense ones, whose clients take their steps together."""
IMPUTE = (
    "from sklearn.impute import SimpleImputer; from sklearn.pipeline import make_pipeline; model = make_pipeline(SimpleImputer(), {model})"
)
ENCODE = (
    "from sklearn.compose import make_column_transformer; from sklearn.pipeline import make_pipeline; from sklearn.preprocessing import "
    "OneHotEncoder; model = make_pipeline(make_column_transformer((OneHotEncoder(), {columns}), remainder='passthrough'), {model})"
)
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
refit : bool or None, default None
    whether the kept weights are fitted to all examples of all clients after the last round: at most 30 messages each way. None: if
    the algorithm allows it (privacy and the paper's recipe do not), but not in `partial_fit`
fit_intercept : bool, default True
    whether to fit one intercept per output, which has no gate and is not counted in the density
standardize : bool, default True
    whether the clients first compute the mean and scale of every feature; the bytes are counted. Which weights are largest depends on
    the units of the features, so they must be comparable. `coef_` is in the units of X. CSR matrices are never standardized
warm_start : bool, default False
    whether `fit` continues from the previous model, for `rounds` more rounds
random_state : int, RandomState or None, default None
    equal ints give equal bits
n_jobs : int or None, default None
    processes that train the clients: None uses one, -1 one per core; the model does not depend on it
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


class SparseFederated(SelectorMixin, BaseEstimator):
    """Base class of the classifier and the regressor, which also select features: `transform` returns those with a weight."""

    def __init__(
        self,
        density: float = 0.5,
        *,
        algorithm: str | BaseAlgorithm = "sieve",
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
        self.density = density
        self.algorithm = algorithm
        self.n_clients = n_clients
        self.partition = partition
        self.participation = participation
        self.rounds = rounds
        self.refit = refit
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.warm_start = warm_start
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose

    def _get_support_mask(self) -> np.ndarray:
        """Return which features have a non-zero weight: what `get_support`, `transform` and `get_feature_names_out` need."""
        check_is_fitted(self)
        return np.asarray((self._dense_coef() != 0).any(axis=0)).reshape(-1)

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
        with name_transformers(X, type(self).__name__):
            X = validate_data(self, X, accept_sparse="csr", reset=False)  # noqa: N806
        coef = self.coef_ if isinstance(self.coef_, csr_matrix) else np.atleast_2d(self.coef_)
        return safe_sparse_dot(X, coef.T, dense_output=True) + self.intercept_

    # Training

    def _validate_table(self, X: Any, y: Any, *, reset: bool = True, **options: Any) -> tuple[Any, Any]:  # noqa: N803
        """Return examples and targets as numbers."""
        with name_transformers(X, type(self).__name__):
            dtypes = [np.float64, np.float32]
            x, y = validate_data(self, X, y, accept_sparse="csr", dtype=dtypes, multi_output=True, reset=reset, **options)
        return x, y

    def _train(
        self,
        x: Matrix,
        y: np.ndarray,
        loss: Loss,
        num_outputs: int,
        groups: Any,
        sample_weight: Any,
        *,
        rounds: int | None = None,
        class_count_bytes: int = 0,
    ) -> None:
        """Divide the examples among clients, standardize, run the rounds, and store the model in the user's units.

        `rounds` is set by `partial_fit`, which continues from the present model. `class_count_bytes` is what each client sends and receives
        before the rounds to agree on the weights of classes.
        """
        self._check_parameters()
        resumes = (self.warm_start or rounds is not None) and hasattr(self, "coef_")
        num_rounds = rounds or self.rounds
        if sample_weight is not None:
            x, y, groups, sample_weight = drop_weightless(x, y, groups, _check_sample_weight(sample_weight, x, ensure_non_negative=True))
        rounds_before = self.n_iter_ if resumes else 0
        seed = derive_key(int(check_random_state(self.random_state).randint(2**31 - 1)), "rounds", rounds_before) >> 1
        num_features: int = x.shape[1]  # pyright: ignore[reportOptionalSubscript]  # SciPy has no stubs
        objective = Linear(loss=loss, num_features=num_features, num_outputs=num_outputs, intercept=self.fit_intercept)
        algorithm = self._build_algorithm(objective)
        refit = rounds is None and can_refit(algorithm, objective) if self.refit is None else self.refit
        if refit:
            require_refit(algorithm, objective)
        order, counts = self._assign_clients(x, y if loss in (Loss.LOGISTIC, Loss.SOFTMAX) else None, groups, seed)
        x, y = x[order], y[order]
        standardizer = standardization.fit_standardizer(
            x, y, counts, scale_features=self.standardize, scale_target=loss is Loss.SQUARED, center=self.fit_intercept
        )
        inputs, targets = standardizer.apply(x, y)
        sample = generator(seed, "measured").permutation(len(y))[:MAX_EVALUATED_EXAMPLES]
        if isinstance(inputs, csr_matrix) and len(y) * num_features <= MAX_DENSE_VALUES:
            inputs = inputs.toarray()
        examples, evaluated = (part if isinstance(part, csr_matrix) else torch.from_numpy(part) for part in (inputs, inputs[sample]))
        targets, evaluated_targets = torch.from_numpy(targets), torch.from_numpy(targets[sample])
        compute_metrics, metric = METRICS_BY_LOSS[loss]
        results = simulate(
            algorithm,
            objective,
            examples,
            targets,
            counts,
            participation=self.participation,
            rounds=num_rounds,
            seed=seed,
            weights=standardizer.to_standardized(self._dense_coef(), self.intercept_ if self.fit_intercept else None) if resumes else None,
            workers="auto" if self.n_jobs == -1 else self.n_jobs or 1,
            refit=refit,
            sample_weights=None if sample_weight is None else sample_weight[order],
        )
        history = self.history_ if resumes else []

        def evaluate(parameters: Tensor) -> dict[str, float]:
            return compute_metrics(objective.predict(parameters, evaluated), evaluated_targets)

        with single_threaded(), ProgressBar(num_rounds, type(self).__name__, "round", quiet=not self.verbose) as bar:
            for measured in measure_rounds(algorithm, results, evaluate):
                history = [*history, measured.metrics | {"round": rounds_before + measured.metrics["round"]}]
                bar.advance(f"{metric} {format_number(measured.metrics[metric])}")
        self.coef_, self.intercept_ = standardizer.to_original(*objective.unflatten(measured.parameters))
        self.history_, self.n_iter_ = history, rounds_before + num_rounds
        bytes_before = self.standardization_bytes_ if resumes else 0
        self.standardization_bytes_ = bytes_before + (standardizer.bytes_each_way + class_count_bytes) * int((counts > 0).sum())
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
        if self.n_jobs is not None and not (isinstance(self.n_jobs, Integral) and (self.n_jobs >= 1 or self.n_jobs == -1)):
            raise ValueError(f"n_jobs is a number of processes, at least 1, or -1 for one per core; got {self.n_jobs!r}")
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


@contextmanager
def name_transformers(table: Any, estimator: str) -> Iterator[None]:
    """Add the transformer that helps to errors about missing values and words in a table."""
    try:
        yield
    except ValueError as error:
        text, model = str(error), f"{estimator}()"
        if text.startswith("Input X contains NaN"):
            raise ValueError(f"Input X contains NaN: fill missing values in first: {IMPUTE.format(model=model)}") from None
        if "could not convert string to float" in text and (columns := word_columns(table)):
            raise ValueError(f"{text}: encode categories first: {ENCODE.format(model=model, columns=columns)}") from None
        raise


def word_columns(table: Any) -> list[Any]:
    """Return the names (of a data frame) or indices of the columns that are not numbers."""
    is_frame, found = hasattr(table, "columns"), []
    for column in table.columns if is_frame else range(np.shape(table)[1]):
        values = table[column] if is_frame else np.asarray(table, dtype=object)[:, column]
        try:
            np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            found.append(column)
    return found


def drop_weightless(x: Matrix, y: np.ndarray, groups: Any, weights: np.ndarray) -> tuple[Matrix, np.ndarray, Any, np.ndarray]:
    """Return the examples with a weight above zero: the others count nowhere, not in the standardization either."""
    kept = weights > 0
    return x[kept], y[kept], None if groups is None else np.asarray(groups)[kept], weights[kept]
