"""log_alpha of the gates of a model: its start, its values at weights without a gate, and what is reported of it."""

from math import log
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from fedsieve.algorithms.option_rules import require_positive
from fedsieve.core import gates
from fedsieve.core.gates import LOG_ALPHA_LIMIT, GateAtTest, HardConcrete
from fedsieve.core.types import Layout


@runtime_checkable
class HasGates(Protocol):
    """A server state with gates; theta~ is `weights`."""

    @property
    def weights(self) -> Tensor:
        """theta~."""
        ...

    @property
    def log_alpha(self) -> Tensor:
        """phi."""
        ...

    @property
    def multiplier(self) -> Tensor:
        """lambda."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        ...


@runtime_checkable
class HasGateDistribution(Protocol):
    """An algorithm with gates."""

    @property
    def shape(self) -> HardConcrete:
        """The distribution of the gates."""
        ...


def initial_log_alpha(initial_gate_probability: float) -> float:
    """Return logit rho_init, clamped to the limits of log_alpha."""
    require_positive(initial_gate_probability=initial_gate_probability)
    if not initial_gate_probability < 1:
        raise ValueError(f"algorithm.initial-gate-probability must be below 1, where its logit is infinite; got {initial_gate_probability}")
    return max(-LOG_ALPHA_LIMIT, min(log(initial_gate_probability / (1 - initial_gate_probability)), LOG_ALPHA_LIMIT))


def open_ungated(log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
    """Return log_alpha with the gates of ungated coordinates fully open."""
    if not layout.num_ungated:
        return log_alpha
    fully_open = torch.full_like(log_alpha[..., layout.num_gated :], LOG_ALPHA_LIMIT)
    return torch.cat((log_alpha[..., : layout.num_gated], fully_open), dim=-1)


def open_nonzero(theta: Float[Tensor, "*k p"]) -> Float[Tensor, "*k p"]:
    """Return log_alpha of gates that are open where theta is not 0, and closed elsewhere."""
    return torch.where(theta != 0, LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT).to(theta)


def zero_ungated(log_alpha: Float[Tensor, "*k p"], layout: Layout) -> Float[Tensor, "*k p"]:
    """Return log_alpha with 0 at ungated coordinates: in a message their limit would determine the scale of all levels."""
    if not layout.num_ungated:
        return log_alpha
    return torch.cat((log_alpha[..., : layout.num_gated], torch.zeros_like(log_alpha[..., layout.num_gated :])), dim=-1)


def gate_diagnostics(shape: HardConcrete, server: HasGates, density: float, test_gate: GateAtTest = GateAtTest.MEDIAN) -> dict[str, Tensor]:
    """Return expected and test-time density, the multiplier and the violation of the constraint."""
    log_alpha = server.log_alpha[: server.layout.num_gated]
    probability = gates.active_probability(shape, log_alpha)
    return {
        "expected_density": probability.mean(),
        "test_density": (gates.compute_test_gates(shape, log_alpha, test_gate) > 0).to(probability).mean(),
        "multiplier": server.multiplier,
        "violation": probability.mean() - density,
    }
