"""The scikit-learn face, by scikit-learn's own checks and by the laws of a sparse federated model."""

import pickle

import numpy as np
import pytest
import sklearn
from jaxtyping import config
from scipy.sparse import csr_matrix, issparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine, make_multilabel_classification
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import SelectFromModel
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from fedsieve import SparseFederatedClassifier, SparseFederatedRegressor
from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.sieve import Sieve
from fedsieve.data.standardization import federated_standardization
from fedsieve.runtime.client_data import draw_weighted_batches

BOTH = [SparseFederatedClassifier, SparseFederatedRegressor]


@pytest.fixture(autouse=True)
def shapes_unchecked():
    """Hundreds of fits: shapes inside them are checked where methods and engines are tested, and would cost eight times the fits."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


REPEATED = "a weight and a repetition are equal on average only: examples are divided among clients and drawn at random"


def random_training(_):
    """The checks that scikit-learn's own stochastic estimators cannot pass either."""
    return {f"check_sample_weight_equivalence_on_{kind}_data": REPEATED for kind in ("dense", "sparse")}


@parametrize_with_checks(
    [SparseFederatedClassifier(n_clients=3, rounds=3), SparseFederatedRegressor(n_clients=3, rounds=3)],
    expected_failed_checks=random_training,
)
def test_the_estimators_pass_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def wine():
    x, y = load_wine(return_X_y=True)
    return x, np.array(["barolo", "grignolino", "barbera"])[y]


def rows_of(cls):
    return load_diabetes(return_X_y=True) if cls is SparseFederatedRegressor else load_breast_cancer(return_X_y=True)


def nonzero(model):
    return int((model.coef_ != 0).sum())


@pytest.mark.parametrize(("density", "kept"), [(0.01, 1), (0.1, 3), (0.29, 11), (1.0, 39)])
def test_exactly_the_density_is_kept_and_at_least_one_weight(density, kept):
    x, y = wine()
    assert nonzero(SparseFederatedClassifier(density, rounds=2, random_state=0).fit(x, y)) == kept


def test_the_intercept_is_kept_and_not_counted():
    x, y = load_diabetes(return_X_y=True)
    model = SparseFederatedRegressor(0.1, rounds=5, random_state=0).fit(x, y)
    assert nonzero(model) == 1 and model.intercept_ == pytest.approx(y.mean(), abs=10)
    assert SparseFederatedRegressor(0.1, rounds=2, fit_intercept=False).fit(x, y).intercept_ == 0


def test_a_dense_model_without_noise_is_least_squares_to_8_bits():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)) * [1, 1000, 1e-3, 1] + [0, 5000, 0, -3]
    y = x @ [1, 0.002, -4000, 0.5] + 7
    model = SparseFederatedRegressor(1.0, n_clients=3, rounds=15, random_state=0).fit(x, y)
    exact = LinearRegression().fit(x, y)
    effect = np.abs(exact.coef_ * x.std(0))
    np.testing.assert_allclose(model.coef_ * x.std(0), exact.coef_ * x.std(0), atol=effect.max() / 127)
    assert model.score(x, y) > 0.9998


def test_units_of_the_features_do_not_matter():
    x, y = wine()
    one = SparseFederatedClassifier(0.2, rounds=5, random_state=0).fit(x, y)
    other = SparseFederatedClassifier(0.2, rounds=5, random_state=0).fit(x * 1024 + 2048, y)
    np.testing.assert_array_equal(one.get_support(), other.get_support())
    np.testing.assert_allclose(one.predict_proba(x), other.predict_proba(x * 1024 + 2048), atol=5e-2)


