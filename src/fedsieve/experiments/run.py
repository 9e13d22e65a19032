"""A run: frozen, named by the hash of its settings; and what it takes to execute one."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from fedsieve import metrics
from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.algorithms.method import Method
from fedsieve.core.aggregation import Weighting
from fedsieve.core.gates import active_probability
from fedsieve.core.optimizers import StepRule
from fedsieve.core.streams import key
from fedsieve.core.types import Bytes, Exchange, Objective
from fedsieve.data import own
from fedsieve.data.partition import Partition
from fedsieve.data.spread import Drawn, Spread
from fedsieve.engines.batched import Batched
from fedsieve.engines.loop import Loop
from fedsieve.engines.rows import Rows
from fedsieve.experiments.models import load_start
from fedsieve.experiments.tasks import MEASURES, TASKS, Task, settings_of, task_of
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Group, Module
from fedsieve.train import Population, Round, cohort_size, start, train

COLUMNS = ("r2", "mse", "accuracy", "ce", "bce", "micro_f1", "tdr", "tdr_rows", "recall")
DIVERGED = 1e6
"""A weight this large has left every sensible model."""


class Engine(StrEnum):
    """Who computes: the readable reference, or stacks of clients."""

    LOOP = "loop"
    BATCHED = "batched"


class Precision(StrEnum):
    """Working precision."""

    SINGLE = "single"
    DOUBLE = "double"


class Counting(StrEnum):
    """How bytes are counted in simulation."""

    ENCODED = "encoded"
    """every message is encoded"""
    SAMPLED = "sampled"
    """one reply of each exchange is encoded and stands for all: faster, totals only"""


class Judge(StrEnum):
    """Which rows a run is measured on."""

    TEST = "test"
    VALIDATION = "validation"
    """a tenth of each client's rows, held out of training: what tuning may look at (decision F8)"""


class Centring(StrEnum):
    """Whether clients centre their own features (and, for regression, targets) before training (decision F3)."""

    NONE = "none"
    CLIENT = "client"


