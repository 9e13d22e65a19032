"""Any `nn.Module` as an objective over a flat vector: parameters by name and slice, gradients by torch.func or client by client."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatch
from functools import cached_property
from math import inf, prod

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Layout
from fedsieve.objectives.fast_conv import Compiled, keeps_order

LOOPED = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Modules for which one client after another is faster than vmap, or vmap cannot do them."""
ROWS_AT_ONCE = 500


class Group(StrEnum):
    """What shares a gate, and is kept or dropped whole."""

    WEIGHT = "weight"
    """nothing: each weight has its own"""
    FEATURE = "feature"
    """all weights that read one input"""
    NEURON = "neuron"
    """all weights of one output of a fully connected layer"""
    FILTER = "filter"
    """all weights of one output channel of a convolution"""


def numbered(shapes: list[tuple[int, ...]], group: Group, free: int) -> Tensor:
    """The group of each coordinate, numbered along the layers; tensors the kind does not apply to keep one gate a weight."""
    parts, first = [], 0
    for shape in shapes:
        ids = torch.arange(prod(shape)).view(shape)
        if group is Group.FEATURE and len(shape) == 2:
            ids = torch.arange(shape[1]).expand(shape)
        elif (group is Group.NEURON and len(shape) == 2) or (group is Group.FILTER and len(shape) > 2):
            ids = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
        parts.append(ids.reshape(-1) + first)
        first = int(parts[-1].amax()) + 1
    return torch.cat((*parts, torch.arange(first, first + free)))


@contextmanager
def seeded(key: int | None, device: torch.device) -> Iterator[None]:
    """Noise of a module's own from a key, the global generator left as it was."""
    if key is None:
        yield
    elif device.type != "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            yield
    else:  # forking would ask every other kind of device too, which takes longer than a small step
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(key)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


