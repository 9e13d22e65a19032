"""Any `nn.Module` as an objective over a flat parameter vector."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatch
from functools import cached_property
from math import inf, prod
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn import functional

from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Layout
from fedsieve.objectives.fast_conv import FastConvMode, module_keeps_batch_last

NOT_VMAPPABLE = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Modules that vmap does not support, or for which a loop over clients is faster."""
NORM_CLASSES = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
NORM_NAME = re.compile(r"norm(\d+d)?$", re.IGNORECASE)
"""Class names of normalization layers that are not torch's, such as LlamaRMSNorm or LayerNorm2d."""
PREDICT_BATCH_SIZE = 500


class GateGranularity(StrEnum):
    """Groups of weights that share one gate and are kept or dropped together."""

    WEIGHT = "weight"
    """each weight has its own gate"""
    FEATURE = "feature"
    """all weights of one input"""
    NEURON = "neuron"
    """all weights of one output of a fully connected layer"""
    FILTER = "filter"
    """all weights of one output channel of a convolution"""


def require_granularity(granularity: GateGranularity, dimensions: list[int]) -> None:
    """Raise ValueError if a granularity fits none of the gated parameters, which have these numbers of dimensions."""
    is_filter = granularity is GateGranularity.FILTER
    fits = granularity is GateGranularity.WEIGHT or any(number > 2 if is_filter else number == 2 for number in dimensions)
    if not fits:
        layer = "convolution" if is_filter else "fully connected layer"
        raise ValueError(f"gate granularity {granularity} needs a {layer} with gates, and this module has none; use weight")


def group_ids(shapes: list[tuple[int, ...]], granularity: GateGranularity, num_ungated: int) -> Tensor:
    """The group of each coordinate; tensors to which the granularity does not apply have one gate per weight."""
    parts, first = [], 0
    for shape in shapes:
        ids = torch.arange(prod(shape)).view(shape)
        if granularity is GateGranularity.FEATURE and len(shape) == 2:
            ids = torch.arange(shape[1]).expand(shape)
        elif (granularity is GateGranularity.NEURON and len(shape) == 2) or (granularity is GateGranularity.FILTER and len(shape) > 2):
            ids = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
        parts.append(ids.reshape(-1) + first)
        first = int(parts[-1].amax()) + 1
    return torch.cat((*parts, torch.arange(first, first + num_ungated)))


def norm_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of normalization layers: of torch's classes, and the vectors of classes whose name ends in Norm."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            is_vector = parameter.numel() == max(parameter.shape, default=1)
            if isinstance(part, NORM_CLASSES) or (is_vector and NORM_NAME.search(type(part).__name__)):
                yield parameter


def carried_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that training may change: real numbers of the state dict, of layers in training mode."""
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is None or not part.training or key in part._non_persistent_buffers_set or buffer.is_complex():
                continue
            if (name := names.pop(id(buffer), None)) is not None:
                yield name, buffer


@contextmanager
def torch_seed(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's generator for random layers and restore its state afterwards."""
    if seed is None:
        yield
    elif device.type != "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    else:  # fork_rng queries all kinds of devices, which takes longer than a small step
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


