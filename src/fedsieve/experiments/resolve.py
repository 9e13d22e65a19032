"""Resolve the settings of a run: fill in every default that depends on the task or the algorithm, and validate them together."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

import torch

from fedsieve import wire
from fedsieve.algorithms import ALGORITHMS, algorithm_class
from fedsieve.algorithms.base import BaseAlgorithm
from fedsieve.algorithms.defaults import batches_per_round, require_effect, require_recipes
from fedsieve.algorithms.gated import GatedAlgorithm
from fedsieve.algorithms.gossip import node_rules
from fedsieve.algorithms.recipes import Recipe
from fedsieve.core.aggregation import Aggregator, ClientWeighting
from fedsieve.core.budgets import floor_of_decimal
from fedsieve.core.constraint import DualUpdate
from fedsieve.core.optimizers import StepRule
from fedsieve.core.settings import field_types, parse_settings
from fedsieve.data.partition import Partition
from fedsieve.experiments.config import SECTIONS, ByteCounting, CentralizedSteps, EvaluationSplit, FederationConfig, Precision, RunConfig
from fedsieve.experiments.tasks import TASKS, Task, default_options, get_task
from fedsieve.experiments.topology_config import STAR, TopologyConfig
from fedsieve.objectives.linear import Linear
from fedsieve.objectives.losses import Loss
from fedsieve.objectives.module import GateGranularity, Module
from fedsieve.runtime.buffers import has_buffers
from fedsieve.runtime.cores import Workers
from fedsieve.runtime.failures import Failures
from fedsieve.runtime.privacy import Privacy
from fedsieve.runtime.refit import can_refit, require_refit
from fedsieve.runtime.rounds import cohort_size
from fedsieve.runtime.simulate import Engine


@dataclass(frozen=True, kw_only=True)
class ResolvedFederation:
    """FederationConfig with every default filled in."""

    clients: int
    participation: float
    partition: Partition
    alpha: float
    client_weighting: ClientWeighting
    center_features: bool
    server_examples: int
    aggregator: Aggregator
    max_malicious_fraction: float | None
    max_norm_ratio: float
    max_claimed_examples: int | None


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """RunConfig with every default filled in; made by `resolve`."""

    task: str
    algorithm_name: str
    density: float
    rounds: int
    seed: int
    engine: Engine
    precision: Precision
    device: str
    workers: Workers
    byte_counting: ByteCounting
    evaluate_on: EvaluationSplit
    gate_granularity: GateGranularity
    refit: bool
    centralized: bool
    centralized_steps: CentralizedSteps
    data: Any
    federation: ResolvedFederation
    topology: TopologyConfig
    failures: Failures
    privacy: Privacy
    model: str | None
    init_weights: Path | None
    algorithm: BaseAlgorithm
    task_spec: Task = field(compare=False, repr=False)
    objective: Linear | Module = field(compare=False, repr=False)

    @property
    def config(self) -> RunConfig:
        """The settings as a RunConfig in which nothing is None that has a default: resolve(run.config) == run."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(RunConfig)}
        values["federation"] = FederationConfig(**asdict(self.federation))
        return RunConfig(**values)

    @property
    def trained_algorithm(self) -> BaseAlgorithm:
        """The algorithm as it is trained: centralized, one client computes the gradients of a whole cohort (decision F12)."""
        if not self.centralized or self.centralized_steps is CentralizedSteps.CLIENT:
            return self.algorithm
        cohort = cohort_size(self.federation.clients, self.federation.participation)
        (name, _), *_ = batches_per_round(type(self.algorithm), 0).items()
        return replace(self.algorithm, **{name: cohort * getattr(self.algorithm, name)})

    @property
    def metric(self) -> str:
        """The name of the metric that is compared."""
        return self.task_spec.metric

    @property
    def settings_dict(self) -> dict[str, Any]:
        """All settings that determine the result, as plain values: the content of config.toml."""
        hides_refit = not self.refit and self.task != "file"  # runs before it existed have the same id
        hidden = (*SECTIONS, "algorithm_name", "workers", *(("refit",) if hides_refit else ()))
        top = {f.name: _to_plain(getattr(self, f.name)) for f in fields(RunConfig) if f.name not in hidden}
        names = (name for name in SECTIONS if name != "algorithm" and (name != "topology" or self.topology.name != STAR))
        sections = {name: _plain_dict(asdict(getattr(self, name))) for name in names}
        options = {f.name: getattr(self.algorithm, f.name) for f in fields(self.algorithm) if f.name in self.algorithm.option_names()}
        return {**top, **sections, "algorithm": {"name": self.algorithm_name} | _plain_dict(options)}

    @property
    def id(self) -> str:
        """A readable name that ends in the hash of the settings."""
        digest = blake2b(json.dumps(self.settings_dict, sort_keys=True).encode(), digest_size=4).hexdigest()
        return f"{self.task}-{self.algorithm_name}-{digest}"

    @property
    def fingerprint(self) -> int:
        """A hash of model and algorithm; a packet with another fingerprint is rejected."""
        return wire.compute_fingerprint(self.algorithm_name, self.objective.layout)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return torch.float64 if self.precision is Precision.DOUBLE else torch.float32


