"""A lower bound of the time of a round: products at the best GEMM rate, bytes at memory bandwidth, and the arithmetic of gates.

The three rates are measured during the benchmark, so that other work on the machine slows the bound as it slows the contenders.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.workloads import Workload

FORWARD_OPERATIONS = {
    "lenet": 2 * (24 * 24 * 6 * 25 + 8 * 8 * 16 * 150 + 256 * 120 + 120 * 84 + 84 * 10),
    "cifar_cnn": 2 * (32 * 32 * (32 * 27 + 64 * 288) + 16 * 16 * 64 * 576 + 8 * 8 * 32 * 576 + 512 * 512 + 512 * 256 + 256 * 10),
}
"""Floating-point operations of one forward pass of one image; a backward pass takes twice as many."""


class RoundCost(NamedTuple):
    """The cost of one round."""

    operations: float
    bytes_moved: float
    """bytes read and written: examples once per step; weights and log_alpha once each way per client and round"""
    gate_evaluations: float
    """gates evaluated with their derivative"""


def round_cost(workload: Workload) -> RoundCost:
    """Return the minimum work of a round. Dense examples use all weights; sparse ones those of their features, and all for the top m."""
    if workload.nonzero_per_example:
        features = mean_batch_features(workload)
        a_step = RoundCost(
            4 * workload.batch_size * workload.nonzero_per_example * workload.num_outputs,
            16 * features * workload.num_outputs,
            features * workload.num_outputs,
        )
    else:
        network = FORWARD_OPERATIONS.get(workload.loss)
        operations = workload.batch_size * (4 * workload.size if network is None else 3 * network)
        a_step = RoundCost(operations, 4 * workload.batch_size * workload.num_features, workload.size)
    visits = workload.num_clients * (workload.local_steps if workload.exchanges_gradients else 1)
    chosen = 0 if workload.exchanges_gradients else workload.num_clients * workload.size
    return RoundCost(a_step.operations * workload.client_steps, a_step.bytes_moved * workload.client_steps + 16 * workload.size * visits,
                 a_step.gate_evaluations * workload.client_steps + chosen)  # fmt: skip


def mean_batch_features(workload: Workload) -> float:
    """Return the mean number of features in a batch of sparse examples."""
    import numpy as np

    from benchmarks.workloads import draw_examples

    (_, columns, ends), _ = draw_examples(workload)
    return float(
        np.mean(
            [
                len(np.unique(columns[ends[i] : ends[i + workload.batch_size]]))
                for i in range(0, len(ends) - workload.batch_size, workload.batch_size)
            ]
        )
    )


def min_cpu_seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the minimum CPU time of a call."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        taken.append(time.process_time() - began)
    return min(taken)


def prepare(workload: Workload) -> Callable[[], float]:
    """Return a function that computes the bound of one round in seconds."""
    need = round_cost(workload)
    square, many = torch.randn(512, 512), torch.randn(4_000_000)
    product, copy = torch.empty_like(square), torch.empty_like(many)
    inputs, one, two = torch.randn(8192), torch.empty(8192), torch.empty(8192)

    def evaluate_gates() -> None:
        """Compute sigmoid, stretch and clip, dz/dphi and two products with a gradient: the minimum cost of a gate."""
        if workload.samples_gates:
            one.uniform_().logit_(1e-6).add_(inputs).sigmoid_()
        else:
            torch.sigmoid(inputs, out=one)
        torch.mul(one, one, out=two).sub_(one).mul_(inputs)
        one.mul_(1.2).sub_(0.1).clamp_(0, 1).mul_(inputs)

    def min_round_seconds() -> float:
        a_product = min_cpu_seconds(lambda: torch.mm(square, square, out=product)) / (2 * 512**3)
        a_byte = min_cpu_seconds(lambda: copy.copy_(many)) / (8 * len(many))
        a_gate = min_cpu_seconds(evaluate_gates, 20) / len(inputs)
        return need.operations * a_product + need.bytes_moved * a_byte + need.gate_evaluations * a_gate

    return min_round_seconds
