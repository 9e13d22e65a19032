"""`python -m benchmarks.networks`: `fedsieve.fit` with its defaults on four kinds of networks, and federated averaging and pruning by hand.

Ten clients (labels by Dirichlet .5), 20 rounds. By hand means what a PyTorch user writes: FedAvg for ten rounds, then
`torch.nn.utils.prune.global_unstructured` at the server, then ten rounds that train the kept weights; all messages are dense float32. It
has the local steps, batch size, learning rate and clipping of `fit`; the rate falls along half a cosine in both parts. Parameters of
normalization layers are never pruned and not counted, as in `fit`.

Each run is a row of docs/data/networks.csv; runs that it has are not repeated. Then the table of docs/module.md is written from the file.
"""

import argparse
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import product
from math import cos, pi
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from benchmarks.stored_rows import DOCS, compute_rows, read_rows, write_section
from fedsieve import fit
from fedsieve.algorithms.defaults import NETWORK_DEFAULTS
from fedsieve.data.builtin import load_digits
from fedsieve.data.mnist import read_emnist, read_mnist
from fedsieve.data.partition import partition_by_label
from fedsieve.objectives.module import norm_parameters

DATA, PAGE = DOCS / "data" / "networks.csv", DOCS / "module.md"
CLIENTS, ROUNDS, PRUNING_ROUND = 10, 20, 10
BATCH_SIZE = 64
LEARNING_RATE, LOCAL_STEPS, MAX_NORM = (NETWORK_DEFAULTS[name] for name in ("learning_rate", "local_steps", "max_gradient_norm"))
NUM_TRAIN, NUM_TEST = 4000, 2000
PIXEL_LEVELS = 17
KEYS = ("data", "model", "density", "seed", "algorithm")
HAND = "by hand"
ALGORITHMS = ("sieve", "fed-round-ht", HAND)
MODELS = {"mlp": "MLP", "cnn": "CNN", "transformer": "transformer layer", "lstm": "embedding, LSTM"}
DATA_SETS = {"digits": "digits", "mnist": "MNIST", "emnist": "EMNIST letters"}


