"""How engines run FLoPS-PA on sparse examples: an in-place local step, and the drift of gates without a gradient."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedsieve.algorithms.gated import GatedAlgorithm
from fedsieve.core import constraint
from fedsieve.core.feature_tables import FeatureTables
from fedsieve.core.packets import Packet
from fedsieve.core.protocols import EngineSupport, LinearObjective, MemorySupport
from fedsieve.core.random import Draw
from fedsieve.core.types import Batch, Clock

MAX_FIRST_ORDER_DRIFT = 0.01
"""The largest drift of log_alpha over a round that is applied in one step instead of step by step."""


def kept_multiplier(client: Any, _: Packet) -> dict[str, Float[Tensor, " k"]]:
    """Return the multipliers of a stack of clients after their local steps."""
    return {"multiplier": client.multiplier}


MULTIPLIER_MEMORY = MemorySupport(vectors=("multiplier",), after_reply=kept_multiplier, one_number=True)
"""Each client's own multiplier (decision B6)."""


def gated_support(
    algorithm: GatedAlgorithm, *, deterministic: bool, unseen_weights_are_equal: bool, has_client_multiplier: bool
) -> EngineSupport:
    """Return the engine support; local steps use median gates if `deterministic`, else sampled gates.

    A client with a multiplier of its own keeps it between its rounds, and ascends it on all gates.
    """

    def apply_skipped_steps(client: Any, num_skipped: Float[Tensor, "k p"], clock: Clock) -> Any:
        return client._replace(log_alpha=drift_log_alpha(algorithm, client, num_skipped, clock))

    def fused_step(objective: LinearObjective, client: Any, indices: Int64[Tensor, " n"], batch: Batch, clock: Clock, draw: Draw) -> bool:
        layout = objective.layout
        if layout.num_ungated or layout.groups is not None or algorithm.max_gradient_norm < torch.inf:
            return False
        noise = None if deterministic else draw("gates 0", layout.size)
        step_in_place(algorithm, objective, client, indices, batch, clock, noise)
        return True

    single = algorithm.gate_samples == 1 and not algorithm.entropy
    return EngineSupport(
        vector_fields=("weights", "log_alpha"),
        replies_have_equal_length=algorithm.replies_have_equal_length,
        unseen_weights_are_equal=unseen_weights_are_equal,
        apply_skipped_steps=apply_skipped_steps,
        fused_step=fused_step if single else None,
        needs_all_weights="algorithm.dual-location client needs all gates in every local step" if has_client_multiplier else None,
        memory=MULTIPLIER_MEMORY if has_client_multiplier else None,
    )


def step_in_place(
    algorithm: GatedAlgorithm,
    objective: LinearObjective,
    client: Any,
    indices: Int64[Tensor, " n"],
    batch: Batch,
    clock: Clock,
    noise: Float[Tensor, "1 m"] | None,
) -> None:
    """Take a local step on the features `indices`, in place: no vector is copied. Gates are medians, or sampled with the noise."""
    tables = FeatureTables(*(part.view(-1, objective.num_outputs) for part in (client.weights, client.log_alpha)))
    theta, value, derivative = tables.active_gates(algorithm.shape, indices, noise)
    loss, gradient = objective.gradient(theta, batch)
    by_weight, rate = value.mul_(gradient), algorithm.gate_rate * algorithm.learning_rate_factor(clock)
    step_size = algorithm.step_size(objective, loss, by_weight, batch, clock)
    size, scale = client.layout.num_gated, algorithm.constraint_scale
    tables.gated_step(
        algorithm.shape,
        indices,
        by_weight,
        (gradient, derivative),
        step_size,
        client.multiplier,
        scale,
        size,
        rate,
        algorithm.log_alpha_limit,
    )


def drift_log_alpha(algorithm: GatedAlgorithm, client: Any, num_skipped: Float[Tensor, "k p"], clock: Clock) -> Float[Tensor, "k p"]:
    """Return log_alpha after the constraint's drift in `num_skipped` steps: first order at once if it is small, else step by step.

    A drift of lambda/p per step could be rounded to zero in float32; its sum over a round is not.
    """
    log_alpha, layout, rate = client.log_alpha, client.layout, algorithm.gate_rate * algorithm.learning_rate_factor(clock)
    strength = float(client.multiplier.abs().max()) + algorithm.entropy
    num_steps = 1 if rate * algorithm.local_steps * strength < MAX_FIRST_ORDER_DRIFT else algorithm.local_steps
    if num_steps == 1 and not algorithm.entropy and layout.groups is None:
        scale, size = algorithm.constraint_scale, layout.num_gated
        limit = algorithm.log_alpha_limit
        return constraint.apply_penalty(algorithm.shape, log_alpha, num_skipped, client.multiplier, scale, size, rate, limit)
    for step in range(num_steps):
        times = num_skipped if num_steps == 1 else (num_skipped > step).to(log_alpha)
        drift = algorithm.penalty_gradient(log_alpha, client.multiplier, layout.num_gated, layout.groups).mul_(times)
        log_alpha = log_alpha.sub(drift, alpha=rate)
    return log_alpha.clamp_(-algorithm.log_alpha_limit, algorithm.log_alpha_limit)
