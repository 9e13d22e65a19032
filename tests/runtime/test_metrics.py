import numpy as np
import pytest
import torch
from sklearn import metrics as oracle

from fedsieve.objectives.losses import Loss
from fedsieve.runtime import metrics

RNG = np.random.default_rng(0)


def test_regression_agrees_with_scikit_learn():
    y, p = RNG.standard_normal(200), RNG.standard_normal(200)
    found = metrics.regression_metrics(torch.from_numpy(p)[:, None], torch.from_numpy(y))
    assert found == pytest.approx({"r2": oracle.r2_score(y, p), "mse": oracle.mean_squared_error(y, p)})


def test_two_classes_agree_with_scikit_learn():
    y, logits = (RNG.random(200) > 0.5).astype(float), RNG.standard_normal(200)
    found = metrics.binary_metrics(torch.from_numpy(logits)[:, None], torch.from_numpy(y))
    p = 1 / (1 + np.exp(-logits))
    assert found == pytest.approx({"accuracy": oracle.accuracy_score(y, logits > 0), "ce": oracle.log_loss(y, p)})


def test_many_classes_agree_with_scikit_learn():
    y, logits = RNG.integers(0, 5, 200), RNG.standard_normal((200, 5))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = metrics.multiclass_metrics(torch.from_numpy(logits), torch.from_numpy(y))
    expected = {"accuracy": oracle.accuracy_score(y, logits.argmax(1)), "ce": oracle.log_loss(y, p, labels=range(5))}
    assert found == pytest.approx(expected)


def test_micro_f1_agrees_with_scikit_learn():
    y, logits = (RNG.random((100, 6)) > 0.7).astype(float), RNG.standard_normal((100, 6))
    found = metrics.multilabel_metrics(torch.from_numpy(logits), torch.from_numpy(y))
    assert found["micro_f1"] == pytest.approx(oracle.f1_score(y, logits > 0, average="micro"))
    p = 1 / (1 + np.exp(-logits))
    assert found["bce"] == pytest.approx(np.mean([oracle.log_loss(y[:, c], p[:, c]) for c in range(6)]))


def test_a_model_that_finds_nothing_scores_zero_and_not_nan():
    nothing = torch.zeros(2, 3)
    assert metrics.multilabel_metrics(nothing - 1, nothing)["micro_f1"] == 0.0
    assert set(metrics.support_recovery(nothing > 0, nothing > 0).values()) == {0.0}


def test_a_logit_of_zero_is_the_negative_class():
    logits, y = torch.tensor([[0.0], [0.0], [1.0]]), torch.tensor([0.0, 1.0, 1.0])
    assert metrics.binary_metrics(logits, y)["accuracy"] == pytest.approx(2 / 3)
    assert metrics.multilabel_metrics(logits, y[:, None])["micro_f1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("loss", Loss)
def test_the_compared_metric_of_each_loss_is_better_for_better_outputs(loss):
    compute, name = metrics.METRICS_BY_LOSS[loss]
    if loss is Loss.SQUARED:
        y, good, bad = torch.tensor([1.0, -1.0]), torch.tensor([[1.0], [-1.0]]), torch.tensor([[-1.0], [1.0]])
    elif loss is Loss.SOFTMAX:
        y, good, bad = torch.tensor([0, 1]), torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.tensor([[0.0, 3.0], [3.0, 0.0]])
    else:
        y, good, bad = torch.tensor([1.0, 0.0]), torch.tensor([[3.0], [-3.0]]), torch.tensor([[-3.0], [3.0]])
    y = y[:, None] if loss is Loss.MULTILABEL else y
    assert compute(good, y)[name] == pytest.approx(1.0) and compute(bad, y)[name] <= 0
    assert {type(value) for value in compute(good, y).values()} == {float}


def test_true_discovery_rate_is_precision_over_entries_and_over_features():
    truth = torch.tensor([[True, False, False, True], [False, False, False, True]])
    kept = torch.tensor([[True, True, True, False], [False, False, True, True]])
    found = metrics.support_recovery(kept, truth)
    assert found == pytest.approx({"tdr": 2 / 5, "tdr_features": 2 / 4, "recall": 2 / 3})
    chosen, true = kept.numpy().ravel(), truth.numpy().ravel()
    assert found["tdr"] == pytest.approx(oracle.precision_score(true, chosen))
    assert found["recall"] == pytest.approx(oracle.recall_score(true, chosen))


def test_a_dense_model_scores_the_true_density():
    truth = torch.zeros(1, 1000, dtype=torch.bool)
    truth[0, :50] = True
    kept = torch.ones(1, 1000, dtype=torch.bool)
    assert metrics.support_recovery(kept, truth)["tdr"] == pytest.approx(0.05)


def test_soft_iou_of_masks_is_intersection_over_union():
    a, b = torch.tensor([1.0, 1, 0, 0]), torch.tensor([1.0, 0, 1, 0])
    assert metrics.soft_iou(a, b) == pytest.approx(1 / 3)
    assert metrics.soft_iou(torch.zeros(3), torch.zeros(3)) == 1.0
    assert metrics.soft_iou(torch.tensor([0.5, 0.2]), torch.tensor([0.25, 0.4])) == pytest.approx(0.45 / 0.9)
