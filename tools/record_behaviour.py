"""Record what every algorithm computes, so that a change of structure can be shown to change no result.

`python tools/record_behaviour.py` writes tests/project/behaviour.json: for every algorithm and model the SHA-256 of the final parameters,
the kept weights themselves, and the bytes of each round, after five rounds in double precision on both engines. Larger models are run in
single precision too, with the compiled kernels; there only hashes are recorded. Record again only if a result changes on purpose.
"""

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.defaults import batches_per_round
from fedsieve.core.optimizers import StepRule
from fedsieve.data import synthetic
from fedsieve.data.builtin import BuiltinFiles
from fedsieve.data.synthetic import Synthetic
from fedsieve.experiments.config import Engine, FederationConfig, Precision, RunConfig
from fedsieve.experiments.resolve import resolve
from fedsieve.experiments.simulation import Simulation
from fedsieve.experiments.training import run_rounds
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.rounds import Population, initial_server, train

RECORD = Path(__file__).resolve().parents[1] / "tests" / "project" / "behaviour.json"
ENGINES = ("loop", "batched")
MODELS = ("lr", "lg", "mc", "digits", "module", "sparse")
NUM_ROUNDS = 5


def main() -> None:
    """Write the record."""
    record = {"cpu": describe_cpu(), "double": {}, "single": {}}
    for algorithm in ALGORITHMS:
        for model in MODELS:
            record["double"][f"{algorithm} {model}"] = record_run(algorithm, model, "batched")
            assert record_run(algorithm, model, "loop") == record["double"][f"{algorithm} {model}"], (algorithm, model)
        for model in ("lr", "mc", "sparse"):
            record["single"][f"{algorithm} {model}"] = record_run(algorithm, model, "batched", single_precision=True)["sha256"]
    RECORD.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")


def describe_cpu() -> str:
    """The type of the CPU and the versions of the libraries that decide the last bits."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, numpy {np.__version__}"


def record_run(algorithm: str, model: str, engine: str, *, single_precision: bool = False) -> dict[str, Any]:
    """The final parameters and the bytes of each round of a short run."""
    torch.set_num_threads(1)
    rounds = list(
        run_direct(algorithm, model, engine, single_precision)
        if model in ("module", "sparse")
        else run_task(algorithm, model, engine, single_precision)
    )
    parameters = rounds[-1][0]
    kept = parameters.nonzero()[:, 0]
    return {
        "sha256": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
        "indices": kept.tolist(),
        "values": parameters[kept].tolist(),
        "bytes_up": [up for _, up, _ in rounds],
        "bytes_down": [down for *_, down in rounds],
    }


def run_task(algorithm_name: str, task: str, engine: str, single_precision: bool) -> Iterator[tuple[Tensor, int, int]]:
    """The rounds of a named task."""
    synthetic.NUM_TEST_EXAMPLES = 200
    data = Synthetic(num_examples=300, num_features=1200 if single_precision else 40, num_classes=4, true_density=0.1)
    cls = algorithm_class(algorithm_name)
    run = resolve(
        RunConfig(
            task=task,
            algorithm_name=algorithm_name,
            density=0.1,
            rounds=NUM_ROUNDS,
            seed=11,
            engine=Engine(engine),
            precision=Precision.SINGLE if single_precision else Precision.DOUBLE,
            data=BuiltinFiles() if task == "digits" else data,
            federation=FederationConfig(clients=12, participation=0.5),
            algorithm=cls(density=0.1, batch_size=8, **batches_per_round(cls, 5)),
        )
    )
    for step in run_rounds(run, Simulation(run)):
        yield step.parameters, step.metrics["bytes_up"], step.metrics["bytes_down"]


def run_direct(algorithm_name: str, model: str, engine: str, single_precision: bool) -> Iterator[tuple[Tensor, int, int]]:
    """The rounds of a small network, or of a linear model of sparse examples."""
    cls, dtype = algorithm_class(algorithm_name), torch.float32 if single_precision else torch.float64
    counts, generator = [30, 12, 40, 5], np.random.default_rng(4)
    settings: dict[str, Any] = {"density": 0.1, "batch_size": 8} | batches_per_round(cls, 5)
    if model == "module":
        network = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 3)).to(dtype)
        objective = Module(module=network)
        settings |= {"step_rule": StepRule.CONSTANT, "learning_rate": 0.1, "max_gradient_norm": 1.0}
        x = generator.standard_normal((sum(counts), 8))
        y = torch.from_numpy((x @ generator.standard_normal((8, 3))).argmax(1))
        examples = torch.from_numpy(x).to(dtype)
        initialize_weights(network)
    else:
        features = 2000 if single_precision else 120
        objective = Linear(loss=Loss.MULTILABEL, num_features=features, num_outputs=4)
        x = generator.standard_normal((sum(counts), features)) * (generator.random((sum(counts), features)) < 0.06)
        y = torch.from_numpy((x @ generator.standard_normal((features, 4)) > 0).astype(np.float64)).to(dtype)
        examples = csr_matrix(x.astype(np.float32 if single_precision else np.float64))
    algorithm = cls(**{key: value for key, value in settings.items() if key not in cls.unsupported_options})
    data = ClientData(examples, y, counts, objective, algorithm.workload.batch_size)
    kind = LoopEngine if engine == "loop" else BatchedEngine
    context = RunContext(algorithm=algorithm, objective=objective, seed=2, fingerprint=1, dtype=dtype)
    exchange = kind(context=context, data=data)
    server = initial_server(algorithm, objective, 2, dtype)
    for done in train(algorithm, server, Population(4, range(4)), 0.75, exchange, NUM_ROUNDS, 2, dtype=dtype):
        yield algorithm.parameters(done.server), done.uplink.total, done.downlink.total


def initialize_weights(module: nn.Module) -> None:
    """Set weights that do not depend on random numbers drawn before."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)


if __name__ == "__main__":
    main()
