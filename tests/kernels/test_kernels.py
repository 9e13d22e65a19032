"""Compiled passes and the formulas they stand for: integers and roundings the same to the bit, gates to a few units in the last place."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn
from torch.nn import functional

from fedsieve import kernels
from fedsieve.core import aggregation, constraint, gates, optimizers, quantization, random
from fedsieve.core.batches import IndexedRows, SparseBatch
from fedsieve.core.constraint import ConstraintScale
from fedsieve.core.gates import LOG_ALPHA_LIMIT, GateAtTest, HardConcrete
from fedsieve.core.optimizers import Optimizer
from fedsieve.core.touched import FeatureTables
from fedsieve.core.types import Batch
from fedsieve.objectives import fast_conv as fast_conv
from fedsieve.objectives.fast_conv import FastConvMode
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module

SHAPE, SIZE = HardConcrete(), 1003


def both(monkeypatch, compute):
    """What a formula gives compiled, and what it gives in torch."""
    assert kernels.available() is not None, "pip install fedsieve[fast]"
    fast = compute()
    with monkeypatch.context() as without:
        for module in (kernels, random):
            without.setattr(module, "available", lambda: None)
        return fast, compute()


def stack(k=3, spread=4.0, seed=0):
    return spread * torch.randn(k, SIZE, generator=torch.Generator().manual_seed(seed))


def test_noise_is_the_same_to_the_bit(monkeypatch):
    for at in (SIZE, 17, np.arange(5, 5 + 3 * SIZE, 3)):
        fast, slow = both(monkeypatch, lambda at=at: random.uniforms(7, [0, 3, 11], at))
        assert np.array_equal(fast, slow)


@pytest.mark.parametrize("size", [SIZE, 17])
@pytest.mark.parametrize("zero_free", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_levels_are_the_same_to_the_bit(monkeypatch, bits, zero_free, size):
    """Short vectors take the pass too, once it is loaded."""
    draw = random.client_sampler(1, 0, 0, 0, [0, 1, 2], torch.float32)
    values = stack()[:, :size].contiguous() * torch.tensor([1.0, 1e-3, 0.0])[:, None]
    fast, slow = both(monkeypatch, lambda: quantization.quantize(values, bits, draw, "x", zero_free=zero_free))
    assert torch.equal(fast.codes, slow.codes) and torch.equal(fast.scale, slow.scale) and fast.coding is slow.coding


def test_broken_numbers_stay_visible_in_levels(monkeypatch):
    """A scale that is not finite is what whoever validates a message sees."""
    draw = random.client_sampler(1, 0, 0, 0, [0, 1], torch.float32)
    values = stack(2)
    values[0, 5], values[1, 6] = torch.nan, torch.inf
    fast, slow = both(monkeypatch, lambda: quantization.quantize(values, 8, draw, "x", zero_free=False))
    assert not fast.scale.isfinite().any() and not slow.scale.isfinite().any()


def test_gates_and_their_slopes_agree(monkeypatch):
    log_alpha = torch.cat((stack(), torch.tensor([-12.0, 12.0, 0.0])[:, None].expand(3, SIZE)))
    noise = torch.from_numpy(random.uniforms(1, range(6), SIZE))
    noise[0, 0], noise[1, 0] = 0.5**24, 1 - 0.5**24
    for compute in (lambda: gates.sample(SHAPE, log_alpha, noise), lambda: gates.median_gates(SHAPE, log_alpha)):
        for fast, slow in zip(*both(monkeypatch, compute), strict=True):
            torch.testing.assert_close(fast, slow, atol=5e-7, rtol=0)
            assert torch.equal(fast == 0, slow == 0) or (fast - slow).abs().max() < 5e-7


def test_the_chain_rule_and_magnitudes_agree(monkeypatch):
    weights, gradient, log_alpha = stack(seed=1), stack(seed=2), stack(seed=3)
    gate = gates.median_gates(SHAPE, log_alpha)
    for fast, slow in zip(*both(monkeypatch, lambda: gates.chain_rule(gradient, weights, gate)), strict=True):
        assert torch.equal(fast, slow)
    fast, slow = both(monkeypatch, lambda: gates.gated_magnitude(SHAPE, weights, log_alpha, GateAtTest.MEDIAN, 1e-6))
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ConstraintScale)
def test_a_gates_step_agrees_and_stays_inside_its_limits(monkeypatch, form):
    def step(gradient):
        return constraint.step_log_alpha(SHAPE, stack(), gradient, torch.tensor([0.0, 0.5, 30.0]), form, SIZE, 0.1)

    fast, slow = both(monkeypatch, lambda: step(stack(spread=50, seed=1)))
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=1e-6)
    assert float(fast.abs().max()) == LOG_ALPHA_LIMIT
    assert step(torch.full((3, SIZE), torch.nan)).isnan().all()


@pytest.mark.parametrize("form", ConstraintScale)
def test_a_step_of_weights_and_gates_together_agrees(monkeypatch, form):
    """Compiled and in torch, and as the chain rule and two steps."""
    weights, gradient, log_alpha = stack(seed=1), stack(seed=2), stack(seed=3)
    gate, step, multiplier = gates.median_gates(SHAPE, log_alpha), torch.tensor([[0.1], [0.0], [2.0]]), torch.tensor([0.0, 0.5, 30.0])
    rest = (multiplier, form, SIZE, 0.1)
    fast, slow = both(monkeypatch, lambda: constraint.gated_sgd_step(SHAPE, weights, log_alpha, gradient, gate, step, *rest))
    by_weight, by_gate = gates.chain_rule(gradient, weights, gate)
    apart = weights - step * by_weight, constraint.step_log_alpha(SHAPE, log_alpha, by_gate, *rest)
    for one, other, alone in zip(fast, slow, apart, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(one, alone, atol=2e-6, rtol=2e-6)
    broken = constraint.gated_sgd_step(SHAPE, weights, log_alpha, torch.full_like(gradient, torch.nan), gate, step, *rest)
    assert all(part.isnan().all() for part in broken)


@pytest.mark.parametrize("form", list(ConstraintScale))
def test_the_pull_of_the_constraint_agrees(monkeypatch, form):
    for multiplier in (torch.tensor([0.5, 0.0, 2.0]), torch.tensor(0.5)):
        fast, slow = both(monkeypatch, lambda multiplier=multiplier: constraint.penalty_gradient(SHAPE, stack(), multiplier, form, SIZE))
        torch.testing.assert_close(fast, slow, atol=5e-7, rtol=0)


@pytest.mark.parametrize("kind", [None, csr_matrix])
@pytest.mark.parametrize("intercept", [False, True])
def test_sparse_products_agree(monkeypatch, intercept, kind):
    rng = np.random.default_rng(3)
    dense = (rng.standard_normal((6, 400)) * (rng.random((6, 400)) < 0.05)).astype(np.float32)
    rows, columns = dense.nonzero()
    starts = (np.searchsorted(rows, np.arange(7)) + 11).astype(np.int32)  # as cut from a longer matrix
    x = SparseBatch(starts, columns, dense[rows, columns], 400, kind)
    assert np.array_equal(x.dense[0].numpy(), dense)
    objective = Linear(loss=Loss.MULTILABEL, num_features=400, num_outputs=3, intercept=intercept, feature_major=True)
    batch = Batch(x, torch.from_numpy((rng.random((1, 6, 3)) < 0.5).astype(np.float32)))
    theta = torch.from_numpy(rng.standard_normal((1, objective.layout.size)).astype(np.float32))
    for fast, slow in zip(*both(monkeypatch, lambda: objective.gradient(theta, batch)), strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)


def test_a_step_on_touched_features_agrees_and_leaves_the_others(monkeypatch):
    """Compiled and in torch, and as the step on a copy of those features alone."""
    outputs, at = 17, torch.arange(3, 90, 2)
    given = [part[0, : 100 * outputs].view(100, outputs) for part in (stack(2, seed=1).view(1, -1), stack(2, seed=2).view(1, -1))]
    gradient, multiplier, size = stack(2, seed=3).view(1, -1)[:, : len(at) * outputs], torch.tensor([0.7]), torch.tensor([[0.3]])

    def step():
        tables = FeatureTables(*(part.clone() for part in given))
        opened = tables.active_gates(SHAPE, at)
        tables.gated_step(
            SHAPE, at, gradient * opened.value, (gradient, opened.weighted_derivative), size, multiplier, ConstraintScale.SUM, 5, 0.2
        )
        return *opened, *tables

    fast, slow = both(monkeypatch, step)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-6)
    weights, log_alpha = (part[at].view(1, -1) for part in given)
    by_weight, by_gate = gates.chain_rule(gradient, weights, gates.median_gates(SHAPE, log_alpha))
    turned = constraint.step_log_alpha(SHAPE, log_alpha, by_gate, multiplier, ConstraintScale.SUM, 5, 0.2)
    untouched = torch.ones(100, dtype=torch.bool).index_fill(0, at, False)
    for new, old, expected in zip(fast[3:], given, (weights - size * by_weight, turned), strict=True):
        torch.testing.assert_close(new[at].view(1, -1), expected, atol=2e-6, rtol=1e-6)
        assert torch.equal(new[untouched], old[untouched])


@pytest.mark.parametrize("form", ConstraintScale)
def test_the_drift_of_untouched_gates_agrees(monkeypatch, form):
    missed = stack(seed=1).abs().floor()
    fast, slow = both(monkeypatch, lambda: constraint.apply_penalty(SHAPE, stack(), missed, torch.tensor([0.0, 0.5, 3e3]), form, SIZE, 0.1))
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=1e-6)
    assert torch.equal(fast[0], stack()[0].clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT))
    assert constraint.apply_penalty(SHAPE, stack() * torch.nan, missed, torch.ones(3), form, SIZE, 0.1).isnan().all()


def derivatives(compute, inputs):
    """What an operation on images gives, and its derivatives against fixed weights."""
    out = compute()
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return out, *torch.autograd.grad((out * weight).sum(), inputs)


def ordered(images, order):
    """The same images, in memory as torch has them, or batch last."""
    return images if order == "torch" else images.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


@pytest.mark.parametrize("order", ["torch", "batch last"])
def test_pooling_and_its_derivative_are_torchs(order):
    images = torch.randn(9, 2, 8, 6, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    images[0, 0, :2, :2], images[1, 1, 0, 3] = 0.0, torch.nan
    images = ordered(images, order).requires_grad_()
    with FastConvMode(convolutions=True):
        fast = derivatives(lambda: functional.max_pool2d(images, 2), images)
    assert "MaxPool" in taken(fast[0])
    for one, other in zip(fast, derivatives(lambda: functional.max_pool2d(images, 2), images), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


def taken(out):
    """The operation a tensor came from."""
    return type(out.grad_fn).__name__


@pytest.mark.parametrize("options", [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"kernel_size": 3}])
def test_other_pooling_is_left_to_torch(options):
    images = torch.randn(9, 3, 8, 8, requires_grad=True)
    with FastConvMode(convolutions=True):
        out = functional.max_pool2d(images, **{"kernel_size": 2} | options)
    assert taken(out) != "MaxPoolBackward"
    assert torch.equal(out, functional.max_pool2d(images, **{"kernel_size": 2} | options))


@pytest.mark.parametrize("order", ["torch", "batch last"])
@pytest.mark.parametrize(
    ("shape", "kernel", "biased"),
    [
        ((32, 1, 28, 28), (6, 1, 5, 5), True),
        ((9, 6, 7, 8), (5, 6, 3, 2), False),
        ((8, 3, 4, 5), (3, 3, 4, 1), True),
        ((11, 2, 1, 3), (1, 2, 1, 3), True),
    ],
)
def test_convolutions_and_their_derivatives_are_torchs(order, shape, kernel, biased):
    rng = torch.Generator().manual_seed(0)
    images = ordered(torch.randn(shape, generator=rng), order).requires_grad_()
    weight = torch.randn(kernel, generator=rng, requires_grad=True)
    bias = torch.randn(kernel[0], generator=rng, requires_grad=True) if biased else None
    inputs = [images, weight, *([bias] if biased else [])]
    with FastConvMode(convolutions=True):
        fast = derivatives(lambda: functional.conv2d(images, weight, bias), inputs)
    assert taken(fast[0]) == "ConvolutionBackward"
    exact = derivatives(lambda: functional.conv2d(images.double(), weight.double(), None if bias is None else bias.double()), inputs)
    for one, other in zip(fast, exact, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=2e-6 * float(other.detach().abs().max()), rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"stride": 2},
        {"padding": 1},
        {"padding": "same"},
        {"dilation": 2},
        {"groups": 2},
        {"channels": 60},
        {"kernel": 1},
        {"images": 7},
        {"double": True},
    ],
)
def test_other_convolutions_are_left_to_torch(change):
    options = {name: value for name, value in change.items() if name in ("stride", "padding", "dilation", "groups")}
    kind = {"dtype": torch.float64 if "double" in change else torch.float32}
    images = torch.randn(change.get("images", 9), 2, 9, 8, **kind)
    weight = torch.randn(
        change.get("channels", 4), 2 // change.get("groups", 1), *[change.get("kernel", 3)] * 2, requires_grad=True, **kind
    )
    with FastConvMode(convolutions=True):
        out = functional.conv2d(images, weight, None, **options)
    assert taken(out) != "ConvolutionBackward"
    assert torch.equal(out, functional.conv2d(images, weight, None, **options))


def test_a_convolution_that_cannot_be_is_refused_by_torch():
    with FastConvMode(convolutions=True), pytest.raises(RuntimeError, match="to have 3 channels"):
        functional.conv2d(torch.randn(9, 2, 8, 8), torch.randn(4, 3, 3, 3), None)
    with FastConvMode(convolutions=True), pytest.raises(RuntimeError, match="Kernel size"):
        functional.conv2d(torch.randn(9, 2, 8, 8), torch.randn(4, 2, 9, 3), None)


@pytest.mark.parametrize("normed", [False, True])
def test_a_modules_gradient_is_the_same_with_compiled_convolutions(monkeypatch, normed):
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        *([nn.GroupNorm(2, 4)] if normed else []),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        nn.Flatten(),
        nn.Linear(80, 3),
    )
    objective, rng = Module(module=net), torch.Generator().manual_seed(3)
    assert objective.keeps_batch_last is not normed
    batch = Batch(torch.randn(2, 16, 1, 14, 14, generator=rng), torch.randint(0, 3, (2, 16), generator=rng), None)
    theta = objective.flatten(net) + 0.1 * torch.randn(2, objective.layout.size, generator=rng)
    fast = objective.gradient(theta, batch)
    monkeypatch.setattr(fast_conv, "available", lambda: None)
    for one, other in zip(fast, objective.gradient(theta, batch), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)


def test_double_precision_and_short_vectors_take_the_formulas():
    assert kernels.for_tensors(stack()) is not None
    assert kernels.for_tensors(stack().double()) is None
    assert kernels.for_tensors(stack()[:, :10].contiguous()) is None
    assert kernels.for_tensors(stack()[:, :10].contiguous(), exact=True) is not None
    assert kernels.for_tensors(stack(), stack().t()) is None


def test_the_softmax_loss_agrees(monkeypatch):
    objective = Linear(loss=Loss.SOFTMAX, num_features=200, num_outputs=7)
    rng = torch.Generator().manual_seed(5)
    batch = Batch(torch.randn(3, 5, 200, generator=rng), torch.randint(0, 7, (3, 5), generator=rng))
    theta = 3 * torch.randn(3, 1400, generator=rng)
    for fast, slow in zip(*both(monkeypatch, lambda: objective.gradient(theta, batch)), strict=True):
        torch.testing.assert_close(fast, slow, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("density", [0.05, 0.9])
def test_the_dual_step_agrees(monkeypatch, density):
    """Ascended where too many gates are open, 0 where they are not."""
    fast, slow = both(monkeypatch, lambda: constraint.ascend_on_gap(SHAPE, stack(1)[0], torch.tensor(0.3), density, 0.5))
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=0)
    assert (fast == 0) == (density == 0.9)


@pytest.mark.parametrize("zero_free", [False, True])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_the_mean_of_levels_agrees(monkeypatch, bits, zero_free):
    draw = random.client_sampler(1, 0, 0, 0, [0, 1, 2], torch.float32)
    values, shares = quantization.quantize(stack(), bits, draw, "x", zero_free=zero_free), torch.tensor([0.5, 0.2, 0.3])
    fast, slow = both(monkeypatch, lambda: aggregation.quantized_mean(values, shares))
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-6)
    assert torch.equal(slow, aggregation.mean(values.decode(torch.float32), shares))


def test_adams_steps_agree(monkeypatch):
    def walk():
        moments, place = optimizers.initial_moments(stack(1)[0]), torch.zeros(SIZE)
        for seed in range(5):
            place, moments = optimizers.step(Optimizer.ADAM, moments, place, stack(1, seed=seed)[0], 0.1, momentum=0.9)
        return place, *moments

    for fast, slow in zip(*both(monkeypatch, walk), strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 8])
@pytest.mark.parametrize(("loss", "outputs"), [(Loss.SQUARED, 1), (Loss.LOGISTIC, 1), (Loss.SOFTMAX, 2), (Loss.SOFTMAX, 7)])
def test_rows_read_in_their_place_give_the_gradient_of_rows_copied_out(loss, outputs, batch, intercept):
    rng = torch.Generator().manual_seed(6)
    objective = Linear(loss=loss, num_features=SIZE, num_outputs=outputs, intercept=intercept)
    rows, places = torch.randn(40, SIZE, generator=rng), torch.randint(0, 40, (3, batch), generator=rng)
    y = torch.randint(0, max(outputs, 2), (3, batch), generator=rng)
    y, theta = y if outputs > 1 else y.float(), 0.1 * torch.randn(3, objective.layout.size, generator=rng)
    assert objective.supports_indexed_rows and IndexedRows.is_supported(rows, SIZE) and not IndexedRows.is_supported(rows.double(), SIZE)
    for one, other in zip(*(objective.gradient(theta, Batch(x, y)) for x in (IndexedRows(rows, places), rows[places])), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
