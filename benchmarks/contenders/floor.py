"""What no implementation can do without: products at the best GEMM rate, bytes at memory bandwidth, gates at the cost of their arithmetic.

The three rates are measured here and now, so a busy machine slows the floor as it slows the contenders.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.workloads import Workload

LENET_FORWARD = 2 * (24 * 24 * 6 * 25 + 8 * 8 * 16 * 150 + 256 * 120 + 120 * 84 + 84 * 10)
"""Floating-point operations of one forward pass of one image; a backward pass takes twice as many."""


class Needs(NamedTuple):
    """What one round takes."""

    operations: float
    moved: float
    """bytes that cross the memory bus: rows once a step; weights and log_alpha once in and once out a client and round"""
    gates: float
    """gates evaluated with their derivative"""


def needs(work: Workload) -> Needs:
    """The least work of a round: dense rows touch all weights; sparse rows those of their features, and all of them once, to choose."""
    if work.nonzero:
        features = touched(work)
        a_step = Needs(4 * work.batch * work.nonzero * work.outputs, 16 * features * work.outputs, features * work.outputs)
    else:
        operations = 3 * LENET_FORWARD * work.batch if work.loss == "lenet" else 4 * work.batch * work.size
        a_step = Needs(operations, 4 * work.batch * work.features, work.size)
    visits = work.clients * (work.steps if work.flops else 1)
    chosen = 0 if work.flops else work.clients * work.size
    return Needs(a_step.operations * work.client_steps, a_step.moved * work.client_steps + 16 * work.size * visits,
                 a_step.gates * work.client_steps + chosen)  # fmt: skip


def touched(work: Workload) -> float:
    """Features in a batch of sparse rows, on average."""
    import numpy as np

    from benchmarks.workloads import draw

    (_, columns, ends), _ = draw(work)
    return float(np.mean([len(np.unique(columns[ends[i] : ends[i + work.batch]])) for i in range(0, len(ends) - work.batch, work.batch)]))


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """The least CPU time of a call."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def prepare(work: Workload) -> Callable[[], float]:
    """The floor of one round in seconds."""
    need = needs(work)
    square, many = torch.randn(512, 512), torch.randn(4_000_000)
    product, copy = torch.empty_like(square), torch.empty_like(many)
    inputs, one, two = torch.randn(8192), torch.empty(8192), torch.empty(8192)

    def gates() -> None:
        """sigmoid, stretch and clip, dz/dphi, two products with a gradient: what a gate costs at least."""
        if work.sampled:
            one.uniform_().logit_(1e-6).add_(inputs).sigmoid_()
        else:
            torch.sigmoid(inputs, out=one)
        torch.mul(one, one, out=two).sub_(one).mul_(inputs)
        one.mul_(1.2).sub_(0.1).clamp_(0, 1).mul_(inputs)

    def seconds() -> float:
        a_product = best(lambda: torch.mm(square, square, out=product)) / (2 * 512**3)
        a_byte = best(lambda: copy.copy_(many)) / (8 * len(many))
        a_gate = best(gates, 20) / len(inputs)
        return need.operations * a_product + need.moved * a_byte + need.gates * a_gate

    return seconds