def test_federated_scales_are_those_of_all_examples_together():
    x = np.random.default_rng(0).normal(size=(50, 3)) * [1, 10, 100] + [0, 1e5, 0]
    x[:, 2] = 4.25
    scales = federated_standardization(x, np.array([20, 0, 29, 1]), center=True)
    np.testing.assert_allclose(scales.mean, x.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(scales.scale, [x[:, 0].std(), x[:, 1].std(), 1.0], rtol=1e-5)


def test_two_classes_have_one_logit_and_more_have_one_each():
    x, y = load_breast_cancer(return_X_y=True)
    two = SparseFederatedClassifier(0.2, rounds=5, random_state=0).fit(x, np.where(y, "benign", "malignant"))
    assert two.coef_.shape == (1, 30) and list(two.classes_) == ["benign", "malignant"]
    assert two.decision_function(x).shape == (569,) and two.predict_proba(x).shape == (569, 2)
    x, y = wine()
    many = SparseFederatedClassifier(0.2, rounds=5, random_state=0).fit(x, y)
    assert many.coef_.shape == (3, 13) and many.intercept_.shape == (3,) and many.score(x, y) > 0.9


@pytest.mark.parametrize("convert", [np.asarray, csr_matrix])
def test_several_labels_are_a_matrix_dense_or_sparse(convert):
    x, y = make_multilabel_classification(n_samples=80, n_features=8, n_classes=3, random_state=0)
    model = SparseFederatedClassifier(0.5, rounds=5, random_state=0).fit(x, convert(y))
    assert model.predict(x).shape == model.predict_proba(x).shape == y.shape and nonzero(model) == 12
    assert (model.predict(x) == y).mean() > 0.7


@pytest.mark.parametrize("max_dense_values", [0, 2**25])
def test_sparse_examples_predict_like_dense_ones(max_dense_values, monkeypatch):
    monkeypatch.setattr("fedsieve.experiments.sparse_federated.MAX_DENSE_VALUES", max_dense_values)
    x, y = load_breast_cancer(return_X_y=True)
    x = MinMaxScaler().fit_transform(x)
    x[x < 0.2] = 0
    model = SparseFederatedClassifier(0.3, n_clients=3, rounds=3, random_state=0).fit(csr_matrix(x), y)
    np.testing.assert_allclose(model.predict_proba(csr_matrix(x)), model.predict_proba(x))
    assert model.score(x, y) > 0.85


@pytest.mark.parametrize("cls", BOTH)
def test_a_seed_repeats_bit_for_bit_and_a_pickle_predicts_the_same(cls):
    x, y = rows_of(cls)
    model = cls(0.2, rounds=3, random_state=3, partition="quantity", participation=0.5).fit(x, y)
    again = clone(model).fit(x, y)
    np.testing.assert_array_equal(model.coef_, again.coef_)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(x), model.predict(x))
    assert cls(0.2, rounds=3, random_state=4).fit(x, y).coef_.tolist() != model.coef_.tolist()


@pytest.mark.parametrize("cls", BOTH)
def test_sparsify_keeps_every_prediction(cls):
    x, y = rows_of(cls)
    model = cls(0.2, rounds=2, random_state=0).fit(x, y)
    before, support = model.predict(x), model.get_support(indices=True)
    assert issparse(model.sparsify().coef_)
    np.testing.assert_allclose(model.predict(x), before)
    np.testing.assert_array_equal(model.get_support(indices=True), support)
    assert model.set_params(warm_start=True).fit(x, y).n_iter_ == 4


def test_warm_start_means_more_rounds():
    x, y = load_diabetes(return_X_y=True)
    model = SparseFederatedRegressor(0.5, rounds=4, warm_start=True, random_state=0).fit(x, y)
    first, up = model.score(x, y), model.bytes_up_
    model.fit(x, y)
    assert model.n_iter_ == len(model.history_) == 8 and [row["round"] for row in model.history_] == [*range(1, 9)]
    assert model.bytes_up_ > up and model.history_[4]["r2"] > first - 0.1
    with pytest.raises(ValueError, match="classes of the previous fit"):
        SparseFederatedClassifier(rounds=1, warm_start=True).fit(x, y > 100).fit(x, y > 100, groups=y > 1).fit(x, np.round(y / 100))


def test_bytes_are_the_sum_of_history_and_standardization():
    x, y = load_diabetes(return_X_y=True)
    model = SparseFederatedRegressor(0.5, rounds=3, n_clients=5).fit(x, y)
    agreeing = 5 * 4 * 2 * (10 + 1)
    assert model.bytes_up_ == agreeing + sum(row["bytes_up"] for row in model.history_)
    plain = SparseFederatedRegressor(0.5, rounds=3, n_clients=5, standardize=False).fit(x, y)
    assert plain.bytes_down_ == 5 * 4 * 2 + sum(row["bytes_down"] for row in plain.history_)


