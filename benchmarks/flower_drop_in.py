"""What a training function that shows only its result costs: SparseStrategy against our own loop, with the same local steps.

PYTHONPATH=tests python -m benchmarks.flower_drop_in [--seeds 0 1 2] [--tasks digits mnist quickstart]

Five clients (labels by Dirichlet .5), 20 rounds of 10 local steps of SGD with batches of 64, gradients clipped to 1, a learning rate that
falls from .8 along half a cosine. Seeds from 100 are for choices: they are judged on a fifth of the training examples.
"""

import argparse
import logging
import tempfile
from functools import cache, partial
from math import cos, pi
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.networks import draw_batches
from fedsieve import fit
from fedsieve.algorithms import algorithm_class
from fedsieve.algorithms.defaults import network_options
from fedsieve.data.builtin import load_digits, load_mnist
from fedsieve.data.partition import partition_by_label
from fedsieve.flower import SparseStrategy, sparse_mod
from helpers.flower_app import ProcessGrid
from helpers.flower_quickstart import PARTITIONS, convert, copy, run_in_process

CLIENTS, ROUNDS, LOCAL_STEPS, LEARNING_RATE, FINAL_FRACTION = 5, 20, 10, 0.8, 0.02
FIRST_TUNING_SEED = 100
DENSITY = {"digits": 0.1, "mnist": 0.02}
TASKS = [*DENSITY, "quickstart"]


class Examples(NamedTuple):
    """The examples of each client, and those on which the model is judged."""

    clients: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]


class Outcome(NamedTuple):
    """Accuracy of the final model, and all bytes of training messages."""

    accuracy: float
    num_bytes: int


