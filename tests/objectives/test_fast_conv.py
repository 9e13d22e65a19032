"""Compiled convolutions and max pooling inside modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsieve import kernels
from fedsieve.core.types import Batch
from fedsieve.objectives.fast_conv import FastConvMode
from fedsieve.objectives.module import Module


def derivatives(compute, inputs):
    """The result of an operation on images, and its derivatives for a fixed output gradient."""
    out = compute()
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return out, *torch.autograd.grad((out * weight).sum(), inputs)


def in_memory_order(images, order):
    """The same images, with torch's memory order or with the batch last."""
    return images if order == "torch" else images.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


@pytest.mark.parametrize("order", ["torch", "batch last"])
def test_compiled_pooling_equals_torch_to_the_bit(order):
    images = torch.randn(9, 2, 8, 6, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    images[0, 0, :2, :2], images[1, 1, 0, 3] = 0.0, torch.nan
    images = in_memory_order(images, order).requires_grad_()
    with FastConvMode(convolutions=True):
        fast = derivatives(lambda: functional.max_pool2d(images, 2), images)
    assert "MaxPooling" in operation_of(fast[0])
    for one, other in zip(fast, derivatives(lambda: functional.max_pool2d(images, 2), images), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


def operation_of(out):
    """Name of the operation that computed a tensor."""
    return type(out.grad_fn).__name__


@pytest.mark.parametrize("options", [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"kernel_size": 3}])
def test_other_pooling_runs_in_torch(options):
    images = torch.randn(9, 3, 8, 8, requires_grad=True)
    with FastConvMode(convolutions=True):
        out = functional.max_pool2d(images, **{"kernel_size": 2} | options)
    assert operation_of(out) != "MaxPoolingBackward"
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
def test_compiled_convolutions_equal_torch(order, shape, kernel, biased):
    rng = torch.Generator().manual_seed(0)
    images = in_memory_order(torch.randn(shape, generator=rng), order).requires_grad_()
    weight = torch.randn(kernel, generator=rng, requires_grad=True)
    bias = torch.randn(kernel[0], generator=rng, requires_grad=True) if biased else None
    inputs = [images, weight, *([bias] if biased else [])]
    with FastConvMode(convolutions=True):
        fast = derivatives(lambda: functional.conv2d(images, weight, bias), inputs)
    assert operation_of(fast[0]) == "ConvolutionBackward"
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
def test_other_convolutions_run_in_torch(change):
    options = {name: value for name, value in change.items() if name in ("stride", "padding", "dilation", "groups")}
    kind = {"dtype": torch.float64 if "double" in change else torch.float32}
    images = torch.randn(change.get("images", 9), 2, 9, 8, **kind)
    weight = torch.randn(
        change.get("channels", 4), 2 // change.get("groups", 1), *[change.get("kernel", 3)] * 2, requires_grad=True, **kind
    )
    with FastConvMode(convolutions=True):
        out = functional.conv2d(images, weight, None, **options)
    assert operation_of(out) != "ConvolutionBackward"
    assert torch.equal(out, functional.conv2d(images, weight, None, **options))


def test_an_impossible_convolution_raises_the_error_of_torch():
    with FastConvMode(convolutions=True), pytest.raises(RuntimeError, match="to have 3 channels"):
        functional.conv2d(torch.randn(9, 2, 8, 8), torch.randn(4, 3, 3, 3), None)
    with FastConvMode(convolutions=True), pytest.raises(RuntimeError, match="Kernel size"):
        functional.conv2d(torch.randn(9, 2, 8, 8), torch.randn(4, 2, 9, 3), None)


@pytest.mark.parametrize("normed", [False, True])
def test_the_gradient_of_a_module_does_not_depend_on_kernels(monkeypatch, normed):
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
    monkeypatch.setattr(kernels, "load", lambda _: None)
    for one, other in zip(fast, objective.gradient(theta, batch), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4)