class DivergedError(RuntimeError):
    """Training left the numbers; what there is up to that round is kept."""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Who takes part and how much each counts."""

    clients: int | None = None
    """clients the rows are spread over (default: the task's, mostly 100)"""
    participation: float | None = None
    """fraction of clients in each round (default: 0.1 for gradient methods, 0.05 for the others)"""
    partition: Partition | None = None
    """how rows fall on clients (default: the task's)"""
    alpha: float = 0.5
    """Dirichlet parameter of skewed partitions; 1000 is as good as IID"""
    weights: Weighting | None = None
    """how much each client of a cohort counts (default: the method's own)"""
    central: bool = False
    """one client holds all rows: the upper bound"""
    centring: Centring = Centring.NONE
    """clients subtract the mean of their own features, and of their targets in regression"""
    server_rows: int = 0
    """rows the server owns and tunes on after every exchange"""

    def __post_init__(self) -> None:
        """Refuse federations nobody could form."""
        if self.clients is not None and self.clients < 1:
            raise ValueError(f"federation.clients must be at least 1; got {self.clients}")
        if self.participation is not None and not 0 < self.participation <= 1:
            raise ValueError(
                f"federation.participation is the fraction of clients in a round, above 0 and at most 1; got {self.participation:g}"
            )
        if not 0 < self.alpha < inf:
            raise ValueError(f"federation.alpha is a Dirichlet parameter and must be above 0 and finite; got {self.alpha:g}")
        if self.server_rows < 0:
            raise ValueError(f"federation.server-rows must be at least 0; got {self.server_rows}")


@dataclass(frozen=True, kw_only=True)
class Gating:
    """What a gate stands before."""

    group: Group = Group.WEIGHT
    """what shares a gate and is kept or dropped whole"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides a result."""

    task: str = "lr"
    method: str = "flops-pa"
    density: float | None = None
    rounds: int | None = None
    seed: int = 0
    engine: Engine = Engine.BATCHED
    precision: Precision = Precision.SINGLE
    device: str = "cpu"
    threads: int = 1
    bytes: Counting = Counting.ENCODED
    judge: Judge = Judge.TEST
    data: Any = None
    federation: Federation = field(default_factory=Federation)
    gates: Gating = field(default_factory=Gating)
    model: str | None = None
    start: Path | None = None
    algorithm: Method | None = None

    def __post_init__(self) -> None:
        """Fill in what depends on the method, then check what only shows when everything is known."""
        set_field = object.__setattr__
        for kind, name, known in (("task", self.task, TASKS), ("method", self.method, METHODS)):
            if name not in known:
                raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(known)}")
        if self.data is None:
            set_field(self, "data", TASKS[self.task].options())
        task = self.about
        algorithm = self.algorithm or self._usual_algorithm()
        federation = self.federation
        if federation.clients is None:
            federation = replace(federation, clients=task.clients)
        if federation.partition is None:
            federation = replace(federation, partition=task.partition)
        if self.density is None:
            set_field(self, "density", task.density)
        if federation.participation is None:
            federation = replace(federation, participation=self._usual_participation(algorithm, federation))
        if federation.weights is None:
            federation = replace(federation, weights=task.weights or algorithm.weights)
        if self.rounds is None:
            set_field(self, "rounds", algorithm.usual_rounds)
        set_field(self, "federation", federation)
        set_field(self, "algorithm", replace(algorithm, density=self.density, weights=federation.weights))
        self._check()

    def _usual_algorithm(self) -> Method:
        """The method with the defaults it has on this task."""
        cls = algorithm_class(self.method)
        return cls(**settings_of(self.about, cls, self.model))

    @staticmethod
    def _usual_participation(algorithm: Method, federation: Federation) -> float:
        """The method's own, but never so little that it picks nobody."""
        return 1.0 if federation.central else max(algorithm.usual_participation, 1 / federation.clients)

    def _check(self) -> None:
        federation, objective = self.federation, self.objective
        if federation.central and federation.participation != 1:
            raise ValueError(
                f"federation.central has one client, who always takes part; leave out federation.participation {federation.participation:g}"
            )
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1; got {self.rounds}")
        if self.bytes is Counting.SAMPLED and self.engine is Engine.LOOP:
            raise ValueError("--bytes sampled has no meaning with --engine loop, which passes every message as bytes; use --engine batched")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1; got {self.threads}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and below 2^63; got {self.seed}")
        rows = self.data.rows
        if rows is not None and federation.clients > rows and not federation.central:
            raise ValueError(
                f"federation.clients {federation.clients} is more than data.rows {rows}: some could never hold a row; "
                f"use at most {rows} clients"
            )
        if int(federation.participation * federation.clients + 1e-9) < 1 and not federation.central:
            raise ValueError(
                f"federation.participation {federation.participation:g} of {federation.clients} clients picks nobody; "
                f"use at least {1 / federation.clients:g}"
            )
        if federation.partition is Partition.LABEL and self.about.loss in (Loss.SQUARED, Loss.MULTILABEL):
            raise ValueError(
                f"federation.partition label needs one class a row, and task {self.task} has none; use quantity, iid or clusters"
            )
        self.algorithm.final_budget(objective.layout)
        if self.algorithm.needs_smoothness and not isinstance(objective, Linear):
            raise ValueError(
                "algorithm.step-rule capped needs a bound on the curvature, which only linear models have; use polyak or constant"
            )
        if self.device != "cpu" and not _has_device(self.device):
            raise ValueError(f"device {self.device} is not available here; use --device cpu")

    @cached_property
    def objective(self) -> Objective:
        """The loss of the task."""
        return self.about.objective(self.data, self.gates.group)

    @cached_property
    def about(self) -> Task:
        """What the task brings along."""
        return task_of(self.task, self.data, self.model)

    @property
    def metric(self) -> str:
        """The number that is compared."""
        return self.about.metric

    @property
    def config(self) -> dict[str, Any]:
        """Everything that decides the result, as plain values: what config.toml holds."""
        top = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("data", "federation", "gates", "algorithm")}
        algorithm = {f.name: _plain(getattr(self.algorithm, f.name)) for f in fields(self.algorithm) if "section" not in f.metadata}
        sections = {"data": self.data, "federation": self.federation, "gates": self.gates}
        return {**top, **{name: {k: _plain(v) for k, v in asdict(part).items()} for name, part in sections.items()}, "algorithm": algorithm}

    @property
    def id(self) -> str:
        """A readable name that ends in the hash of the settings."""
        digest = blake2b(json.dumps(self.config, sort_keys=True).encode(), digest_size=4).hexdigest()
        return f"{self.task}-{self.method}-{digest}"

    @property
    def fingerprint(self) -> int:
        """Of model and method: a packet of another one is refused."""
        return key(0, self.method, *self.objective.layout.layers, self.objective.layout.size) & 0xFFFFFFFF

    @property
    def dtype(self) -> torch.dtype:
        """Working precision."""
        return torch.float64 if self.precision is Precision.DOUBLE else torch.float32


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value