def resolve(config: RunConfig) -> ResolvedRun:
    """Return the run of a config with every value final; raise ValueError if its settings contradict each other."""
    for kind, name, known in (("task", config.task, TASKS), ("algorithm", config.algorithm_name, ALGORITHMS)):
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; use one of {', '.join(known)}")
    data = TASKS[config.task].data_options() if config.data is None else config.data
    task = get_task(config.task, data, config.model)
    if config.task == "file":
        data = replace(data, standardize=_resolve_standardize(config, data.standardize))
    algorithm = config.algorithm
    if not isinstance(algorithm, BaseAlgorithm):
        algorithm_type = algorithm_class(config.algorithm_name)
        require_recipes(config.algorithm_name, (algorithm or {}).get("recipe"))
        options = parse_settings(field_types(algorithm_type, algorithm_type.option_names()), algorithm or {}, "algorithm.")
        recipe = options.get("recipe", Recipe.RECOMMENDED)
        algorithm = algorithm_type(**default_options(task, algorithm_type, config.model, recipe) | options)
    federation = _resolve_federation(config, task, algorithm)
    config.privacy.validate(federation, algorithm.all_reply_fields, centralized=config.centralized)
    privacy = config.privacy
    if privacy.noise_multiplier and privacy.delta is None:
        privacy = replace(privacy, delta=0.1 / federation.clients)
    density = task.density if config.density is None else config.density
    robustness = {} if federation.max_malicious_fraction is None else {"max_malicious_fraction": federation.max_malicious_fraction}
    objective = task.make_objective(data, config.gate_granularity)
    algorithm = replace(
        algorithm,
        density=density,
        client_weighting=federation.client_weighting,
        aggregator=federation.aggregator,
        privacy=privacy.mechanism(cohort_size(federation.clients, federation.participation)),
        **robustness,
        **_size_dependent_options(algorithm, objective),
    )
    if config.topology.name != STAR:
        _validate_topology(config, federation, algorithm, objective)
    has_one_server = config.topology.name == STAR and not federation.server_examples
    final = {
        "data": data,
        "refit": config.task == "file" and has_one_server and can_refit(algorithm, objective) if config.refit is None else config.refit,
        "federation": federation,
        "privacy": privacy,
        "density": density,
        "rounds": algorithm.default_rounds if config.rounds is None else config.rounds,
        "algorithm": algorithm,
    }
    run = ResolvedRun(
        **{f.name: getattr(config, f.name) for f in fields(config)} | final,
        task_spec=task,
        objective=objective,
    )
    _validate(run)
    return run