@cache
def load_arrays(task: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return training and test examples; of MNIST the first 6,000 and 2,000."""
    pairs = {"digits": load_digits, "mnist": load_mnist}[task](None)
    limits = (6000, 2000)
    train, test = ((np.asarray(x)[:n].reshape(min(n, len(x)), -1), np.asarray(y)[:n]) for (x, y), n in zip(pairs[:2], limits, strict=True))
    return train, test


def make_examples(task: str, seed: int) -> Examples:
    """Return the examples of one seed."""
    rng = np.random.default_rng(seed)
    (x, y), test = load_arrays(task)
    scale = float(np.abs(x).max())
    if seed >= FIRST_TUNING_SEED:
        order, num_train = rng.permutation(len(x)), len(x) * 4 // 5
        test, (x, y) = (x[order[num_train:]], y[order[num_train:]]), (x[order[:num_train]], y[order[:num_train]])
    parts = partition_by_label(y.astype(np.int64), CLIENTS, 0.5, rng)
    tensors = [(torch.tensor(x[rows] / scale, dtype=torch.float32), torch.tensor(y[rows].astype(np.int64))) for rows in parts]
    return Examples(tensors, (torch.tensor(test[0] / scale, dtype=torch.float32), torch.tensor(test[1].astype(np.int64))))


def make_net(task: str) -> nn.Module:
    """Return the network of a task; its biases have no gates in any condition."""
    return nn.Sequential(nn.Linear(64 if task == "digits" else 784, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(net: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """Return the share of correct predictions."""
    with torch.no_grad():
        return float((net(test[0]).argmax(1) == test[1]).float().mean())


def make_app(task: str, examples: Examples, seed: int, mods: list) -> ClientApp:
    """Return a client app with the local steps of our own loop, written by hand."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, number = context.node_config["partition-id"], message.content["config"]["server-round"] - 1
        net, (x, y) = make_net(task), examples.clients[client]
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        rate = LEARNING_RATE * (FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + cos(pi * number / ROUNDS)) / 2)
        optimizer, order = torch.optim.SGD(net.parameters(), lr=rate), np.random.default_rng((seed, number, client))
        batches = draw_batches(len(x), order)
        for _ in range(LOCAL_STEPS):
            rows = next(batches)
            optimizer.zero_grad()
            functional.cross_entropy(net(x[rows]), y[rows]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
        return Message(RecordDict(content), reply_to=message)

    return app


def run_drop_in(task: str, seed: int, *, sparse: bool = True, **options: object) -> Outcome:
    """Run Flower's FedAvg, with SparseStrategy around it if `sparse`."""
    examples = make_examples(task, seed)
    examples = examples._replace(clients=[pair for pair in examples.clients if len(pair[0])])
    torch.manual_seed(seed)
    net = make_net(task)
    strategy = FedAvg(fraction_evaluate=0.0)
    wrapped = SparseStrategy(strategy, density=DENSITY[task], seed=seed, **options) if sparse else strategy  # type: ignore[arg-type]
    grid = ProcessGrid(make_app(task, examples, seed, [sparse_mod] if sparse else []), len(examples.clients))
    result = wrapped.start(grid, ArrayRecord(net.state_dict()), ROUNDS)
    net.load_state_dict(result.arrays.to_torch_state_dict())
    rounds = result.train_metrics_clientapp.values()
    num_bytes = sum(int(row["bytes-up"]) + int(row["bytes-down"]) for row in rounds) if sparse else 0
    dense = 2 * ROUNDS * len(examples.clients) * 4 * sum(part.numel() for part in net.parameters())
    return Outcome(accuracy(net, examples.test), num_bytes if sparse else dense)


def run_own_loop(task: str, seed: int, **options: object) -> Outcome:
    """Run `fedsieve.fit`."""
    examples = make_examples(task, seed)
    torch.manual_seed(seed)
    cls = algorithm_class("sieve")
    settings = network_options(cls) | {"local_steps": LOCAL_STEPS, "batch_size": BATCH_SIZE} | options
    clients = [pair for pair in examples.clients if len(pair[0])]
    net, result = fit(
        make_net(task),
        functional.cross_entropy,
        clients,
        density=DENSITY[task],
        algorithm=cls(**settings),
        rounds=ROUNDS,
        seed=seed,
        ungated=("*.bias",),
        workers=1,
    )
    return Outcome(accuracy(net, examples.test), result.bytes_up + result.bytes_down)


CONDITIONS = {
    "Flower's FedAvg, dense": partial(run_drop_in, sparse=False),
    "own loop, sieve": run_own_loop,
    "SparseStrategy, sieve": run_drop_in,
    "SparseStrategy, sieve, gates learned": partial(run_drop_in, learn_gates=True),
}


def print_quickstart() -> None:
    """Print the accuracy of Flower's quickstart before and after the conversion, and the bytes of a client in a round."""
    with tempfile.TemporaryDirectory() as folder:
        results = {"before": run_in_process(copy(Path(folder) / "plain")), "after": run_in_process(convert(Path(folder) / "sparse"))}
    size = sum(count for _, count in results["before"]["nonzero"].values())
    for name, result in results.items():
        rounds = result["train"].values()
        up, down = (
            sum(row.get(key, PARTITIONS * 4 * size) for row in rounds) / len(rounds) / PARTITIONS for key in ("bytes-up", "bytes-down")
        )
        print(f"| {name} | {result['server'][str(len(rounds))]['accuracy']:.3f} | {up:,.0f} | {down:,.0f} |", flush=True)


def main() -> None:
    """Print the accuracy and the bytes of every condition, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--gate-rates", type=float, nargs="*", help="compare only these rates of learned gates")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity._task_id = TaskIdentity._run_id = TaskIdentity._node_id = 1
    tuned = {
        f"SparseStrategy, sieve, gate_rate {rate:g}": partial(run_drop_in, learn_gates=True, gate_rate=rate)
        for rate in arguments.gate_rates or ()
    }
    if "quickstart" in arguments.tasks:
        print_quickstart()
    for task in [task for task in arguments.tasks if task in DENSITY]:
        for seed in arguments.seeds:
            for name, run in (tuned or CONDITIONS).items():
                outcome = run(task, seed)
                print(f"| {task} | {name} | {seed} | {outcome.accuracy:.3f} | {outcome.num_bytes / 1000:,.0f} kB |", flush=True)


if __name__ == "__main__":
    main()