def test_groups_are_the_clients():
    x, y = load_diabetes(return_X_y=True)
    names = np.array(["north", "south", "west"])[np.arange(len(y)) % 3]
    model = SparseFederatedRegressor(0.5, rounds=2).fit(x, y, groups=names)
    assert all(row["cohort"] == [0, 1, 2] for row in model.history_)
    with pytest.raises(ValueError, match="2 are missing, first example 1; fill them in"):
        SparseFederatedRegressor(rounds=1).fit(x[:4], y[:4], groups=["a", None, "b", np.nan])
    with pytest.raises(ValueError, match="n_clients=7 contradicts groups"):
        SparseFederatedRegressor(0.5, rounds=2, n_clients=7).fit(x, y, groups=names)


def test_there_are_never_more_clients_than_examples():
    x, y = load_diabetes(return_X_y=True)
    assert SparseFederatedRegressor(rounds=1, n_clients=50).fit(x[:6], y[:6]).history_[0]["cohort"] == [0, 1, 2, 3, 4, 5]


def test_groups_reach_the_estimator_in_pipelines_and_searches():
    x, y = load_breast_cancer(return_X_y=True)
    groups = np.arange(len(y)) % 6
    with sklearn.config_context(enable_metadata_routing=True):
        model = SparseFederatedClassifier(rounds=2, random_state=0).set_fit_request(groups=True)
        search = GridSearchCV(
            make_pipeline(MinMaxScaler(), model), {"sparsefederatedclassifier__density": [0.05, 0.3]}, cv=GroupKFold(3), refit=True
        ).fit(x, y, groups=groups)
        assert search.best_estimator_[-1].history_[0]["cohort"] == [0, 1, 2, 3, 4, 5]
    assert search.best_score_ > 0.8


def test_pipelines_searches_and_selectors_work_without_routing():
    x, y = wine()
    scores = cross_val_score(make_pipeline(MinMaxScaler(), SparseFederatedClassifier(0.3, rounds=5, random_state=0)), x, y, cv=3)
    assert scores.mean() > 0.85
    search = GridSearchCV(SparseFederatedClassifier(rounds=2, random_state=0), {"algorithm": ["sieve", "fed-avg"]}, cv=2).fit(x, y)
    assert search.best_params_["algorithm"] in ("sieve", "fed-avg")
    chosen = SelectFromModel(SparseFederatedClassifier(0.05, rounds=3, random_state=0), threshold=1e-12).fit(x, y)
    assert 1 <= chosen.transform(x).shape[1] <= 2 or chosen.transform(x).shape[1] == int(chosen.estimator_.get_support().sum())


def test_an_algorithm_object_keeps_its_options():
    x, y = load_diabetes(return_X_y=True)
    model = SparseFederatedRegressor(0.5, algorithm=Sieve(server_learning_rate=1.0, bits=32), rounds=3, random_state=0)
    assert nonzero(clone(model).fit(x, y)) == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"density": 0}, "density is the fraction"),
        ({"density": "half"}, "density is the fraction"),
        ({"participation": 1.5}, "participation is the fraction"),
        ({"rounds": 0}, "rounds must be"),
        ({"n_clients": 2.5}, "n_clients must be"),
        ({"algorithm": "flop"}, "unknown algorithm 'flop'"),
        ({"algorithm": 3}, "unknown algorithm 3"),
        ({"partition": "random"}, "unknown partition 'random'"),
        ({"partition": "label"}, "needs one class per example"),
    ],
)
def test_invalid_parameters_are_refused_with_their_names(wrong, message):
    x, y = load_diabetes(return_X_y=True)
    with pytest.raises(ValueError, match=message):
        SparseFederatedRegressor(**{"rounds": 1, **wrong}).fit(x, y)


def test_before_fit_there_is_no_support():
    with pytest.raises(NotFittedError):
        SparseFederatedRegressor().get_support()


def two_slopes():
    """Examples of two opposite relations, half each."""
    x = np.random.default_rng(0).normal(size=(400, 3))
    first = np.arange(400) % 2 == 0
    return x, np.where(first, x[:, 0], -x[:, 0]), first