def _size_dependent_options(algorithm: BaseAlgorithm, objective: Linear | Module) -> dict[str, Any]:
    """Return the options whose default depends on the size of the model: eta_lambda of the paper's constraint."""
    if isinstance(algorithm, GatedAlgorithm) and algorithm.dual_update is DualUpdate.ASCENT and algorithm.recipe is not Recipe.RECOMMENDED:
        return {"dual_rate": algorithm.dual_rate_per_round(objective.layout)}
    return {}


def _resolve_federation(config: RunConfig, task: Task, algorithm: BaseAlgorithm) -> ResolvedFederation:
    federation, is_private = config.federation, bool(config.privacy.noise_multiplier)
    clients = task.clients if federation.clients is None else federation.clients
    participation = federation.participation
    if participation is None and config.topology.is_gossip:
        participation = 1.0
    if participation is None:
        alone = config.centralized and config.centralized_steps is CentralizedSteps.CLIENT
        participation = 1.0 if alone else max(algorithm.default_participation, min(task.min_cohort / clients, 1.0))
    client_weighting = federation.client_weighting
    if client_weighting is None:
        equal = is_private or federation.aggregator is not Aggregator.WEIGHTED
        client_weighting = ClientWeighting.UNIFORM if equal else algorithm.client_weighting
    max_norm_ratio = federation.max_norm_ratio
    if max_norm_ratio is None:
        max_norm_ratio = inf if is_private else algorithm.default_max_norm_ratio
    final = {
        "clients": clients,
        "participation": participation,
        "partition": task.partition if federation.partition is None else federation.partition,
        "client_weighting": client_weighting,
        "max_norm_ratio": max_norm_ratio,
    }
    return ResolvedFederation(**asdict(federation) | final)


def _resolve_standardize(config: RunConfig, standardize: bool | None) -> bool:
    """Return whether clients standardize the features of a user's file, so that weights are comparable (decision F11)."""
    is_module, is_private = config.model is not None and ":" in config.model, bool(config.privacy.noise_multiplier)
    if standardize and is_module:
        raise ValueError(f"data.standardize applies to linear models, and --model {config.model} is a module; leave it out")
    if standardize and is_private:
        raise ValueError(
            "data.standardize sends the means of every client without noise, which privacy.noise-multiplier forbids; leave it out"
        )
    return not is_module and not is_private if standardize is None else standardize


def _validate(run: ResolvedRun) -> None:
    """Raise ValueError if settings contradict each other."""
    federation, algorithm = run.federation, run.algorithm
    if run.centralized and run.centralized_steps is CentralizedSteps.CLIENT and federation.participation != 1:
        raise ValueError(
            f"--centralized-steps client trains as much as one client, which takes part in every round; "
            f"leave out federation.participation {federation.participation:g}"
        )
    num_examples = run.data.num_examples
    if num_examples is not None and federation.clients > num_examples and not run.centralized:
        raise ValueError(
            f"federation.clients {federation.clients} is more than data.num-examples {num_examples}: some clients would have no example; "
            f"use at most {num_examples} clients"
        )
    if int(federation.participation * federation.clients + 1e-9) < 1 and not run.centralized:
        raise ValueError(
            f"federation.participation {federation.participation:g} of {federation.clients} clients picks nobody; "
            f"use at least {1 / federation.clients:g}"
        )
    cohort = cohort_size(federation.clients, federation.participation)
    num_malicious = floor_of_decimal(algorithm.max_malicious_fraction, cohort)
    if federation.aggregator is Aggregator.KRUM and cohort < 2 * num_malicious + 3:
        raise ValueError(
            f"federation.aggregator krum with federation.max-malicious-fraction {algorithm.max_malicious_fraction:g} needs "
            f"{2 * num_malicious + 3} replies to tolerate {num_malicious} malicious ones, and a cohort has {cohort}; "
            f"raise federation.participation or lower federation.max-malicious-fraction"
        )
    if federation.partition is Partition.LABEL and run.task_spec.loss in (Loss.SQUARED, Loss.MULTILABEL):
        raise ValueError(
            f"federation.partition label needs one class per example, and task {run.task} has none; use quantity, iid or clusters"
        )
    if federation.partition is Partition.NATURAL:
        if run.task_spec.partition is not Partition.NATURAL:
            raise ValueError(
                f"federation.partition natural needs data that name the client of each example, and those of task {run.task} do not; "
                f"leave it out"
            )
        if federation.clients != run.task_spec.clients:
            raise ValueError(
                f"federation.clients {federation.clients} contradicts federation.partition natural: the data name "
                f"{run.task_spec.clients} clients; leave it out, or use another partition"
            )
    if run.refit:
        require_refit(algorithm, run.objective)
        if run.topology.name != STAR:
            raise ValueError(f"refit needs one server for all clients, and topology is {run.topology.name}; leave one of them out")
        if federation.server_examples:
            raise ValueError(
                f"refit fits the examples of the clients, and federation.server-examples {federation.server_examples} are the server's; "
                f"leave one of them out"
            )
    algorithm.final_budget(run.objective.layout)
    require_effect(algorithm)
    if algorithm.step_rule is StepRule.CAPPED and not isinstance(run.objective, Linear):
        raise ValueError("algorithm.step-rule capped needs a bound on the curvature, which only linear models have; use polyak or constant")
    if run.device != "cpu" and not _has_device(run.device):
        raise ValueError(f"device {run.device} is not available on this machine; use --device cpu")