def _has_device(device: str) -> bool:
    try:
        return torch.ones(1, device=device).item() == 1
    except (RuntimeError, AssertionError, NotImplementedError):
        return False


class Problem:
    """A run's data on tensors, drawn once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        spread = Spread(run.federation.clients, run.federation.partition, run.federation.alpha)
        self.drawn: Drawn = run.about.draw(run.data, spread, run.seed, run.federation.server_rows)
        if run.judge is Judge.VALIDATION:
            self.drawn = held_out(self.drawn)
        if len(self.drawn.counts) != run.federation.clients:
            raise ValueError(
                f"federation.clients {run.federation.clients} contradicts data.client: the rows name {len(self.drawn.counts)} clients; "
                f"leave it out"
            )
        if run.federation.clients > self.drawn.counts.sum() and not run.federation.central:
            raise ValueError(
                f"federation.clients {run.federation.clients} is more than the {self.drawn.counts.sum()} rows there are; use fewer clients"
            )

    def check(self) -> None:
        """Fail early, before anything is written: rows that cannot be prepared, a start or a module that does not fit."""
        _ = self.rows
        if self.run.start is not None:
            load_start(self.run.start, self.run.objective)
        if isinstance(self.run.objective, Module):
            x, y = self.test
            try:
                outputs = self.run.objective.predict(self.run.objective.flat(self.run.objective.module).to(self.run.dtype), x[:2])
            except RuntimeError as problem:
                raise ValueError(f"--model {self.run.model} cannot take these rows: {str(problem).splitlines()[0]}") from None
            if outputs.shape[-1] <= int(y.max()):
                raise ValueError(f"--model {self.run.model} has {outputs.shape[-1]} outputs; there are {int(y.max()) + 1} classes")

    def for_run(self, run: Run) -> "Problem":
        """The same rows under another method."""
        other = Problem.__new__(Problem)
        other.run, other.drawn = run, self.drawn
        return other

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each client."""
        counts = self.drawn.counts
        return np.array([counts.sum()]) if self.run.federation.central else counts

    @cached_property
    def population(self) -> Population:
        """Who may be picked."""
        return Population(len(self.counts), np.flatnonzero(self.counts).tolist())

    @cached_property
    def rows(self) -> Rows:
        """The clients' rows, centred if asked."""
        x, y = self.drawn.x, self.drawn.y
        if self.run.federation.centring is Centring.CLIENT:
            if isinstance(x, csr_matrix):
                raise ValueError("federation.centring client would fill sparse rows with numbers; use --federation.centring none")
            x, y = centred(x, y, self.counts, targets=self.run.about.loss is Loss.SQUARED)
        return self._rows(x, y, self.counts)

    @cached_property
    def server_rows(self) -> Rows:
        """The server's own rows."""
        return self._rows(self.drawn.server_x, self.drawn.server_y, [len(self.drawn.server_y)])

    @cached_property
    def test(self) -> tuple[Tensor | csr_matrix, Tensor]:
        """Test rows, of linear models feature by feature: a sparse model reads only the features it uses."""
        x = self.drawn.test_x
        if isinstance(x, np.ndarray):
            by_feature = isinstance(self.run.objective, Linear)
            x = self._tensor(np.ascontiguousarray(x.T)).T if by_feature else self._tensor(x)
        return x, self._tensor(self.drawn.test_y)

    @cached_property
    def truth(self) -> Tensor | None:
        """The true coefficients, (outputs, features), where they are known."""
        return None if self.drawn.truth is None else self._tensor(self.drawn.truth)

    def exchange(self, rows: Rows, seed: int) -> Exchange:
        """The chosen engine over some rows."""
        run = self.run
        parts = {"algorithm": run.algorithm, "objective": run.objective, "rows": rows, "seed": seed, "fingerprint": run.fingerprint}
        parts |= {"dtype": run.dtype, "device": run.device}
        return Loop(**parts) if run.engine is Engine.LOOP else Batched(**parts, sample_bytes=run.bytes is Counting.SAMPLED)

    def measure(self, theta: Tensor) -> dict[str, float]:
        """Test metrics of a parameter vector."""
        x, y = self.test
        return MEASURES[self.run.about.loss][0](self.run.objective.predict(theta, x), y)

    def recovery(self, theta: Tensor) -> dict[str, float]:
        """How well its support is the true one, where that is known."""
        if self.truth is None:
            return {}
        return metrics.recovery((theta[: self.truth.numel()] != 0).view_as(self.truth), self.truth != 0)

    def _rows(self, x: np.ndarray, y: np.ndarray, counts: Any) -> Rows:
        rows = x.astype(np.dtype(str(self.run.dtype).removeprefix("torch."))) if isinstance(x, csr_matrix) else self._tensor(x)
        return Rows(rows, self._tensor(y), counts, self.run.objective, self.run.algorithm.batch_rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        kind = self.run.dtype if array.dtype.kind == "f" else torch.int64
        return torch.from_numpy(array).to(device=self.run.device, dtype=kind)


def held_out(drawn: Drawn) -> Drawn:
    """A tenth of each client's rows in the place of the test rows; rows of a client are in random order already."""
    starts = np.repeat(np.cumsum(drawn.counts) - drawn.counts, drawn.counts)
    held = np.arange(len(drawn.y)) - starts < np.repeat(drawn.counts // 10, drawn.counts)
    rest = {"x": drawn.x[~held], "y": drawn.y[~held], "counts": drawn.counts - drawn.counts // 10}
    return drawn._replace(**rest, test_x=drawn.x[held], test_y=drawn.y[held])


def centred(x: np.ndarray, y: np.ndarray, counts: np.ndarray, *, targets: bool) -> tuple[np.ndarray, np.ndarray]:
    """Each client's features (and targets) less their own mean."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))[counts > 0]
    held = counts[counts > 0]
    x = x - np.repeat(np.add.reduceat(x, starts, axis=0) / held[:, None], held, axis=0)
    return x, y - np.repeat(np.add.reduceat(y, starts) / held, held) if targets else y


class Progress(NamedTuple):
    """A finished round, measured."""

    round: Round
    theta: Tensor
    row: dict[str, Any]
    histogram: np.ndarray | None


def execute(run: Run, problem: Problem | None = None) -> Iterator[Progress]:
    """Train, measuring every round."""
    torch.set_num_threads(run.threads)
    problem = problem or Problem(run)
    problem.check()
    algorithm = run.algorithm
    tune = problem.exchange(problem.server_rows, key(run.seed, "tune")) if run.federation.server_rows else None
    given = None if run.start is None else load_start(run.start, run.objective).to(device=run.device, dtype=run.dtype)
    server = start(algorithm, run.objective, run.seed, run.dtype, run.device, given)
    exchange = problem.exchange(problem.rows, run.seed)
    participation = 1.0 if run.federation.central else run.federation.participation
    rounds = train(
        algorithm,
        server,
        problem.population,
        participation,
        exchange,
        run.rounds,
        run.seed,
        dtype=run.dtype,
        device=run.device,
        tune=tune,
        known_start=given is None,
    )
    began = time.perf_counter()
    for done in rounds:
        theta, full = algorithm.theta(done.server), algorithm.full_theta(done.server)
        refuse_divergence(run, done, full)
        row = {"round": done.number + 1, **problem.measure(theta), **problem.recovery(theta)}
        if (full != 0).sum() > (theta != 0).sum():
            row["full"] = problem.measure(full)[run.metric]
        row |= {name: float(value) for name, value in algorithm.info(done.server).items()}
        row |= traffic(done.up, done.down)
        row |= {"cohort": done.cohort, "replied": done.replied, "rejected": done.rejected, "seconds": time.perf_counter() - began}
        yield Progress(done, theta, row, gate_histogram(algorithm, done.server))


def traffic(up: Bytes, down: Bytes) -> dict[str, int]:
    """Bytes by the names users know."""
    names = {"wire": "", "payload": "_payload", "formula": "_formula"}
    return {f"bytes_{way}{names[part]}": getattr(b, part) for way, b in (("up", up), ("down", down)) for part in names}


def refuse_divergence(run: Run, done: Round, theta: Tensor) -> None:
    """Stop once the weights have left the numbers."""
    lost = not bool(torch.isfinite(theta).all()) or float(theta.abs().amax()) > DIVERGED
    if lost or (not done.replied and done.rejected):
        gradients = run.algorithm.exchanges > 1
        rate = f"algorithm.server-rate {run.algorithm.server_rate:g}" if gradients else f"algorithm.rate {run.algorithm.rate:g}"
        polyak = run.algorithm.step_rule is StepRule.POLYAK or gradients
        raise DivergedError(
            f"diverged in round {done.number + 1}: weights are no longer finite or sensible with {rate} and algorithm.step-rule "
            f"{run.algorithm.step_rule}; lower the rate{'' if polyak else ', or use --algorithm.step-rule polyak'}"
        )


def features_used(run: Run, theta: Tensor) -> list[str] | None:
    """The features a linear model reads, strongest first, by name or number, where gates are shared by features."""
    objective = run.objective
    if not isinstance(objective, Linear) or not objective.by_feature:
        return None
    strength = objective.parts(theta)[0].square().sum(0)
    order = strength.argsort(descending=True, stable=True)[: int((strength > 0).sum())].tolist()
    names = own.read(run.data.path, run.data.target, run.data.client).names if run.task == "file" else None
    return [names[j] if names else str(j) for j in order]


def gate_histogram(algorithm: Method, server: Any) -> np.ndarray | None:
    """How P(z != 0) is spread, in twentieths; None for methods without gates."""
    if not hasattr(server, "log_alpha"):
        return None
    probability = active_probability(algorithm.shape, server.log_alpha[: server.layout.gated]).numpy(force=True)
    return np.histogram(probability, bins=20, range=(0, 1))[0]


def summary(run: Run, problem: Problem, rows: list[dict[str, Any]], theta: Tensor) -> dict[str, Any]:
    """The result of a run, by the names of `--json`."""
    last = rows[-1]
    gated = theta[: run.objective.layout.gated]
    nonzero = int((gated != 0).sum())
    totals = {name: sum(row[name] for row in rows) for name in last if name.startswith("bytes_")}
    return {
        "run": run.id,
        "task": run.task,
        "method": run.method,
        "seed": run.seed,
        "rounds": len(rows),
        "metric": run.metric,
        "value": last[run.metric],
        **{name: last.get(name) for name in COLUMNS},
        "size": gated.numel(),
        "nonzero": nonzero,
        "density": nonzero / gated.numel(),
        "features": features_used(run, theta),
        "expected_density": last.get("expected_density"),
        "test_density": last.get("test_density"),
        **totals,
        "bytes_counted": run.bytes.value,
        "seconds": last["seconds"],
        "best_possible": None if problem.truth is None else problem.measure(problem.truth.reshape(-1))[run.metric],
        "note": problem.drawn.note,
        "bytes_dense": 2
        * 4
        * theta.numel()
        * cohort_size(len(problem.counts), 1.0 if run.federation.central else run.federation.participation)
        * len(rows)
        * run.algorithm.exchanges,
    }