@dataclass(frozen=True, kw_only=True)
class Module:
    """The mean loss of a module's outputs, in its parameters laid flat. Tied parameters are one slice, so they share one gate."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    build: Callable[[], nn.Module] | None = None
    """how to draw fresh weights from a seed; None starts from the module's own"""
    free: tuple[str, ...] = ()
    """patterns of parameter names without gates, such as `*.bias`: always kept, not counted"""
    frozen: tuple[str, ...] = ()
    """names of parameters that stay as they are in the module: not trained, not sent, not counted"""
    group: Group = Group.WEIGHT
    """what shares a gate"""
    places: dict[str, tuple[slice, tuple[int, ...]]] = field(init=False)
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        """Lay the parameters out, and refuse state that no packet carries."""
        for name, part in self.module.named_modules():
            if isinstance(part, _BatchNorm) and part.training and part.track_running_stats:
                raise ValueError(
                    f"{name or 'the module'} is {type(part).__name__} in training mode: its running statistics are state that no message "
                    f"carries; use GroupNorm, or freeze its statistics with .eval()"
                )
        named = {name: part for name, part in self.module.named_parameters() if name not in self.frozen}
        gated = [name for name in named if not any(fnmatch(name, pattern) for pattern in self.free)]
        if not gated:
            raise ValueError("the module has no parameters with a gate, so there is nothing to choose from")
        places, at = {}, 0
        for name in (*gated, *(name for name in named if name not in gated)):
            places[name] = (slice(at, at + named[name].numel()), tuple(named[name].shape))
            at += named[name].numel()
        size = places[gated[-1]][0].stop
        object.__setattr__(self, "places", places)
        groups = None if self.group is Group.WEIGHT else numbered([places[name][1] for name in gated], self.group, at - size)
        object.__setattr__(self, "layout", Layout(at, {name: places[name] for name in gated}, at - size, groups))

    @cached_property
    def orderly(self) -> bool:
        """Compiled convolutions pay."""
        return keeps_order(self.module)

    @property
    def random(self) -> bool:
        """A step may need noise of its own (dropout, in a layer or in a forward), so it always gets some."""
        return True

    def flat(self, module: nn.Module) -> Float[Tensor, " p"]:
        """A module's parameters as one vector."""
        named = dict(module.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.places])

    def initial(self, draw: Draw) -> Float[Tensor, " p"]:
        """Fresh weights from the seed where the module can be built anew, else the module's own."""
        noise = draw("start", 1)
        if self.build is None:
            return self.flat(self.module).to(noise)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(noise.double() * 2**31))
            return self.flat(self.build()).to(noise)

    def named(self, theta: Float[Tensor, "*k p"]) -> dict[str, Tensor]:
        """The flat vector as the module's parameters, (*k, ...)."""
        parts = theta.split([part.stop - part.start for part, _ in self.places.values()], dim=-1)
        return {name: part.view(*theta.shape[:-1], *shape) for part, (name, (_, shape)) in zip(parts, self.places.items(), strict=True)}

    @cached_property
    def homes(self) -> list[tuple[dict[str, Tensor | None], str, str]]:
        """Where the module keeps each parameter, a tied one in several places, and its name."""
        names = {part: name for name, part in self.module.named_parameters()}
        held = [(part._parameters, key, names.get(value)) for part in self.module.modules() for key, value in part._parameters.items()]
        return [(home, key, name) for home, key, name in held if name in self.places]

    def _outputs(self, named: dict[str, Tensor], x: Tensor) -> Tensor:
        """The module's outputs at other parameters, put in place for the call; `functional_call` takes a tenth of a small step to do so."""
        own = [home[key] for home, key, _ in self.homes]
        try:
            for home, key, name in self.homes:
                home[key] = named[name]
            return self.module(x)
        finally:
            for (home, key, _), part in zip(self.homes, own, strict=True):
                home[key] = part

    def _value(self, named: dict[str, Tensor], x: Tensor, y: Tensor) -> Float[Tensor, ""]:
        return self.loss(self._outputs(named, x), y)

    def gradient(self, theta: Float[Tensor, "k p"], batch: Batch) -> tuple[Float[Tensor, " k"], Float[Tensor, "k p"]]:
        """Mean loss and gradient of each client of the stack; in the parameters one by one, as a slice's derivative is as long as theta."""
        if len(theta) > 1 and not any(isinstance(part, LOOPED) for part in self.module.modules()):
            try:
                gradients, losses = vmap(grad_and_value(self._value), randomness="error")(self.named(theta), batch.x, batch.y)
                return losses, torch.cat([gradients[name].flatten(1) for name in self.places], dim=-1)
            except RuntimeError:
                pass  # noise in a forward, or something vmap cannot do: one client after another
        pairs = [self._one(theta[k], batch.x[k], batch.y[k], None if batch.keys is None else batch.keys[k]) for k in range(len(theta))]
        return torch.stack([loss for loss, _ in pairs]), torch.stack([gradient for _, gradient in pairs])

    def _one(self, theta: Float[Tensor, " p"], x: Tensor, y: Tensor, key: int | None) -> tuple[Float[Tensor, ""], Float[Tensor, " p"]]:
        leaves = {name: part.detach().requires_grad_() for name, part in self.named(theta).items()}
        with seeded(key, theta.device), Compiled(convolutions=self.orderly):
            loss = self._value(leaves, x, y)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return loss.detach(), torch.cat([gradient.reshape(-1) for gradient in gradients])

    def predict(self, theta: Float[Tensor, " p"], x: Tensor) -> Tensor:
        """Outputs in evaluation mode, some rows at a time."""
        training = [part for part in self.module.modules() if part.training]
        self.module.eval()
        try:
            with torch.no_grad():
                return torch.cat([self._outputs(self.named(theta), rows) for rows in x.split(ROWS_AT_ONCE)])
        finally:
            for part in training:
                part.training = True

    def empty_loss(self, batch: Batch) -> Float[Tensor, " k"]:
        """A module of zeros is no guess that means anything: any loss may be."""
        return torch.full((len(batch.y),), inf, device=batch.y.device)

    def smoothness(self, rows: Batch, batch: int) -> Tensor:
        """Modules have no bound on their curvature."""
        raise ValueError("algorithm.step-rule capped needs a bound on the curvature, which only linear models have; use polyak or constant")