def _validate_topology(config: RunConfig, federation: ResolvedFederation, algorithm: BaseAlgorithm, objective: Linear | Module) -> None:
    """Raise ValueError if a setting contradicts a tree or a graph without a server."""
    topology, memory = config.topology, algorithm.engine_support.memory
    if config.centralized:
        raise ValueError(f"--topology {topology.name} has several nodes, and --centralized trains on one; leave out one of them")
    if not topology.is_gossip:
        if memory is not None and memory.catch_up is not None:
            raise ValueError(
                f"--topology tree passes one broadcast on to all clients, and algorithm {config.algorithm_name} sends each client its own; "
                f"use another algorithm, or --topology star"
            )
        return
    rules = node_rules(algorithm, config.algorithm_name)
    if rules.needs_fixed_links and (topology.one_peer or config.failures.dropout):
        option = "topology.one-peer" if topology.one_peer else "failures.dropout"
        raise ValueError(
            f"{option}: without a server {config.algorithm_name} is CHOCO-SGD, in which every neighbour must receive every message to keep "
            f"its copy; leave it out, or use sieve, flops-pa or fed-iter-ht"
        )
    default, unset = FederationConfig(), config.federation
    needs_server = {
        "federation.participation": federation.participation != 1.0,
        "federation.client-weighting": unset.client_weighting not in (None, algorithm.client_weighting),
        "federation.aggregator": unset.aggregator is not default.aggregator,
        "federation.server-examples": bool(unset.server_examples),
        "federation.max-norm-ratio": unset.max_norm_ratio not in (None, algorithm.default_max_norm_ratio),
        "federation.max-claimed-examples": unset.max_claimed_examples is not None,
        "privacy.noise-multiplier": bool(config.privacy.noise_multiplier),
        "failures.straggler-fraction": bool(config.failures.straggler_fraction),
        "failures.malicious-fraction": bool(config.failures.malicious_fraction),
        "--engine loop": config.engine is Engine.LOOP,
        "--workers": config.workers not in (1, "auto"),
    }
    if named := [name for name, is_set in needs_server.items() if is_set]:
        raise ValueError(f"{named[0]} has no effect without a server, and --topology {topology.name} has none; leave it out")
    if has_buffers(objective):
        raise ValueError(
            f"--topology {topology.name}: nodes do not exchange buffers such as running statistics of BatchNorm; use GroupNorm or a star"
        )


def _to_plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value


def _plain_dict(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _to_plain(value) for name, value in values.items()}


def _has_device(device: str) -> bool:
    try:
        return torch.ones(1, device=device).item() == 1
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