class RowTransformer(nn.Module):
    """A transformer encoder layer on the rows of an image; parameters of its normalization layers have no gate."""

    def __init__(self, side: int, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(side, 32)
        self.positions = nn.Parameter(0.1 * torch.randn(side, 32))
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images (examples, rows, columns)."""
        return self.head(self.encoder(self.embed(images) + self.positions).mean(1))


class RowLSTM(nn.Module):
    """An embedding of grey levels and an LSTM on the rows of an image."""

    def __init__(self, side: int, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(PIXEL_LEVELS, 4)
        self.lstm = nn.LSTM(4 * side, 48, batch_first=True)
        self.head = nn.Linear(48, num_classes)

    def forward(self, levels: Tensor) -> Tensor:
        """Return the logits of grey levels (examples, rows, columns)."""
        return self.head(self.lstm(self.embed(levels).flatten(2))[0][:, -1])


def make_network(model: str, side: int, num_classes: int) -> nn.Module:
    """Return a network for images of side x side pixels."""
    if model == "mlp":
        layers = [nn.Linear(side**2, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, num_classes)]
        return nn.Sequential(nn.Flatten(), *layers)
    if model == "cnn":
        convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
        return nn.Sequential(nn.Unflatten(1, (1, side)), *convolutions, nn.Flatten(), nn.Linear(32 * (side // 2) ** 2, num_classes))
    return RowTransformer(side, num_classes) if model == "transformer" else RowLSTM(side, num_classes)


class Examples(NamedTuple):
    """Training examples of each client, and test examples."""

    clients: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]


@cache
def load_images(data: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return images in [0, 1] and labels for training and testing; those of 28 x 28 pixels are averaged to 14 x 14."""
    if data == "digits":
        train, test, *_ = load_digits(None)
        return tuple((np.asarray(x).reshape(-1, 8, 8), y) for x, y in (train, test))  # type: ignore[return-value]
    train, test, _ = (read_mnist if data == "mnist" else read_emnist)(None)
    pairs = []
    for images, labels in (train, test):
        kept = labels >= 0 if data == "mnist" else (labels >= 10) & (labels < 36)  # EMNIST: capital letters
        pooled = images[kept].reshape(-1, 14, 2, 14, 2).mean((2, 4)) / 255
        pairs.append((pooled.astype(np.float32), labels[kept].astype(np.int64) - (0 if data == "mnist" else 10)))
    return tuple(pairs)  # type: ignore[return-value]


def make_examples(data: str, model: str, seed: int) -> Examples:
    """Return the examples of one seed. Seeds from 100 are for choices: a fifth of the training examples is their test set."""
    rng, ((x, y), (test_x, test_y)) = np.random.default_rng(seed), load_images(data)
    rows = rng.permutation(len(y))[:NUM_TRAIN]
    x, y, test_x, test_y = x[rows], y[rows], test_x[:NUM_TEST], test_y[:NUM_TEST]
    if seed >= 100:
        cut = len(y) * 4 // 5
        (x, test_x), (y, test_y) = (x[:cut], x[cut:]), (y[:cut], y[cut:])

    def convert(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs = torch.from_numpy(images)
        return (inputs * (PIXEL_LEVELS - 1)).round().long() if model == "lstm" else inputs, torch.from_numpy(labels)

    parts = partition_by_label(y, CLIENTS, 0.5, rng)
    return Examples([convert(x[rows], y[rows]) for rows in parts], convert(test_x, test_y))


def train_by_hand(module: nn.Module, clients: list[tuple[Tensor, Tensor]], density: float, seed: int) -> nn.Module:
    """Return the module after FedAvg, magnitude pruning at the server, and federated fine-tuning of the kept weights."""
    rng, local = np.random.default_rng((seed, 1)), deepcopy(module)
    server = [value.detach().clone() for value in local.parameters()]
    masks = [torch.ones_like(value) for value in server]
    clients = [pair for pair in clients if len(pair[1])]
    num_examples = sum(len(y) for _, y in clients)
    for number in range(ROUNDS):
        if number == PRUNING_ROUND:
            masks = prune_globally(local, server, density)
        total, progress = [torch.zeros_like(value) for value in server], number % PRUNING_ROUND / PRUNING_ROUND
        rate = LEARNING_RATE * (1 + cos(pi * progress)) / 2
        for x, y in clients:
            set_parameters(local, server)
            optimizer, batches = torch.optim.SGD(local.parameters(), lr=rate), draw_batches(len(y), rng)
            for _ in range(LOCAL_STEPS):
                rows = next(batches)
                optimizer.zero_grad()
                functional.cross_entropy(local(x[rows]), y[rows]).backward()
                nn.utils.clip_grad_norm_(local.parameters(), MAX_NORM)
                optimizer.step()
                if number >= PRUNING_ROUND:
                    set_parameters(local, [value * mask for value, mask in zip(local.parameters(), masks, strict=True)])
            for mean_value, value in zip(total, local.parameters(), strict=True):
                mean_value += len(y) / num_examples * value.detach()
        server = total
    set_parameters(local, server)
    return local


def prune_globally(module: nn.Module, values: list[Tensor], density: float) -> list[Tensor]:
    """Set the largest of these values as parameters of a module, zeros elsewhere; return the masks of its parameters."""
    set_parameters(module, values)
    pruned, norms = deepcopy(module), set(norm_parameters(module))
    names = [name for name, value in module.named_parameters() if value not in norms]
    places = [(pruned.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    prune.global_unstructured(places, pruning_method=prune.L1Unstructured, amount=1 - density)
    masks = dict(pruned.named_buffers())
    found = [masks.get(f"{name}_mask", torch.ones_like(value)) for name, value in module.named_parameters()]
    for value, mask in zip(values, found, strict=True):
        value.mul_(mask)
    return found


def set_parameters(module: nn.Module, values: list[Tensor]) -> None:
    """Set the parameters of a module."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value)


def draw_batches(num_examples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield mini-batches of shuffled examples without end."""
    while True:
        order = rng.permutation(num_examples)
        yield from (order[at : at + BATCH_SIZE] for at in range(0, num_examples, BATCH_SIZE))


def measure_run(data: str, model: str, density: float, seed: int, algorithm: str) -> dict[str, object]:
    """Return the row of one run: weights kept, held-out accuracy, bytes of all messages, and CPU seconds."""
    examples = make_examples(data, model, seed)
    torch.manual_seed(seed)
    network = make_network(model, examples.test[0].shape[-1], 26 if data == "emnist" else 10)
    began = time.process_time()
    if algorithm == HAND:
        trained = train_by_hand(network, examples.clients, density, seed)
        num_bytes = 2 * 4 * ROUNDS * sum(len(y) > 0 for _, y in examples.clients) * sum(value.numel() for value in network.parameters())
        weights = sum(int((value != 0).sum()) for value in set(trained.parameters()) - set(norm_parameters(trained)))
    else:
        options = {"rounds": ROUNDS, "seed": seed, "workers": 1}
        trained, run = fit(network, functional.cross_entropy, examples.clients, density=density, algorithm=algorithm, **options)
        num_bytes, weights = run.bytes_up + run.bytes_down, run.nonzero
    with torch.no_grad():
        accuracy = float((trained.eval()(examples.test[0]).argmax(1) == examples.test[1]).float().mean())
    return {"weights": weights, "accuracy": f"{accuracy:.4f}", "bytes": num_bytes, "seconds": f"{time.process_time() - began:.1f}"}


def results_table(rows: list[dict[str, str]]) -> str:
    """Return one line per data set and model: accuracy (mean and standard deviation over seeds) and MB, by algorithm and density."""
    columns = list(dict.fromkeys((row["density"], row["algorithm"]) for row in sorted(rows, key=lambda row: -float(row["density"]))))
    lines = ["| data | network | " + " | ".join(f"{name}, {float(density):.0%}" for density, name in columns) + " |"]
    lines.append("|" + "---|" * (2 + len(columns)))
    for data, model in dict.fromkeys((row["data"], row["model"]) for row in rows):
        cells = []
        for column in columns:
            keys = (data, model, *column)
            found = [row for row in rows if (row["data"], row["model"], row["density"], row["algorithm"]) == keys]
            values, sent = [float(row["accuracy"]) for row in found], [int(row["bytes"]) / 1e6 for row in found]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3f}{spread} ({mean(sent):.2g} MB)" if found else "")
        lines.append(f"| {DATA_SETS[data]} | {MODELS[model]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what the arguments name, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", default=list(DATA_SETS), choices=DATA_SETS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1])
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    places = product(arguments.seeds, arguments.data, arguments.models, arguments.densities, arguments.algorithms)
    cells = [(data, model, density, seed, algorithm) for seed, data, model, density, algorithm in places]
    compute_rows(DATA, KEYS, cells, measure_run)
    write_section(PAGE, "networks", results_table(read_rows(DATA)))


if __name__ == "__main__":
    main()
