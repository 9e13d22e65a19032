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
from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.schedules import DensitySchedule
from fedsieve.core.types import Objective
from fedsieve.data.partition import Partition
from fedsieve.experiments.tasks import TASKS, Task, default_options, get_task
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import GateGranularity
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.runtime.rounds import cohort_size
from fedsieve.runtime.simulate import Engine

SECTIONS = ("data", "federation", "failures", "privacy", "algorithm")
"""The parts of a run that have options of their own."""


class Precision(StrEnum):
    """Working precision."""

    SINGLE = "single"
    DOUBLE = "double"


class ByteCounting(StrEnum):
    """How bytes are counted in simulation."""

    EXACT = "exact"
    """every message is encoded"""
    SAMPLED = "sampled"
    """one reply of each exchange is encoded and stands for all: faster, totals only"""


class EvaluationSplit(StrEnum):
    """Which rows a run is measured on."""

    TEST = "test"
    VALIDATION = "validation"
    """a tenth of each client's rows, held out of training: what tuning may look at (decision F8)"""


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """Who takes part and how much each counts."""

    clients: int | None = None
    """clients the rows are spread over (default: the task's, mostly 100)"""
    participation: float | None = None
    """fraction of clients in each round (default: 0.1 for gradient methods, 0.05 for the others; task file asks ten clients at least)"""
    partition: Partition | None = None
    """how rows fall on clients (default: the task's)"""
    alpha: float = 0.5
    """Dirichlet parameter of skewed partitions; 1000 is as good as IID"""
    client_weighting: ClientWeighting | None = None
    """how much each client of a cohort counts (default: the method's own)"""
    center_features: bool = False
    """clients subtract the mean of their own features, and of their targets in regression"""
    server_examples: int = 0
    """rows the server owns and tunes on after every exchange"""
    aggregator: Aggregator = Aggregator.WEIGHTED
    """what stands in the middle of a cohort's replies; all but weighted are robust, and give each client one say unless weights are set"""
    max_malicious_fraction: float | None = None
    """share of a cohort that may be hostile, for the trimmed mean and krum (default: 0.3)"""
    max_norm_ratio: float | None = None
    """a reply is rejected if it moves so many times as far as the cohort's median (default: 100; none for gradient methods)"""
    max_claimed_examples: int | None = None
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
        if self.server_examples < 0:
            raise ValueError(f"federation.server-examples must be at least 0; got {self.server_examples}")
        if self.max_malicious_fraction is not None and self.aggregator not in (Aggregator.TRIMMED, Aggregator.KRUM):
            raise ValueError(
                f"federation.max-malicious-fraction is of the trimmed mean and krum; with federation.aggregator {self.aggregator} leave it out"
            )
        if self.max_norm_ratio is not None and not self.max_norm_ratio >= 1:
            raise ValueError(
                f"federation.max-norm-ratio must be at least 1, or half of every cohort would be rejected; got {self.max_norm_ratio:g}"
            )
        if self.max_claimed_examples is not None and self.max_claimed_examples < 1:
            raise ValueError(
                f"federation.max-claimed-examples must be at least 1, or every reply would be rejected; got {self.max_claimed_examples}"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a result."""

    task: str = "lr"
    """what is learned; --data.* are the options of this task"""
    algorithm_name: str = "sieve"
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
    byte_counting: ByteCounting = ByteCounting.EXACT
    """exact: every message is; sampled: one reply an exchange stands for all"""
    evaluate_on: EvaluationSplit = EvaluationSplit.TEST
    """rows a run is measured on: test, or for tuning a tenth of each client's rows held out (validation)"""
    gate_granularity: GateGranularity = GateGranularity.WEIGHT
    """what shares one gate and is kept or dropped as a whole"""
    centralized: bool = False
    """train one client that holds all examples, as an upper bound"""
    data: Any = None
    federation: FederationConfig = field(default_factory=FederationConfig)
    failures: Failures = field(default_factory=Failures)
    privacy: Privacy = field(default_factory=Privacy)
    model: str | None = None
    """of task file: linear, logistic, softmax, multilabel or PACKAGE.MODULE:FACTORY (default: what the target suggests)"""
    init_weights: Path | None = None
    """weights to start from: a model.safetensors of an earlier run, or a module's own tensors by name"""
    algorithm: BaseAlgorithm | None = None

    def __post_init__(self) -> None:
        """Fill in what depends on the method, then check what only shows when everything is known."""
        set_field = object.__setattr__
        for kind, name, known in (("task", self.task, TASKS), ("algorithm", self.algorithm_name, ALGORITHMS)):
            if name not in known:
                raise ValueError(f"unknown {kind} {name!r}; there are {', '.join(known)}")
        if self.data is None:
            set_field(self, "data", TASKS[self.task].data_options())
        task = self.task_spec
        algorithm = self.algorithm or self._default_algorithm()
        federation = self.federation
        if federation.clients is None:
            federation = replace(federation, clients=task.clients)
        if federation.partition is None:
            federation = replace(federation, partition=task.partition)
        if self.density is None:
            set_field(self, "density", task.density)
        if federation.participation is None:
            federation = replace(federation, participation=self._default_participation(algorithm, federation, task.min_cohort))
        if self.task == "file":
            set_field(self, "data", replace(self.data, standardize=self._resolve_standardize()))
        if federation.client_weighting is None:
            equal = self.privacy.noise_multiplier or federation.aggregator is not Aggregator.WEIGHTED
            federation = replace(
                federation, client_weighting=ClientWeighting.UNIFORM if equal else task.client_weighting or algorithm.client_weighting
            )
        self.privacy.validate(federation, algorithm.all_reply_fields, centralized=self.centralized)
        if federation.max_norm_ratio is None:
            federation = replace(federation, max_norm_ratio=inf if self.privacy.noise_multiplier else algorithm.default_max_norm_ratio)
        if self.rounds is None:
            set_field(self, "rounds", algorithm.default_rounds)
        set_field(self, "federation", federation)
        if self.privacy.noise_multiplier and self.privacy.delta is None:
            set_field(self, "privacy", replace(self.privacy, delta=0.1 / federation.clients))
        shared = {"density": self.density, "client_weighting": federation.client_weighting, "aggregator": federation.aggregator}
        shared |= {} if federation.max_malicious_fraction is None else {"max_malicious_fraction": federation.max_malicious_fraction}
        shared["privacy"] = self.privacy.mechanism(cohort_size(federation.clients, federation.participation))
        set_field(self, "algorithm", replace(algorithm, **shared))
        self._validate()

    def _default_algorithm(self) -> BaseAlgorithm:
        """The method with the defaults it has on this task."""
        cls = algorithm_class(self.algorithm_name)
        return cls(**default_options(self.task_spec, cls, self.model))

    def _default_participation(self, algorithm: BaseAlgorithm, federation: FederationConfig, min_cohort: int) -> float:
        """The method's own, but never so little that a round has fewer clients than the task wants."""
        return 1.0 if self.centralized else max(algorithm.default_participation, min(min_cohort / federation.clients, 1.0))

    def _resolve_standardize(self) -> bool:
        """Whether clients of a user's own rows first agree on units: nothing else would make weights comparable (decision F11)."""
        module = self.model is not None and ":" in self.model
        asked = self.data.standardize
        if asked and module:
            raise ValueError(f"data.standardize is of linear models; --model {self.model} takes rows as they are; leave it out")
        if asked and self.privacy.noise_multiplier:
            raise ValueError(
                "data.standardize sends every client's means without noise, which privacy.noise-multiplier would not hide; leave it out"
            )
        return not module and not self.privacy.noise_multiplier if asked is None else asked

    def _validate(self) -> None:
        federation, objective = self.federation, self.objective
        if self.centralized and federation.participation != 1:
            raise ValueError(
                f"--centralized has one client, who always takes part; leave out federation.participation {federation.participation:g}"
            )
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1; got {self.rounds}")
        if self.byte_counting is ByteCounting.SAMPLED and self.engine is Engine.LOOP:
            raise ValueError(
                "--byte-counting sampled has no meaning with --engine loop, which passes every message as bytes; use --engine batched"
            )
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1; got {self.threads}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and below 2^63; got {self.seed}")
        rows = self.data.num_examples
        if rows is not None and federation.clients > rows and not self.centralized:
            raise ValueError(
                f"federation.clients {federation.clients} is more than data.num-examples {rows}: some could never hold a row; "
                f"use at most {rows} clients"
            )
        if int(federation.participation * federation.clients + 1e-9) < 1 and not self.centralized:
            raise ValueError(
                f"federation.participation {federation.participation:g} of {federation.clients} clients picks nobody; "
                f"use at least {1 / federation.clients:g}"
            )
        cohort = cohort_size(federation.clients, federation.participation)
        hostile = floor_of_decimal(self.algorithm.max_malicious_fraction, cohort)
        if federation.aggregator is Aggregator.KRUM and cohort < 2 * hostile + 3:
            raise ValueError(
                f"federation.aggregator krum with federation.max-malicious-fraction {self.algorithm.max_malicious_fraction:g} needs {2 * hostile + 3} replies to tolerate "
                f"{hostile} hostile ones, and a cohort has {cohort}; raise federation.participation or lower federation.max-malicious-fraction"
            )
        if federation.partition is Partition.LABEL and self.task_spec.loss in (Loss.SQUARED, Loss.MULTILABEL):
            raise ValueError(
                f"federation.partition label needs one class a row, and task {self.task} has none; use quantity, iid or clusters"
            )
        self.algorithm.final_budget(objective.layout)
        typed = self.algorithm.initial_density
        if typed != type(self.algorithm).initial_density and self.algorithm.resolved_schedule is DensitySchedule.CONSTANT:
            raise ValueError(
                f"algorithm.initial-density {typed:g} is where a falling schedule begins, and messages of this run have one density; "
                "add --algorithm.density-schedule cubic or leave it out"
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
        return self.task_spec.make_objective(self.data, self.gate_granularity)

    @cached_property
    def task_spec(self) -> Task:
        """What the task brings along."""
        return get_task(self.task, self.data, self.model)

    @property
    def metric(self) -> str:
        """The number that is compared."""
        return self.task_spec.metric

    @property
    def settings_dict(self) -> dict[str, Any]:
        """Everything that decides the result, as plain values: what config.toml holds."""
        top = {f.name: _to_plain(getattr(self, f.name)) for f in fields(self) if f.name not in (*SECTIONS, "algorithm_name")}
        algorithm = {
            f.name: _to_plain(getattr(self.algorithm, f.name)) for f in fields(self.algorithm) if f.name in self.algorithm.option_names()
        }
        parts = {name: {k: _to_plain(v) for k, v in asdict(getattr(self, name)).items()} for name in SECTIONS if name != "algorithm"}
        return {**top, **parts, "algorithm": {"name": self.algorithm_name} | algorithm}

    @property
    def id(self) -> str:
        """A readable name that ends in the hash of the settings."""
        digest = blake2b(json.dumps(self.settings_dict, sort_keys=True).encode(), digest_size=4).hexdigest()
        return f"{self.task}-{self.algorithm_name}-{digest}"

    @property
    def fingerprint(self) -> int:
        """Of model and method: a packet of another one is refused."""
        return wire.compute_fingerprint(self.algorithm_name, self.objective.layout)

    @property
    def dtype(self) -> torch.dtype:
        """Working precision."""
        return torch.float64 if self.precision is Precision.DOUBLE else torch.float32


def _to_plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value


def _has_device(device: str) -> bool:
    try:
        return torch.ones(1, device=device).item() == 1
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
