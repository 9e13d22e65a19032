"""The gated linear model as a plain module, for rivals that use PyTorch. Does not import fedsieve."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import Workload

TEMPERATURE, LOW, HIGH = 0.66, -0.1, 1.1


class GatedLinear(nn.Module):
    """theta = weights * gates, with gates sampled in each step."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.weights = nn.Parameter(0.01 * torch.randn(workload.num_outputs, workload.num_features))
        self.log_alpha = nn.Parameter(torch.full((workload.num_outputs, workload.num_features), 2.2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of a batch."""
        noisy = self.log_alpha + torch.logit(torch.rand_like(self.log_alpha), eps=1e-6)
        gates = (torch.sigmoid(noisy / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(0, 1)
        return functional.cross_entropy(functional.linear(x, self.weights * gates), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict:
        """Return no metrics, because only training is timed."""
        return {}

    def build_optimizer(self, workload: Workload) -> torch.optim.Optimizer:
        """Return plain SGD with separate rates for weights and gates."""
        groups = [{"params": [self.weights], "lr": workload.learning_rate}, {"params": [self.log_alpha], "lr": workload.gate_learning_rate}]
        return torch.optim.SGD(groups)
