"""Any `nn.Module` as an objective over a flat parameter vector."""

from collections.abc import Callable, Iterator
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
from torch.nn.modules.batchnorm import _BatchNorm

from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Layout
from fedsieve.objectives.fast_conv import FastConvMode, module_keeps_batch_last

NOT_VMAPPABLE = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Modules that vmap does not support, or for which a loop over clients is faster."""
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
    frozen: tuple[str, ...] = ()
    """names of parameters that are not trained, not sent and not counted"""
    granularity: GateGranularity = GateGranularity.WEIGHT
    """which weights share a gate"""
    slices: dict[str, tuple[slice, tuple[int, ...]]] = field(init=False)
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        """Compute the layout, and reject modules with state that no message contains."""
        for name, part in self.module.named_modules():
            if isinstance(part, _BatchNorm) and part.training and part.track_running_stats:
                raise ValueError(
                    f"{name or 'the module'} is {type(part).__name__} in training mode: its running statistics are state that no message "
                    f"contains; use GroupNorm, or freeze its statistics with .eval()"
                )
        named = {name: part for name, part in self.module.named_parameters() if name not in self.frozen}
        gated = [name for name in named if not any(fnmatch(name, pattern) for pattern in self.ungated)]
        if not gated:
            raise ValueError("the module has no parameters with a gate, so there are no weights to select")
        slices, at = {}, 0
        for name in (*gated, *(name for name in named if name not in gated)):
            slices[name] = (slice(at, at + named[name].numel()), tuple(named[name].shape))
            at += named[name].numel()
        size = slices[gated[-1]][0].stop
        object.__setattr__(self, "slices", slices)
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

    def flatten(self, module: nn.Module) -> Float[Tensor, " p"]:
        """A module's parameters as one vector."""
        named = dict(module.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.slices])

    def initial_weights(self, draw: Draw) -> Float[Tensor, " p"]:
        """New weights from the seed if there is a factory, else the weights of the module."""
        noise = draw("start", 1)
        if self.factory is None:
            return self.flatten(self.module).to(noise)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(noise.double() * 2**31))
            return self.flatten(self.factory()).to(noise)

    def unflatten(self, theta: Float[Tensor, "*k p"]) -> dict[str, Tensor]:
        """The flat vector as the module's parameters, (*k, ...)."""
        parts = theta.split([part.stop - part.start for part, _ in self.slices.values()], dim=-1)
        return {name: part.view(*theta.shape[:-1], *shape) for part, (name, (_, shape)) in zip(parts, self.slices.items(), strict=True)}

    @cached_property
    def parameter_slots(self) -> list[tuple[dict[str, Any], str, str]]:
        """The dictionary, key and name of each parameter in the module; a tied parameter has several."""
        names = {part: name for name, part in self.module.named_parameters()}
        slots = [(part._parameters, key, value) for part in self.module.modules() for key, value in part._parameters.items()]
        return [(home, key, names[value]) for home, key, value in slots if value is not None and names.get(value) in self.slices]

    def _outputs(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """The module's outputs at other parameters, set for the call. `functional_call` would add a tenth to a small step."""
        own = [home[key] for home, key, _ in self.parameter_slots]
        try:
            for home, key, name in self.parameter_slots:
                home[key] = parameters[name]
            return self.module(x)
        finally:
            for (home, key, _), part in zip(self.parameter_slots, own, strict=True):
                home[key] = part

    def _loss_value(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Float[Tensor, ""]:
        return self.loss(self._outputs(parameters, x), y)

    def gradient(self, theta: Float[Tensor, "k p"], batch: Batch) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        """Mean loss and gradient of each client of the stack, by vmap if possible, else client by client."""
        x = batch.x
        assert isinstance(x, Tensor), "a module needs its examples as one tensor"
        if len(theta) > 1 and not any(isinstance(part, NOT_VMAPPABLE) for part in self.module.modules()):
            try:
                gradients, losses = vmap(grad_and_value(self._loss_value), randomness="error")(self.unflatten(theta), x, batch.y)
                return losses, torch.cat([gradients[name].flatten(1) for name in self.slices], dim=-1)
            except RuntimeError:
                pass  # random numbers in a forward pass, or an operation that vmap does not support
        pairs = [
            self._gradient_of_client(theta[k], x[k], batch.y[k], None if batch.module_seeds is None else batch.module_seeds[k])
            for k in range(len(theta))
        ]
        return torch.stack([loss for loss, _ in pairs]), torch.stack([gradient for _, gradient in pairs])

    def _gradient_of_client(
        self, theta: Float[Tensor, " p"], x: Tensor, y: Tensor, seed: int | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " p"]]:
        leaves = {name: part.detach().requires_grad_() for name, part in self.unflatten(theta).items()}
        with torch_seed(seed, theta.device), FastConvMode(convolutions=self.keeps_batch_last):
            loss = self._loss_value(leaves, x, y)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return loss.detach(), torch.cat([gradient.reshape(-1) for gradient in gradients])

    def predict(self, theta: Float[Tensor, " p"], x: Tensor) -> Tensor:
        """Outputs in evaluation mode, computed in batches."""
        training = [part for part in self.module.modules() if part.training]
        self.module.eval()
        try:
            with torch.no_grad():
                return torch.cat([self._outputs(self.unflatten(theta), examples) for examples in x.split(PREDICT_BATCH_SIZE)])
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
