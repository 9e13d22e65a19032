"""`python -m benchmarks.wire`: sizes of packets with the entropy limit, and coding time relative to a local step of the same model."""

import time
from math import lgamma, log

import numpy as np
import torch

from fedsieve.core.packets import Packet, sparse_packet
from fedsieve.core.quantization import quantize_gates
from fedsieve.core.random import client_sampler
from fedsieve.core.types import Batch
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.wire import MessageId, decode, encode

MESSAGE_ID = MessageId(1, 2, 3)
MODELS = {(7_840, 392): (784, 10), (48_608, 243): (784, 62), (1_606_024, 8_030): (47_236, 34)}


def random_packet(n: int, m: int, rng: np.random.Generator) -> Packet:
    """Return a FLoPS-PA message with a random support: 8-bit weights, 8-bit gates and the default gate."""
    support = torch.from_numpy(np.sort(rng.choice(n, m, replace=False)))
    draw = client_sampler(0, 0, 0, 0, [0], torch.float32)
    packet = sparse_packet(support[None], {"weights": torch.from_numpy(rng.standard_normal((1, n), dtype=np.float32))}, 8, draw)
    gates = quantize_gates(torch.from_numpy(rng.random((1, m), dtype=np.float32)), 8, draw, "gates")
    return Packet(n, packet.support, {**packet.fields, "gates": gates}, {"default_gate": torch.tensor([0.3])}).unstack()[0]


def min_cpu_seconds(function, repeats: int) -> float:
    """Return the minimum CPU time of one call."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


def make_training_step(features: int, outputs: int, rng: np.random.Generator):
    """Return a function that takes one local step of a linear model, batch size 32."""
    objective = Linear(loss=Loss.SOFTMAX, num_features=features, num_outputs=outputs)
    theta = torch.zeros(1, objective.layout.size)
    batch = Batch(
        torch.from_numpy(rng.standard_normal((1, 32, features), dtype=np.float32)), torch.from_numpy(rng.integers(0, outputs, (1, 32)))
    )
    return lambda: theta - 0.1 * objective.gradient(theta, batch)[1]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print(
        f"{'n':>10} {'m':>6} {'limit':>7} {'positions':>9} {'packet':>7} {'4m':>7} {'95 % known, bits/position':>26} {'coding / step':>14}"
    )
    for (n, m), (features, outputs) in MODELS.items():
        packet = random_packet(n, m, rng)
        encoded = encode(packet, MESSAGE_ID)
        message = encoded.to_bytes()
        limit = (lgamma(n + 1) - lgamma(m + 1) - lgamma(n - m + 1)) / log(2) / 8
        changed = round(0.05 * m)
        kept = rng.choice(packet.support.numpy(), m - changed, replace=False)
        added = rng.choice(np.setdiff1d(np.arange(n), packet.support.numpy()), changed, replace=False)
        moved = Packet(n, torch.from_numpy(np.sort(np.concatenate((kept, added)))), {}, {})
        known = 8 * len(encode(moved, MESSAGE_ID, packet.support).positions) / m
        coding = min_cpu_seconds(lambda p=packet, s=message, n=n: (encode(p, MESSAGE_ID).to_bytes(), decode(s, MESSAGE_ID, n)), 20)
        ratio = coding / min_cpu_seconds(make_training_step(features, outputs, rng), 5)
        print(f"{n:>10} {m:>6} {limit:>7.0f} {len(encoded.positions):>9} {len(message):>7} {4 * m:>7} {known:>26.2f} {ratio:>14.3f}")


if __name__ == "__main__":
    main()
