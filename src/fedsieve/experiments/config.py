"""A run: everything that decides a result, frozen, named by the hash of its settings."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

import torch

from fedsieve import wire
from fedsieve.algorithms import METHODS, algorithm_class
from fedsieve.algorithms.base import Method
from fedsieve.core.aggregation import Mean, Weighting
from fedsieve.core.selection import Schedule, exact_floor
from fedsieve.core.types import Objective
from fedsieve.data.partition import Partition
from fedsieve.experiments.tasks import TASKS, Task, settings_of, task_of
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Group
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.runtime.rounds import cohort_size

SECTIONS = ("data", "federation", "gates", "failures", "privacy", "algorithm")
"""The parts of a run that have options of their own."""


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


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Who takes part and how much each counts."""

    clients: int | None = None
    """clients the rows are spread over (default: the task's, mostly 100)"""
    participation: float | None = None
    """fraction of clients in each round (default: 0.1 for gradient methods, 0.05 for the others; task file asks ten clients at least)"""
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
    mean: Mean = Mean.WEIGHTED
    """what stands in the middle of a cohort's replies; all but weighted are robust, and give each client one say unless weights are set"""
    tolerate: float | None = None
    """share of a cohort that may be hostile, for the trimmed mean and krum (default: 0.3)"""
    norm_limit: float | None = None
    """a reply is rejected if it moves so many times as far as the cohort's median (default: 100; none for gradient methods)"""
    most_examples: int | None = None
    """a reply that claims more examples is rejected (default: what the largest client holds)"""

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
        if self.tolerate is not None and self.mean not in (Mean.TRIMMED, Mean.KRUM):
            raise ValueError(f"federation.tolerate is of the trimmed mean and krum; with federation.mean {self.mean} leave it out")
        if self.norm_limit is not None and not self.norm_limit >= 1:
            raise ValueError(
                f"federation.norm-limit must be at least 1, or half of every cohort would be rejected; got {self.norm_limit:g}"
            )
        if self.most_examples is not None and self.most_examples < 1:
            raise ValueError(f"federation.most-examples must be at least 1, or every reply would be rejected; got {self.most_examples}")


