import pytest
import torch
from torch.nn import functional

from fedsieve.core.types import Batch
from fedsieve.objectives.linear import Linear, Loss

K, B, F = 3, 8, 6


def case(loss):
    g = torch.Generator().manual_seed(1)
    outputs = {Loss.SOFTMAX: 4, Loss.MULTILABEL: 5}.get(loss, 1)
    x = torch.randn(K, B, F, generator=g, dtype=torch.float64)
    y = {
        Loss.SQUARED: torch.randn(K, B, generator=g, dtype=torch.float64),
        Loss.LOGISTIC: torch.randint(0, 2, (K, B), generator=g).double(),
        Loss.SOFTMAX: torch.randint(0, 4, (K, B), generator=g),
        Loss.MULTILABEL: torch.randint(0, 2, (K, B, 5), generator=g).double(),
    }[loss]
    theta = torch.randn(K, outputs * F, generator=g, dtype=torch.float64)
    return Linear(loss=loss, num_features=F, num_outputs=outputs), theta, Batch(x, y)


def written_out(loss, theta, x, y, outputs):
    logits = x @ theta.view(outputs, F).T
    if loss is Loss.SQUARED:
        return functional.mse_loss(logits[:, 0], y)
    if loss is Loss.LOGISTIC:
        return functional.binary_cross_entropy_with_logits(logits[:, 0], y)
    if loss is Loss.SOFTMAX:
        return functional.cross_entropy(logits, y)
    return functional.binary_cross_entropy_with_logits(logits, y)


@pytest.mark.parametrize("loss", Loss)
def test_loss_and_gradient_are_those_of_autograd_for_every_client(loss):
    objective, theta, batch = case(loss)
    found_loss, found = objective.gradient(theta, batch)
    for k in range(K):
        leaf = theta[k].clone().requires_grad_()
        value = written_out(loss, leaf, batch.x[k], batch.y[k], objective.num_outputs)
        (grad,) = torch.autograd.grad(value, leaf)
        torch.testing.assert_close(found[k], grad)
        torch.testing.assert_close(found_loss[k], value.detach())


@pytest.mark.parametrize("loss", Loss)
def test_the_empty_loss_is_that_of_a_model_of_zeros(loss):
    objective, theta, batch = case(loss)
    torch.testing.assert_close(objective.zero_model_loss(batch).double(), objective.gradient(torch.zeros_like(theta), batch)[0])


@pytest.mark.parametrize("loss", Loss)
def test_smoothness_bounds_the_curvature_of_all_examples_together(loss):
    objective, theta, batch = case(loss)
    rows = Batch(batch.x[0], batch.y[0])
    hessian = torch.autograd.functional.hessian(lambda t: written_out(loss, t, rows.x, rows.y, objective.num_outputs), theta[0])
    largest = torch.linalg.eigvalsh(hessian)[-1]
    assert objective.smoothness(rows, B, num_iterations=200) >= largest - 1e-9


def test_smoothness_of_one_row_batches_is_that_of_the_worst_row():
    objective, _, batch = case(Loss.SQUARED)
    rows = Batch(batch.x[0], batch.y[0])
    assert float(objective.smoothness(rows, 1)) == pytest.approx(2 * float((rows.x**2).sum(-1).max()))


def test_the_local_smoothness_falls_with_the_loss_except_of_the_squared_loss():
    smooth, fraction = torch.tensor([4.0, 4.0]), torch.tensor([1.0, 0.25])
    for loss in Loss:
        objective, _, _ = case(loss)
        assert objective.local_smoothness(smooth, fraction).tolist() == ([4.0, 4.0] if loss is Loss.SQUARED else [4.0, 1.0])


@pytest.mark.parametrize("kept", [[3, 60, 149], range(150)])
def test_predictions_equal_the_dense_product_in_every_representation(kept):
    objective = Linear(loss=Loss.SOFTMAX, num_features=50, num_outputs=3)
    theta = torch.zeros(150, dtype=torch.float64)
    theta[list(kept)] = torch.linspace(-2.0, 1.0, len(kept), dtype=torch.float64)
    x = torch.randn(20, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_feature = x.T.contiguous().T
    for rows in (x, by_feature):
        torch.testing.assert_close(objective.predict(theta, rows), x @ theta.view(3, 50).T)