def test_a_model_follows_the_examples_with_the_weight():
    x, y, first = two_slopes()
    for weight in (first * 1.0, ~first * 1.0, np.where(first, 3.0, 1.0)):
        model = SparseFederatedRegressor(1.0, rounds=20, random_state=0).fit(x, y, sample_weight=weight)
        exact = LinearRegression().fit(x, y, sample_weight=weight).coef_
        np.testing.assert_allclose(model.coef_, exact, atol=0.08)
        assert np.abs(LinearRegression().fit(x, y).coef_ - exact)[0] > 0.3, "a model without weights would differ"


def test_clients_count_by_the_weight_of_their_examples():
    x, y, first = two_slopes()
    weights, options = np.where(first, 9.0, 1.0), {"rounds": 20, "random_state": 0}
    heavy = Sieve(client_weighting="examples")
    model = SparseFederatedRegressor(1.0, algorithm=heavy, **options).fit(x, y, groups=first, sample_weight=weights)
    assert model.coef_[0] == pytest.approx(0.8, abs=0.15)


def test_an_example_occurs_in_proportion_to_its_weight():
    weights = np.array([1.0, 2.0, 0.5, 4.5])
    drawn = np.bincount(draw_weighted_batches(1, 2, 3, weights, 16, 5).reshape(-1), minlength=4)
    assert drawn.sum() == 80 and (np.abs(drawn - 80 * weights / 8) <= 1).all()


def test_class_weight_moves_the_decision():
    x, y = load_breast_cancer(return_X_y=True)
    often = [
        SparseFederatedClassifier(0.2, rounds=10, random_state=0, class_weight=w).fit(x, y).predict(x).mean() for w in ({0: 9}, {1: 9})
    ]
    assert often[0] < y.mean() < often[1]
    balanced = SparseFederatedClassifier(0.2, rounds=2, random_state=0, class_weight="balanced").fit(x, y)
    plain = SparseFederatedClassifier(0.2, rounds=2, random_state=0).fit(x, y)
    assert balanced.standardization_bytes_ == plain.standardization_bytes_ + 10 * 4


def test_weights_are_refused_where_they_would_not_count():
    x, y, first = two_slopes()
    with pytest.raises(ValueError, match="need mini-batches"):
        SparseFederatedRegressor(rounds=1, algorithm=Sieve(batch_size="all")).fit(x, y, sample_weight=first + 1.0)
    with pytest.raises(ValueError, match="non-zero"):
        SparseFederatedRegressor().fit(x, y, sample_weight=np.zeros(len(x)))


@pytest.mark.parametrize("intercept", [True, False])
def test_several_targets_share_the_density(intercept):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5))
    y = np.stack((2 * x[:, 0], 100 * x[:, 1] - 100 * x[:, 2]), axis=1) + intercept * np.array([3, -500])
    model = SparseFederatedRegressor(0.3, rounds=15, fit_intercept=intercept, random_state=0).fit(x, y)
    assert model.coef_.shape == (2, 5) and np.array_equal(model.coef_ != 0, [[1, 0, 0, 0, 0], [0, 1, 1, 0, 0]])
    assert model.predict(x).shape == y.shape and model.score(x, y) > 0.98
    assert model.history_[-1]["r2"] == pytest.approx(model.score(x, y), abs=1e-3)


def test_the_estimator_selects_features_with_their_names():
    x, y = load_diabetes(return_X_y=True)
    names = np.array(load_diabetes().feature_names, dtype=object)
    model = SparseFederatedRegressor(0.3, rounds=3, random_state=0).fit(x, y)
    np.testing.assert_array_equal(model.transform(x), x[:, model.get_support()])
    assert list(model.get_feature_names_out(names)) == list(names[model.get_support()])
    chain = make_pipeline(SparseFederatedRegressor(0.3, rounds=3, random_state=0), LinearRegression()).fit(x, y)
    assert chain[-1].coef_.shape == (3,)


@pytest.mark.parametrize("target", ["two", "many", "labels"])
def test_log_probabilities_are_those_of_the_probabilities(target):
    x, y = wine()
    y = {"two": y == "barolo", "many": y, "labels": np.stack((y == "barolo", y == "barbera"), axis=1).astype(int)}[target]
    model = SparseFederatedClassifier(0.3, rounds=2, random_state=0).fit(x, y)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(x)), model.predict_proba(x), rtol=1e-6)


