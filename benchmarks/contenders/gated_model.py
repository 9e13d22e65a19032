"""The gated linear model as a plain module: what a rival in PyTorch trains. Nothing of fedsieve is imported."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import Workload

TEMPERATURE, LOW, HIGH = 0.66, -0.1, 1.1


class Gated(nn.Module):
    """theta = weights * gates, gates drawn anew in each step."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.weights = nn.Parameter(0.01 * torch.randn(work.outputs, work.features))
        self.log_alpha = nn.Parameter(torch.full((work.outputs, work.features), 2.2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of a batch."""
        noisy = self.log_alpha + torch.logit(torch.rand_like(self.log_alpha), eps=1e-6)
        gates = (torch.sigmoid(noisy / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(0, 1)
        return functional.cross_entropy(functional.linear(x, self.weights * gates), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict:
        """None: nothing but training is timed."""
        return {}

    def optimizer(self, work: Workload) -> torch.optim.Optimizer:
        """Plain SGD with a rate for each kind of parameter."""
        groups = [{"params": [self.weights], "lr": work.rate}, {"params": [self.log_alpha], "lr": work.gate_rate}]
        return torch.optim.SGD(groups)