@dataclass(frozen=True, kw_only=True)
class Gating:
    """What a gate stands before."""

    group: Group = Group.WEIGHT
    """what shares a gate and is kept or dropped whole"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides a result."""

    task: str = "lr"
    """what is learned; --data.* are the options of this task"""
    method: str = "sieve"
    """who learns; --algorithm.* are the options of this method"""
    density: float | None = None
    """fraction of weights that may be non-zero (default: the task's, mostly 0.05)"""
    rounds: int | None = None
    """rounds of training (default: 50 for gradient methods, 100 for the others)"""
    seed: int = 0
    """every random number follows from it"""
    engine: Engine = Engine.BATCHED
    """batched is fast, loop is the readable reference"""
    precision: Precision = Precision.SINGLE
    """double makes both engines give the same bits"""
    device: str = "cpu"
    """where tensors live"""
    threads: int = 1
    """threads for tensor arithmetic; results repeat bit for bit for one number of threads"""
    bytes: Counting = Counting.ENCODED
    """encoded: every message is; sampled: one reply an exchange stands for all"""
    judge: Judge = Judge.TEST
    """rows a run is measured on: test, or for tuning a tenth of each client's rows held out (validation)"""
    data: Any = None
    federation: Federation = field(default_factory=Federation)
    gates: Gating = field(default_factory=Gating)
    failures: Failures = field(default_factory=Failures)
    privacy: Privacy = field(default_factory=Privacy)
    model: str | None = None
    """of task file: linear, logistic, softmax, multilabel or PACKAGE.MODULE:FACTORY (default: what the target suggests)"""
    start: Path | None = None
    """weights to start from: a model.safetensors of an earlier run, or a module's own tensors by name"""
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
            federation = replace(federation, participation=self._usual_participation(algorithm, federation, task.fewest))
        if self.task == "file":
            set_field(self, "data", replace(self.data, standardize=self._standardized()))
        if federation.weights is None:
            equal = self.privacy.noise or federation.mean is not Mean.WEIGHTED
            federation = replace(federation, weights=Weighting.UNIFORM if equal else task.weights or algorithm.weights)
        self.privacy.check(federation, algorithm.reply_fields)
        if federation.norm_limit is None:
            federation = replace(federation, norm_limit=inf if self.privacy.noise else algorithm.usual_norm_limit)
        if self.rounds is None:
            set_field(self, "rounds", algorithm.usual_rounds)
        set_field(self, "federation", federation)
        if self.privacy.noise and self.privacy.delta is None:
            set_field(self, "privacy", replace(self.privacy, delta=0.1 / federation.clients))
        shared = {"density": self.density, "weights": federation.weights, "mean": federation.mean}
        shared |= {} if federation.tolerate is None else {"tolerate": federation.tolerate}
        shared["private"] = self.privacy.settings(cohort_size(federation.clients, federation.participation))
        set_field(self, "algorithm", replace(algorithm, **shared))
        self._check()

    def _usual_algorithm(self) -> Method:
        """The method with the defaults it has on this task."""
        cls = algorithm_class(self.method)
        return cls(**settings_of(self.about, cls, self.model))

    @staticmethod
    def _usual_participation(algorithm: Method, federation: Federation, fewest: int) -> float:
        """The method's own, but never so little that a round has fewer clients than the task wants."""
        return 1.0 if federation.central else max(algorithm.usual_participation, min(fewest / federation.clients, 1.0))

    def _standardized(self) -> bool:
        """Whether clients of a user's own rows first agree on units: nothing else would make weights comparable (decision F11)."""
        module = self.model is not None and ":" in self.model
        asked = self.data.standardize
        if asked and module:
            raise ValueError(f"data.standardize is of linear models; --model {self.model} takes rows as they are; leave it out")
        if asked and self.privacy.noise:
            raise ValueError("data.standardize sends every client's means without noise, which privacy.noise would not hide; leave it out")
        return not module and not self.privacy.noise if asked is None else asked

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
        cohort = cohort_size(federation.clients, federation.participation)
        hostile = exact_floor(self.algorithm.tolerate, cohort)
        if federation.mean is Mean.KRUM and cohort < 2 * hostile + 3:
            raise ValueError(
                f"federation.mean krum with federation.tolerate {self.algorithm.tolerate:g} needs {2 * hostile + 3} replies to tolerate "
                f"{hostile} hostile ones, and a cohort has {cohort}; raise federation.participation or lower federation.tolerate"
            )
        if federation.partition is Partition.LABEL and self.about.loss in (Loss.SQUARED, Loss.MULTILABEL):
            raise ValueError(
                f"federation.partition label needs one class a row, and task {self.task} has none; use quantity, iid or clusters"
            )
        self.algorithm.final_budget(objective.layout)
        typed = self.algorithm.start_density
        if typed != type(self.algorithm).start_density and self.algorithm.course is Schedule.CONSTANT:
            raise ValueError(
                f"algorithm.start-density {typed:g} is where a falling schedule begins, and messages of this run have one density; "
                "add --algorithm.schedule cubic or leave it out"
            )
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
        top = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in SECTIONS}
        algorithm = {f.name: _plain(getattr(self.algorithm, f.name)) for f in fields(self.algorithm) if f.name in self.algorithm.offered()}
        parts = {name: {k: _plain(v) for k, v in asdict(getattr(self, name)).items()} for name in SECTIONS if name != "algorithm"}
        return {**top, **parts, "algorithm": algorithm}

    @property
    def id(self) -> str:
        """A readable name that ends in the hash of the settings."""
        digest = blake2b(json.dumps(self.config, sort_keys=True).encode(), digest_size=4).hexdigest()
        return f"{self.task}-{self.method}-{digest}"

    @property
    def fingerprint(self) -> int:
        """Of model and method: a packet of another one is refused."""
        return wire.fingerprint(self.method, self.objective.layout)

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
