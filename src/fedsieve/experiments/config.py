"""The settings of a run as the user sets them. None means the default, which `resolve` fills in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.data.partition import Partition
from fedsieve.experiments.topology_config import TopologyConfig
from fedsieve.objectives.module import GateGranularity
from fedsieve.runtime.cores import Workers, require_workers
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.runtime.simulate import Engine

SECTIONS = ("data", "federation", "topology", "failures", "privacy", "algorithm")
"""The settings of a run that have options of their own."""


class Precision(StrEnum):
    """Floating-point precision of a run."""

    SINGLE = "single"
    DOUBLE = "double"


class ByteCounting(StrEnum):
    """How a simulation counts bytes."""

    EXACT = "exact"
    """encode every message"""
    SAMPLED = "sampled"
    """encode one reply of each exchange and count it for all replies: faster, totals only"""


class EvaluationSplit(StrEnum):
    """The examples a run is evaluated on."""

    TEST = "test"
    VALIDATION = "validation"
    """a tenth of each client's examples, held out of training, for tuning (decision F8)"""


class CentralizedSteps(StrEnum):
    """How many gradients centralized training computes in a round (decision F12)."""

    FEDERATION = "federation"
    """as many as all clients of a cohort together"""
    CLIENT = "client"
    """as many as one client"""


@dataclass(frozen=True, kw_only=True)
class FederationConfig:
    """Clients, participation and aggregation."""

    clients: int | None = None
    """number of clients that hold the examples (default: the task's, mostly 100)"""
    participation: float | None = None
    """fraction of clients in each round (default: 0.1 for gradient algorithms, 0.05 for the others; task file uses at least ten clients)"""
    partition: Partition | None = None
    """how examples are assigned to clients (default: the task's)"""
    alpha: float = 0.5
    """Dirichlet parameter of skewed partitions; 1000 is practically IID"""
    client_weighting: ClientWeighting | None = None
    """weight of each client in the aggregate (default: the algorithm's)"""
    center_features: bool = False
    """clients subtract the mean of their features, and of their targets in regression"""
    server_examples: int = 0
    """examples of the server, which it trains on after every exchange; distributed like those of all clients together"""
    aggregator: Aggregator = Aggregator.WEIGHTED
    """how client updates are aggregated; all choices except weighted are robust and weight clients equally by default"""
    max_malicious_fraction: float | None = None
    """fraction of malicious clients in a cohort that trimmed and krum tolerate (default: 0.3)"""
    max_norm_ratio: float | None = None
    """reject a reply whose norm exceeds this multiple of the cohort's median (default: 100; no limit for gradient algorithms)"""
    max_claimed_examples: int | None = None
    """reject a reply that claims more examples (default: the number of examples of the largest client)"""

    def __post_init__(self) -> None:
        """Validate the values."""
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
                f"federation.max-malicious-fraction applies to the aggregators trimmed and krum; "
                f"with federation.aggregator {self.aggregator} leave it out"
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
    """All settings that determine a result."""

    task: str = "lr"
    """task; --data.* are the options of this task"""
    algorithm_name: str = "sieve"
    """algorithm; --algorithm.* are the options of this algorithm"""
    density: float | None = None
    """fraction of weights that may be nonzero (default: the task's, mostly 0.05)"""
    rounds: int | None = None
    """rounds of training (default: 50 for gradient algorithms, 100 for the others)"""
    seed: int = 0
    """seed of all random numbers"""
    engine: Engine = Engine.BATCHED
    """batched is fast, loop is the readable reference"""
    precision: Precision = Precision.SINGLE
    """with double, both engines give the same bits"""
    device: str = "cpu"
    """torch device of the tensors"""
    workers: Workers = "auto"
    """processes that train the clients: at most this many, or auto for one per core; small rounds use one. Results do not depend on it"""
    byte_counting: ByteCounting = ByteCounting.EXACT
    """exact encodes every message; sampled encodes one reply per exchange and counts it for all"""
    evaluate_on: EvaluationSplit = EvaluationSplit.TEST
    """examples a run is evaluated on: test, or validation (a tenth of each client's examples, held out of training)"""
    gate_granularity: GateGranularity = GateGranularity.WEIGHT
    """weights that share one gate and are kept or dropped together"""
    refit: bool | None = None
    """fit the kept weights of a linear model to all examples after the last round: at most 30 messages each way (default: for task file)"""
    centralized: bool = False
    """train one client that holds all examples in one place, as a reference"""
    centralized_steps: CentralizedSteps = CentralizedSteps.FEDERATION
    """gradients per round of --centralized: as many as the whole cohort of the federation, or as many as one client"""
    data: Any = None
    """options of the task's data (None: the task's defaults)"""
    federation: FederationConfig = field(default_factory=FederationConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    failures: Failures = field(default_factory=Failures)
    privacy: Privacy = field(default_factory=Privacy)
    model: str | None = None
    """model of task file: linear, logistic, softmax, multilabel or PACKAGE.MODULE:FACTORY (default: inferred from the target)"""
    init_weights: Path | None = None
    """initial weights: the model.safetensors of an earlier run, or a module's tensors by name"""
    algorithm: BaseAlgorithm | Mapping[str, Any] | None = None
    """the algorithm with all its options, or those options that differ from its defaults on the task"""

    def __post_init__(self) -> None:
        """Validate the values that need no other setting."""
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds must be at least 1; got {self.rounds}")
        if self.byte_counting is ByteCounting.SAMPLED and self.engine is Engine.LOOP:
            raise ValueError(
                "--byte-counting sampled needs --engine batched, because the loop engine encodes every message; got --engine loop"
            )
        if self.centralized_steps is not CentralizedSteps.FEDERATION and not self.centralized:
            raise ValueError(f"--centralized-steps {self.centralized_steps} applies to --centralized; add it, or leave this out")
        require_workers(self.workers)
        if self.workers not in (1, "auto") and (self.engine is Engine.LOOP or self.device != "cpu"):
            reason = "--engine batched, because the loop engine trains one client after another" if self.device == "cpu" else "--device cpu"
            raise ValueError(f"--workers {self.workers} needs {reason}; leave it out, or use --workers 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and below 2^63; got {self.seed}")