@dataclass(frozen=True, kw_only=True)
class Module:
    """The mean loss of a module as a function of its flattened parameters. Tied parameters are one slice and share one gate."""

    has_random_layers: ClassVar[bool] = True
    """always, because a forward pass may contain dropout that no layer shows"""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    factory: Callable[[], nn.Module] | None = None
    """builds a module with new weights from a seed; None starts from the weights of `module`"""
    ungated: tuple[str, ...] = ()
    """patterns of names of parameters without gates, such as `*.bias`: always kept, not counted"""
    gate_norms: bool = False
    """whether parameters of normalization layers have gates; without gates they are always kept and not counted"""
    frozen: tuple[str, ...] = ()
    """names of parameters that are not trained, not sent and not counted"""
    granularity: GateGranularity = GateGranularity.WEIGHT
    """which weights share a gate"""
    forward: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__
    """(module, examples) -> outputs"""
    parameter_slices: dict[str, tuple[slice, tuple[int, ...]]] = field(init=False)
    buffer_slices: dict[str, tuple[slice, tuple[int, ...]]] = field(init=False)
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        """Compute the layout of parameters and buffers."""
        named = {name: part for name, part in self.module.named_parameters() if name not in self.frozen}
        norms = set() if self.gate_norms else set(norm_parameters(self.module))
        gated = [name for name in named if named[name] not in norms and not any(fnmatch(name, pattern) for pattern in self.ungated)]
        if not gated:
            raise ValueError("the module has no parameters with a gate, so there are no weights to select")
        slices, at = {}, 0
        for name in (*gated, *(name for name in named if name not in gated)):
            slices[name] = (slice(at, at + named[name].numel()), tuple(named[name].shape))
            at += named[name].numel()
        require_granularity(self.granularity, [len(named[name].shape) for name in gated])
        size = slices[gated[-1]][0].stop
        object.__setattr__(self, "parameter_slices", slices)
        buffer_slices, end = {}, at
        for name, buffer in carried_buffers(self.module):
            buffer_slices[name] = (slice(end, end + buffer.numel()), tuple(buffer.shape))
            end += buffer.numel()
        object.__setattr__(self, "buffer_slices", buffer_slices)
        groups = (
            None
            if self.granularity is GateGranularity.WEIGHT
            else group_ids([slices[name][1] for name in gated], self.granularity, at - size)
        )
        object.__setattr__(self, "layout", Layout(at, {name: slices[name] for name in gated}, at - size, groups))

    @cached_property
    def keeps_batch_last(self) -> bool:
        """Whether compiled convolutions are faster in this module."""
        return module_keeps_batch_last(self.module)

    @property
    def supports_indexed_rows(self) -> bool:
        """A module needs its examples as one tensor."""
        return False

    @property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Slice and shape of every parameter and every carried buffer."""
        return self.parameter_slices | self.buffer_slices

    def flatten(self, module: nn.Module) -> Float[Tensor, " p"]:
        """A module's parameters as one vector."""
        named = dict(module.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.parameter_slices])

    def initial_weights(self, draw: Draw) -> Float[Tensor, " p"]:
        """New weights from the seed if there is a factory, else the weights of the module."""
        return self.flatten(self._initial_module(draw)).to(draw("start", 1))

    def _initial_module(self, draw: Draw) -> nn.Module:
        if self.factory is None:
            return self.module
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(draw("start", 1).double() * 2**31))
            return self.factory()

    def unflatten(self, theta: Float[Tensor, "*k p"]) -> dict[str, Tensor]:
        """The flat vector as the module's parameters, (*k, ...)."""
        slices = self.parameter_slices
        parts = theta.split([part.stop - part.start for part, _ in slices.values()], dim=-1)
        return {name: part.view(*theta.shape[:-1], *shape) for part, (name, (_, shape)) in zip(parts, slices.items(), strict=True)}

    def initial_buffers(self, draw: Draw) -> Float[Tensor, " b"]:
        """The buffers of a module from the seed if there is a factory, else of the module."""
        return self.buffer_values(dict(self._initial_module(draw).named_buffers()))

    def make_buffers(self, values: Float[Tensor, " b"]) -> dict[str, Tensor]:
        """Copies of the module's buffers with these values. A buffer whose values are equal in float32 keeps its own precision."""
        own, first, buffers = dict(self.module.named_buffers()), self.layout.size, {}
        for name, (part, shape) in self.buffer_slices.items():
            value = values[part.start - first : part.stop - first].view(shape).to(own[name].device)
            if torch.equal(own[name].to(value.dtype), value):
                buffers[name] = own[name].clone()
            else:
                buffers[name] = (value if own[name].is_floating_point() else value.round()).to(own[name].dtype, copy=True)
        return buffers

    def buffer_values(self, buffers: Mapping[str, Tensor]) -> Float[Tensor, " b"]:
        """The carried buffers as one vector."""
        parts = [buffers[name].detach().reshape(-1).to(torch.float32) for name in self.buffer_slices]
        return torch.cat(parts) if parts else torch.zeros(0)

    def average_buffers(self, values: Float[Tensor, "k b"], weights: Float[Tensor, " k"]) -> Float[Tensor, " b"]:
        """The weighted mean; a running variance is that of all clients together, by the law of total variance."""
        values, weights = values.double(), weights.double()
        mean = values[0] + weights / weights.sum() @ (values - values[0])  # a buffer that is equal at all clients stays exactly as it is
        for center, spread in self._moment_slices():
            mean[spread] = weights / weights.sum() @ (values[:, spread] + (values[:, center] - mean[center]).square())
        return mean.float()

    def _moment_slices(self) -> list[tuple[slice, slice]]:
        """The slices of every running mean and its variance in a vector of buffers."""
        slices = {
            name: slice(part.start - self.layout.size, part.stop - self.layout.size) for name, (part, _) in self.buffer_slices.items()
        }
        means = (name for name in slices if name.rpartition(".")[2] == "running_mean")
        pairs = ((name, name.removesuffix("mean") + "var") for name in means)
        return [(slices[mean], slices[variance]) for mean, variance in pairs if variance in slices]

    @cached_property
    def parameter_slots(self) -> list[tuple[dict[str, Any], str, str]]:
        """The dictionary, key and name of each parameter in the module; a tied parameter has several."""
        names = {part: name for name, part in self.module.named_parameters()}
        slots = [(part._parameters, key, value) for part in self.module.modules() for key, value in part._parameters.items()]
        return [(home, key, names[value]) for home, key, value in slots if value is not None and names.get(value) in self.slices]

    @cached_property
    def buffer_slots(self) -> list[tuple[dict[str, Any], str, str]]:
        """The dictionary, key and name of each carried buffer in the module; a tied buffer has several."""
        names = {id(part): name for name, part in self.module.named_buffers()}
        slots = [(part._buffers, key, value) for part in self.module.modules() for key, value in part._buffers.items()]
        return [(home, key, names[id(value)]) for home, key, value in slots if names.get(id(value)) in self.buffer_slices]

    def _outputs(self, parameters: dict[str, Tensor], x: Tensor, buffers: dict[str, Tensor] | None = None) -> Tensor:
        """The module's outputs at other parameters, set for the call. `functional_call` would add a tenth to a small step.

        The forward pass may change `buffers`, in place or by new tensors; the module keeps its own.
        """
        slots = self.parameter_slots if buffers is None else self.parameter_slots + self.buffer_slots
        values = parameters if buffers is None else parameters | buffers
        own = [home[key] for home, key, _ in slots]
        try:
            for home, key, name in slots:
                home[key] = values[name]
            outputs = self.forward(self.module, x)
            if buffers is not None:
                buffers |= {name: home[key].detach() for home, key, name in self.buffer_slots}
            return outputs
        finally:
            for (home, key, _), part in zip(slots, own, strict=True):
                home[key] = part

    def _loss_value(
        self, parameters: dict[str, Tensor], x: Tensor, y: Tensor, buffers: dict[str, Tensor] | None = None
    ) -> Float[Tensor, ""]:
        return self.loss(self._outputs(parameters, x, buffers), y)

    def gradient(self, theta: Float[Tensor, "k p"], batch: Batch) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        """Mean loss and gradient of each client of the stack, by vmap if possible, else client by client.

        A training step changes the buffers in `batch`; without them, copies of the module's.
        """
        x, buffers = batch.x, batch.buffers
        assert isinstance(x, Tensor), "a module needs its examples as one tensor"
        if buffers is None and self.buffer_slices:
            buffers = [self.make_buffers(self.buffer_values(dict(self.module.named_buffers()))) for _ in theta]
        if len(theta) > 1 and buffers is None and not any(isinstance(part, NOT_VMAPPABLE) for part in self.module.modules()):
            try:
                gradients, losses = vmap(grad_and_value(self._loss_value), randomness="error")(self.unflatten(theta), x, batch.y)
                return losses, torch.cat([gradients[name].flatten(1) for name in self.parameter_slices], dim=-1)
            except RuntimeError:
                pass  # random numbers in a forward pass, or an operation that vmap does not support
        pairs = [
            self._gradient_of_client(
                theta[k],
                x[k],
                batch.y[k],
                None if batch.module_seeds is None else batch.module_seeds[k],
                None if buffers is None else buffers[k],
            )
            for k in range(len(theta))
        ]
        return torch.stack([loss for loss, _ in pairs]), torch.stack([gradient for _, gradient in pairs])

    def _gradient_of_client(
        self, theta: Float[Tensor, " p"], x: Tensor, y: Tensor, seed: int | None, buffers: dict[str, Tensor] | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " p"]]:
        leaves = {name: part.detach().requires_grad_() for name, part in self.unflatten(theta).items()}
        with torch_seed(seed, theta.device), FastConvMode(convolutions=self.keeps_batch_last):
            loss = self._loss_value(leaves, x, y, buffers)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return loss.detach(), torch.cat([gradient.reshape(-1) for gradient in gradients])

    def predict(self, theta: Float[Tensor, " _n"], x: Tensor) -> Tensor:
        """Outputs in evaluation mode, computed in batches, at parameters (p,) or at parameters and buffers (p + b,)."""
        parameters, buffers = self.unflatten(theta[: self.layout.size]), None
        if len(theta) > self.layout.size:
            buffers = self.make_buffers(theta[self.layout.size :])
        training = [part for part in self.module.modules() if part.training]
        self.module.eval()
        try:
            with torch.no_grad():
                return torch.cat([self._outputs(parameters, examples, buffers) for examples in x.split(PREDICT_BATCH_SIZE)])
        finally:
            for part in training:
                part.training = True

    def zero_model_loss(self, batch: Batch) -> Float[Tensor, " k"]:
        """Infinity: the loss of a module with zero weights has no meaning."""
        return torch.full((len(batch.y),), inf, device=batch.y.device)

    def smoothness(self, examples: Batch, batch_size: int) -> Tensor:
        """0: modules have no known bound on their curvature, so that no step is limited by it."""
        return torch.zeros((), device=examples.y.device)

    def local_smoothness(self, smoothness: Float[Tensor, " k"], loss_fraction: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """The smoothness, unchanged."""
        return smoothness
