"""The loop a researcher would write by hand: one client after another, nn.Parameter, autograd, torch.optim.SGD, nothing superfluous.

It trains the same models with the same gates and sends the same packets through the same encoder.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from benchmarks.workloads import Workload, draw
from fedsieve import wire
from fedsieve.core.packets import Coding, Packet, Values
from fedsieve.objectives.lenet import lenet

TEMPERATURE, LOW, HIGH = 0.66, -0.1, 1.1
OFFSET = -TEMPERATURE * torch.log(torch.tensor(-LOW / HIGH)).item()
LOSSES = {
    "squared": lambda out, y: functional.mse_loss(out[:, 0], y),
    "softmax": functional.cross_entropy,
    "lenet": functional.cross_entropy,
    "multilabel": functional.binary_cross_entropy_with_logits,
}


def gate(log_alpha: Tensor, *, sampled: bool) -> Tensor:
    """Hard concrete gates; the gradient is autograd's."""
    if sampled:
        log_alpha = log_alpha + torch.logit(torch.rand_like(log_alpha), eps=1e-6)
    return (torch.sigmoid(log_alpha / TEMPERATURE) * (HIGH - LOW) + LOW).clamp(0, 1)


def levels(values: Tensor, *, zero_free: bool) -> Values:
    """Eight bits, stochastically rounded."""
    half = 0.5 if zero_free else 0.0
    scale = values.abs().max() / (127 + half) * (1 + 1e-6)
    codes = torch.floor(values / scale - half + torch.rand_like(values)).clamp(-128 if zero_free else -127, 127).to(torch.int8)
    return Values(codes, scale, Coding.HALVES8 if zero_free else Coding.LEVELS8)