def test_partial_fit_continues_with_other_examples():
    x, y = wine()
    model = SparseFederatedClassifier(0.3, random_state=0)
    with pytest.raises(ValueError, match="needs classes"):
        model.partial_fit(x[:50], y[:50])
    for part in np.array_split(np.random.default_rng(0).permutation(len(y)), 6):
        model.partial_fit(x[part], y[part], classes=np.unique(y))
    assert model.n_iter_ == len(model.history_) == 6 and model.score(x, y) > 0.85 and nonzero(model) == 11
    with pytest.raises(ValueError, match="not among those of the first call"):
        model.partial_fit(x, np.where(y == "barolo", "rioja", y))
    with pytest.raises(ValueError, match="fixed by the first call"):
        model.partial_fit(x, y, classes=["barolo", "rioja"])


def test_a_refit_is_the_model_of_all_examples_on_the_same_features():
    x, y = load_diabetes(return_X_y=True)
    plain, refitted = (SparseFederatedRegressor(0.3, rounds=5, refit=refit, random_state=0).fit(x, y) for refit in (False, True))
    kept = plain.get_support()
    assert np.array_equal(kept, refitted.get_support())
    np.testing.assert_allclose(refitted.coef_[kept], LinearRegression().fit(x[:, kept], y).coef_, rtol=0.05)
    assert plain.bytes_up_ < refitted.bytes_up_ < plain.bytes_up_ + 10 * 30 * (4 * 4 + 40)


def test_a_refit_counts_examples_by_their_weight():
    x, y = load_diabetes(return_X_y=True)
    for weights in (np.where(y > 150, 5.0, 1.0), np.random.default_rng(0).exponential(size=len(y)) * y):
        model = SparseFederatedRegressor(0.3, rounds=3, random_state=0).fit(x, y, sample_weight=weights)
        kept = model.get_support()
        exact = LinearRegression().fit(x[:, kept], y, weights).coef_
        np.testing.assert_allclose(model.coef_[kept], exact, rtol=0.05)
        assert np.abs(LinearRegression().fit(x[:, kept], y).coef_ / exact - 1).max() > 0.1, "a model without weights would differ"


def test_the_refit_is_the_default_where_it_can_be_and_not_in_partial_fit():
    x, y = load_breast_cancer(return_X_y=True)
    sent = {
        refit: SparseFederatedClassifier(0.1, rounds=2, refit=refit, random_state=0).fit(x, y).bytes_up_ for refit in (None, True, False)
    }
    assert sent[None] == sent[True] > sent[False]
    published = algorithm_class("flops-pa")(recipe="paper")
    plain, default = (
        SparseFederatedClassifier(0.1, rounds=1, algorithm=published, refit=refit, random_state=0).fit(x, y).bytes_up_
        for refit in (False, None)
    )
    assert plain == default
    one = SparseFederatedClassifier(0.1, rounds=1, refit=False, random_state=0).fit(x, y)
    assert SparseFederatedClassifier(0.1, random_state=0).partial_fit(x, y, classes=[0, 1]).bytes_up_ == one.bytes_up_


def test_errors_about_words_and_gaps_contain_a_line_that_runs():
    x, y = load_diabetes(return_X_y=True)
    gaps, words = np.where(x > 0.15, np.nan, x), np.column_stack((x.astype(object), np.where(x[:, 0] > 0, "a", "b")))
    for table in (gaps, words):
        with pytest.raises(ValueError, match="make_pipeline") as caught:
            SparseFederatedRegressor(rounds=2).fit(table, y)
        names = {"SparseFederatedRegressor": SparseFederatedRegressor}
        exec(str(caught.value).rpartition("first: ")[2], names)
        assert names["model"].set_params(sparsefederatedregressor__rounds=2).fit(table, y).predict(table).shape == (442,)
    assert "[10]" in str(caught.value), "the column of words"
    with pytest.raises(ValueError, match="make_pipeline"):
        SparseFederatedRegressor(rounds=2).fit(x, y).predict(gaps)


def test_verbose_shows_progress_and_the_default_is_silent(capsys):
    x, y = load_diabetes(return_X_y=True)
    SparseFederatedRegressor(rounds=2).fit(x, y)
    assert capsys.readouterr().err == ""
    SparseFederatedRegressor(rounds=2, verbose=1).fit(x, y)
    assert "round 2 of 2" in capsys.readouterr().err
