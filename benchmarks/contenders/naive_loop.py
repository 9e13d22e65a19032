"""A simple loop as written for an experiment: one client after another, nn.Parameter, autograd, torch.optim.SGD.

It trains the same models with the same gates and sends the same packets through the same encoder.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.contenders.fedsieve import NETWORKS
from benchmarks.workloads import IMAGE_SHAPES, Workload, draw_examples
from fedsieve import wire
from fedsieve.core.packets import Packet
from fedsieve.core.quantization import Coding, QuantizedField

TEMPERATURE, LOW, HIGH = 0.66, -0.1, 1.1
LOGIT_OFFSET = -TEMPERATURE * torch.log(torch.tensor(-LOW / HIGH)).item()
LOSSES = {
    "squared": lambda out, y: functional.mse_loss(out[:, 0], y),
    "softmax": functional.cross_entropy,
    "lenet": functional.cross_entropy,
    "cifar_cnn": functional.cross_entropy,
    "multilabel": functional.binary_cross_entropy_with_logits,
}


def compute_gates(log_alpha: Tensor, *, sampled: bool) -> Tensor:
    """Return hard concrete gates; autograd computes the gradient."""
    if sampled:
        log_alpha = log_alpha + torch.logit(torch.rand_like(log_alpha), eps=1e-6)
    return (torch.sigmoid(log_alpha / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(0, 1)


def quantize(values: Tensor, *, zero_free: bool) -> QuantizedField:
    """Return the values in eight bits, stochastically rounded."""
    half = 0.5 if zero_free else 0.0
    scale = values.abs().max() / (127 + half) * (1 + 1e-6)
    codes = torch.floor(values / scale - half + torch.rand_like(values)).clamp(-128 if zero_free else -127, 127).to(torch.int8)
    return QuantizedField(codes, scale, Coding.MIDPOINT8 if zero_free else Coding.LEVELS8)


class ClientModel:
    """One set of parameters and one optimizer, which all clients use in turn."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        x, y = draw_examples(workload)
        if workload.nonzero_per_example:
            self.x = csr_matrix(x, shape=(len(y), workload.num_features))
        else:
            self.x = torch.from_numpy(x)
            self.x = self.x.view(-1, *IMAGE_SHAPES[workload.loss]) if workload.loss in IMAGE_SHAPES else self.x
        self.y = torch.from_numpy(y)
        self.net = NETWORKS[workload.loss]() if workload.loss in NETWORKS else None
        self.shapes = [(n, p.shape, p.numel()) for n, p in self.net.named_parameters()] if self.net else None
        self.weights = nn.Parameter(torch.zeros(workload.size))
        self.log_alpha = nn.Parameter(torch.zeros(workload.size))
        self.optimizer = torch.optim.SGD(
            [{"params": [self.weights], "lr": workload.learning_rate}, {"params": [self.log_alpha], "lr": workload.gate_learning_rate}]
        )

    def initial_weights(self) -> Tensor:
        """Return the weights before the first round."""
        if self.net:
            return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])
        return 0.01 * torch.randn(self.workload.size)

    def load(self, weights: Tensor, log_alpha: Tensor) -> None:
        """Set the parameters to those of a broadcast."""
        with torch.no_grad():
            self.weights.copy_(weights)
            self.log_alpha.copy_(log_alpha)

    def epoch_order(self, k: int) -> Tensor:
        """Return a client's examples in random order, repeated to suffice for all steps of a round."""
        order = k * self.workload.examples_per_client + torch.randperm(self.workload.examples_per_client)
        return order.repeat(-(-self.workload.batch_size * self.workload.local_steps // self.workload.examples_per_client))

    def batch(self, order: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step."""
        indices = order[step * self.workload.batch_size : (step + 1) * self.workload.batch_size]
        x = self.sparse_batch(indices) if self.workload.nonzero_per_example else self.x.index_select(0, indices)
        return x, self.y.index_select(0, indices)

    def sparse_batch(self, indices: Tensor) -> Tensor:
        """Return examples as a sparse tensor: COO, because its backward pass is faster than that of CSR."""
        rows = self.x[indices.numpy()].tocoo()
        positions = torch.from_numpy(np.stack((rows.row, rows.col)).astype(np.int64))
        return torch.sparse_coo_tensor(positions, torch.from_numpy(rows.data), rows.shape, is_coalesced=True, check_invariants=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch at theta = weights * gates."""
        theta = self.weights * compute_gates(self.log_alpha, sampled=self.workload.samples_gates)
        if self.net:
            parts = theta.split([size for *_, size in self.shapes])
            named = {name: part.view(shape) for (name, shape, _), part in zip(self.shapes, parts, strict=True)}
            out = functional_call(self.net, named, (x,))
        elif self.workload.nonzero_per_example:
            out = torch.sparse.mm(x, theta.view(self.workload.num_features, self.workload.num_outputs))
        else:
            out = functional.linear(x, theta.view(self.workload.num_outputs, self.workload.num_features))
        return LOSSES[self.workload.loss](out, y)


def prepare(workload: Workload) -> Callable[[], None]:
    """Return a function that trains one round of all clients."""
    client = ClientModel(workload)
    torch.manual_seed(1)
    run = run_flops if workload.exchanges_gradients else run_flops_pa
    rounds = run(workload, client)
    return lambda: next(rounds)


def run_flops_pa(workload: Workload, client: ClientModel):
    """Yield after every round of Algorithm 2: local steps on weights and gates, the top m of both are sent and averaged."""
    weights, log_alpha = client.initial_weights(), torch.full((workload.size,), 2.2)
    multiplier, kept, round = 0.0, int(workload.density * workload.size), 0

    def encode_message(weights: Tensor, log_alpha: Tensor) -> tuple[Packet, Tensor]:
        score = weights.abs() * compute_gates(log_alpha, sampled=False).clamp_min(1e-6)
        support = torch.topk(score, kept, sorted=False).indices.sort().values
        chosen = torch.zeros(workload.size, dtype=torch.bool)
        chosen[support] = True
        log_alpha = log_alpha + torch.where(chosen, 0.02, -0.02)
        fields = {"weights": quantize(weights[support], zero_free=True), "log_alpha": quantize(log_alpha[support], zero_free=False)}
        rest = log_alpha[~chosen].mean()
        return Packet(workload.size, support, fields, {"default_gate": rest}), support

    def decode_message(packet: Packet) -> tuple[Tensor, Tensor]:
        dense = torch.zeros(workload.size).scatter(0, packet.support, packet.fields["weights"].decode(torch.float32))
        gates = torch.full((workload.size,), packet.scalars["default_gate"]).scatter(
            0, packet.support, packet.fields["log_alpha"].decode(torch.float32)
        )
        return dense, gates

    while True:
        message_id = wire.MessageId(1, round, 0)
        with torch.no_grad():
            packet, support = encode_message(weights, log_alpha)
            wire.encode(packet, message_id)
            down = decode_message(packet)
            total, gates = torch.zeros(workload.size), torch.zeros(workload.size)
        for k in range(workload.num_clients):
            client.load(*down)
            order = client.epoch_order(k)
            for step in range(workload.local_steps):
                x, y = client.batch(order, step)
                client.optimizer.zero_grad()
                loss = client.loss(x, y)
                (loss + multiplier * torch.sigmoid(client.log_alpha + LOGIT_OFFSET).sum()).backward()
                client.optimizer.step()
                with torch.no_grad():
                    client.log_alpha.clamp_(-12, 12)
            with torch.no_grad():
                reply, _ = encode_message(client.weights, client.log_alpha)
                wire.encode(reply, message_id, support)
                up = decode_message(reply)
                total += up[0] / workload.num_clients
                gates += up[1] / workload.num_clients
        with torch.no_grad():
            sent = torch.where(down[0] != 0, weights, 0.0)
            weights = total + 0.95 * (weights - sent)
            log_alpha = gates.clamp(-12, 12)
            violation = float(torch.sigmoid(log_alpha + LOGIT_OFFSET).mean()) - workload.density
            multiplier = multiplier + 5e-4 * violation if violation > 0 else 0.0
        round += 1
        yield


def run_flops(workload: Workload, client: ClientModel):
    """Yield after every round of Algorithm 1: one dense gradient of weights and gates per client and exchange; the server steps."""
    weights, log_alpha = nn.Parameter(client.initial_weights()), nn.Parameter(torch.full((workload.size,), 2.9))
    server = torch.optim.Adam([{"params": [weights], "lr": 0.02}, {"params": [log_alpha], "lr": workload.gate_learning_rate}])
    multiplier, round = 0.0, 0

    def encode_message(names: tuple[str, str], values: tuple[Tensor, Tensor]) -> Packet:
        return Packet(workload.size, None, {n: quantize(v, zero_free=False) for n, v in zip(names, values, strict=True)}, {})

    while True:
        orders = [client.epoch_order(k) for k in range(workload.num_clients)]
        for exchange in range(workload.local_steps):
            message_id = wire.MessageId(1, round, exchange)
            with torch.no_grad():
                packet = encode_message(("weights", "log_alpha"), (weights, log_alpha))
                wire.encode(packet, message_id)
                client.load(*(values.decode(torch.float32) for values in packet.fields.values()))
            server.zero_grad()
            probability = torch.sigmoid(log_alpha + LOGIT_OFFSET)
            (multiplier * probability.sum()).backward()
            weights.grad = torch.zeros_like(weights)
            for order in orders:
                client.optimizer.zero_grad()
                client.loss(*client.batch(order, exchange)).backward()
                reply = encode_message(("gradient", "gate_gradient"), (client.weights.grad, client.log_alpha.grad))
                wire.encode(reply, message_id)
                weights.grad += reply.fields["gradient"].decode(torch.float32) / workload.num_clients
                log_alpha.grad += reply.fields["gate_gradient"].decode(torch.float32) / workload.num_clients
            server.step()
            with torch.no_grad():
                log_alpha.clamp_(-12, 12)
                violation = float(probability.mean()) - workload.density
                multiplier = multiplier + 5e-4 / workload.local_steps * violation if violation > 0 else 0.0
        round += 1
        yield