class Client:
    """One set of parameters and one optimizer, filled anew for each client."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        x, y = draw(work)
        if work.nonzero:
            self.x = csr_matrix(x, shape=(len(y), work.features))
        else:
            self.x = torch.from_numpy(x)
            self.x = self.x.view(-1, 1, 28, 28) if work.loss == "lenet" else self.x
        self.y = torch.from_numpy(y)
        self.net = lenet() if work.loss == "lenet" else None
        self.shapes = [(n, p.shape, p.numel()) for n, p in self.net.named_parameters()] if self.net else None
        self.weights = nn.Parameter(torch.zeros(work.size))
        self.log_alpha = nn.Parameter(torch.zeros(work.size))
        self.optimizer = torch.optim.SGD([{"params": [self.weights], "lr": work.rate}, {"params": [self.log_alpha], "lr": work.gate_rate}])

    def start(self) -> Tensor:
        """Weights before the first round."""
        if self.net:
            return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])
        return 0.01 * torch.randn(self.work.size)

    def fill(self, weights: Tensor, log_alpha: Tensor) -> None:
        """What was received."""
        with torch.no_grad():
            self.weights.copy_(weights)
            self.log_alpha.copy_(log_alpha)

    def deck(self, k: int) -> Tensor:
        """A client's rows in random order, often enough for all steps of a round."""
        order = k * self.work.rows + torch.randperm(self.work.rows)
        return order.repeat(-(-self.work.batch * self.work.steps // self.work.rows))

    def batch(self, deck: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The next rows of a deck."""
        picked = deck[step * self.work.batch : (step + 1) * self.work.batch]
        return (self.sparse(picked) if self.work.nonzero else self.x.index_select(0, picked)), self.y.index_select(0, picked)

    def sparse(self, picked: Tensor) -> Tensor:
        """Some rows as a sparse tensor: picked by SciPy, which torch cannot do; COO, whose backward pass is faster than CSR's."""
        rows = self.x[picked.numpy()].tocoo()
        places = torch.from_numpy(np.stack((rows.row, rows.col)).astype(np.int64))
        return torch.sparse_coo_tensor(places, torch.from_numpy(rows.data), rows.shape, is_coalesced=True, check_invariants=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The batch loss at theta = weights * gates."""
        theta = self.weights * gate(self.log_alpha, sampled=self.work.sampled)
        if self.net:
            parts = theta.split([size for *_, size in self.shapes])
            named = {name: part.view(shape) for (name, shape, _), part in zip(self.shapes, parts, strict=True)}
            out = functional_call(self.net, named, (x,))
        elif self.work.nonzero:
            out = torch.sparse.mm(x, theta.view(self.work.features, self.work.outputs))
        else:
            out = functional.linear(x, theta.view(self.work.outputs, self.work.features))
        return LOSSES[self.work.loss](out, y)


def prepare(work: Workload) -> Callable[[], None]:
    """One round, all clients."""
    client = Client(work)
    torch.manual_seed(1)
    run = flops if work.flops else flops_pa
    rounds = run(work, client)
    return lambda: next(rounds)


def flops_pa(work: Workload, client: Client):
    """Algorithm 2: local steps on weights and gates, the top m of both sent and averaged."""
    weights, log_alpha = client.start(), torch.full((work.size,), 2.2)
    multiplier, kept, number = 0.0, int(work.density * work.size), 0

    def message(weights: Tensor, log_alpha: Tensor) -> tuple[Packet, Tensor]:
        score = weights.abs() * gate(log_alpha, sampled=False).clamp_min(1e-6)
        support = torch.topk(score, kept, sorted=False).indices.sort().values
        chosen = torch.zeros(work.size, dtype=torch.bool)
        chosen[support] = True
        log_alpha = log_alpha + torch.where(chosen, 0.02, -0.02)
        fields = {"weights": levels(weights[support], zero_free=True), "log_alpha": levels(log_alpha[support], zero_free=False)}
        rest = log_alpha[~chosen].mean()
        return Packet(work.size, support, fields, {"rest_gate": rest}), support

    def received(packet: Packet) -> tuple[Tensor, Tensor]:
        dense = torch.zeros(work.size).scatter(0, packet.support, packet.fields["weights"].decode(torch.float32))
        gates = torch.full((work.size,), packet.scalars["rest_gate"]).scatter(
            0, packet.support, packet.fields["log_alpha"].decode(torch.float32)
        )
        return dense, gates

    while True:
        address = wire.Address(1, number, 0)
        with torch.no_grad():
            packet, support = message(weights, log_alpha)
            wire.encode(packet, address)
            down = received(packet)
            total, gates = torch.zeros(work.size), torch.zeros(work.size)
        for k in range(work.clients):
            client.fill(*down)
            deck = client.deck(k)
            for step in range(work.steps):
                x, y = client.batch(deck, step)
                client.optimizer.zero_grad()
                loss = client.loss(x, y)
                (loss + multiplier * torch.sigmoid(client.log_alpha + OFFSET).sum()).backward()
                client.optimizer.step()
                with torch.no_grad():
                    client.log_alpha.clamp_(-12, 12)
            with torch.no_grad():
                reply, _ = message(client.weights, client.log_alpha)
                wire.encode(reply, address, support)
                up = received(reply)
                total += up[0] / work.clients
                gates += up[1] / work.clients
        with torch.no_grad():
            sent = torch.where(down[0] != 0, weights, 0.0)
            weights = total + 0.95 * (weights - sent)
            log_alpha = gates.clamp(-12, 12)
            gap = float(torch.sigmoid(log_alpha + OFFSET).mean()) - work.density
            multiplier = multiplier + 5e-4 * gap if gap > 0 else 0.0
        number += 1
        yield


def flops(work: Workload, client: Client):
    """Algorithm 1: one gradient of weights and gates a client and exchange, dense; the server steps."""
    weights, log_alpha = nn.Parameter(client.start()), nn.Parameter(torch.full((work.size,), 2.9))
    server = torch.optim.Adam([{"params": [weights], "lr": 0.02}, {"params": [log_alpha], "lr": work.gate_rate}])
    multiplier, number = 0.0, 0

    def message(names: tuple[str, str], values: tuple[Tensor, Tensor]) -> Packet:
        return Packet(work.size, None, {n: levels(v, zero_free=False) for n, v in zip(names, values, strict=True)}, {})

    while True:
        decks = [client.deck(k) for k in range(work.clients)]
        for exchange in range(work.steps):
            address = wire.Address(1, number, exchange)
            with torch.no_grad():
                packet = message(("weights", "log_alpha"), (weights, log_alpha))
                wire.encode(packet, address)
                client.fill(*(values.decode(torch.float32) for values in packet.fields.values()))
            server.zero_grad()
            probability = torch.sigmoid(log_alpha + OFFSET)
            (multiplier * probability.sum()).backward()
            weights.grad = torch.zeros_like(weights)
            for deck in decks:
                client.optimizer.zero_grad()
                client.loss(*client.batch(deck, exchange)).backward()
                reply = message(("gradient", "gate_gradient"), (client.weights.grad, client.log_alpha.grad))
                wire.encode(reply, address)
                weights.grad += reply.fields["gradient"].decode(torch.float32) / work.clients
                log_alpha.grad += reply.fields["gate_gradient"].decode(torch.float32) / work.clients
            server.step()
            with torch.no_grad():
                log_alpha.clamp_(-12, 12)
                gap = float(probability.mean()) - work.density
                multiplier = multiplier + 5e-4 / work.steps * gap if gap > 0 else 0.0
        number += 1
        yield
