"""The data of a run on its clients, the exchange over them, and the evaluation of parameters."""

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_matrix
from torch import Tensor

from fedsieve.algorithms.gossip import node_rules
from fedsieve.core.reply_validation import ReplyLimits
from fedsieve.core.types import CsrMatrix, Exchange, Traffic
from fedsieve.data import standardization, user_files
from fedsieve.data.federated_dataset import FederatedDataset, Matrix, PartitionSpec
from fedsieve.data.standardization import Standardizer
from fedsieve.data.user_files import UserFiles
from fedsieve.experiments.config import ByteCounting, EvaluationSplit
from fedsieve.experiments.resolve import ResolvedRun
from fedsieve.experiments.topology_config import STAR
from fedsieve.models.build import build_model
from fedsieve.models.initial_weights import load_initial_weights
from fedsieve.models.sparse_model import SparseModel
from fedsieve.objectives.linear import Linear, Loss
from fedsieve.objectives.module import Module
from fedsieve.runtime import metrics, simulate
from fedsieve.runtime.attacks import Attack
from fedsieve.runtime.batched import BatchedEngine
from fedsieve.runtime.client_data import ClientData
from fedsieve.runtime.client_memory import require_memory
from fedsieve.runtime.cluster import ClusterExchange
from fedsieve.runtime.context import RunContext
from fedsieve.runtime.delivery import AmongRanks, InMemory
from fedsieve.runtime.failures import sample_malicious_clients
from fedsieve.runtime.gossip import Gossip
from fedsieve.runtime.local_training import ClientEngine
from fedsieve.runtime.loop import LoopEngine
from fedsieve.runtime.ranks import Ranks
from fedsieve.runtime.rounds import Population, RoundResult, cohort_size
from fedsieve.runtime.sparse_training import require_restricted_steps


class Simulation:
    """The data of a run as tensors; it is generated or loaded once. Every rank of a cluster has all of it and trains some clients."""

    def __init__(self, run: ResolvedRun, ranks: Ranks | None = None) -> None:
        self.run, self.ranks = run, ranks
        spread = PartitionSpec(run.federation.clients, run.federation.partition, run.federation.alpha)
        self.dataset: FederatedDataset = run.task_spec.load(run.data, spread, run.seed, run.federation.server_examples)
        if run.evaluate_on is EvaluationSplit.VALIDATION:
            self.dataset = validation_split(self.dataset)
        if len(self.dataset.counts) != run.federation.clients:
            raise ValueError(
                f"federation.clients {run.federation.clients} contradicts data.client: the rows name {len(self.dataset.counts)} clients; "
                f"leave it out"
            )
        if run.federation.clients > self.dataset.counts.sum() and not run.centralized:
            raise ValueError(
                f"federation.clients {run.federation.clients} is more than the {self.dataset.counts.sum()} rows there are; "
                f"use fewer clients"
            )

    def validate(self) -> None:
        """Raise ValueError before anything is written if the examples, the initial weights or the module do not fit."""
        require_restricted_steps(self.run.algorithm, self.client_data)
        if self.run.topology.name != STAR:
            self._validate_topology()
        require_memory(self.run.algorithm, self.run.objective.layout, self.num_remembering_clients, self.run.dtype)
        if self.run.init_weights is not None:
            load_initial_weights(self.run.init_weights, self.run.objective)
        if isinstance(self.run.objective, Module):
            x, y = self.test_set
            try:
                outputs = self.run.objective.predict(self.run.objective.flatten(self.run.objective.module).to(self.run.dtype), x[:2])
            except RuntimeError as error:
                shape = " x ".join(map(str, x.shape[1:]))
                raise ValueError(f"--model {self.run.model} cannot take rows of {shape} numbers: {str(error).splitlines()[0]}") from None
            if outputs.shape[-1] <= int(y.max()):
                raise ValueError(f"--model {self.run.model} has {outputs.shape[-1]} outputs; there are {int(y.max()) + 1} classes")

    def _validate_topology(self) -> None:
        """Raise ValueError if the nodes cannot run without a server."""
        topology, num_nodes = self.run.topology, len(self.examples_per_client)
        if not topology.is_gossip:
            return
        topology.make_graph(num_nodes)
        if self.client_data.is_sparse:
            raise ValueError(f"--topology {topology.name} needs dense examples, and those of task {self.run.task} are sparse; use a star")
        if (empty := np.flatnonzero(self.examples_per_client == 0)).size:
            raise ValueError(
                f"--topology {topology.name}: node {empty[0]} has no examples (as {empty.size} of {num_nodes}), and every node trains; "
                f"use fewer clients, another federation.partition, or a larger federation.alpha than {self.run.federation.alpha:g}"
            )

    def with_config(self, run: ResolvedRun) -> "Simulation":
        """Return the same data for another algorithm."""
        other = Simulation.__new__(Simulation)
        other.run, other.dataset, other.ranks = run, self.dataset, self.ranks
        return other

    @cached_property
    def examples_per_client(self) -> np.ndarray:
        """The number of examples of each client."""
        counts = self.dataset.counts
        return np.array([counts.sum()]) if self.run.centralized else counts

    @cached_property
    def population(self) -> Population:
        """The clients that may be sampled."""
        return Population(len(self.examples_per_client), np.flatnonzero(self.examples_per_client).tolist())

    @property
    def num_remembering_clients(self) -> int:
        """The number of clients that take part in some round at most, so that they may keep something between their rounds."""
        cohort = cohort_size(len(self.examples_per_client), 1.0 if self.run.centralized else self.run.federation.participation)
        return min(len(self.population.clients_with_data), self.run.rounds * cohort)

    @property
    def bytes_examples(self) -> int:
        """The bytes of all training examples of the clients: four per number, and four per position in sparse ones."""
        x = self.dataset.x
        return 4 * (2 * x.nnz if isinstance(x, csr_matrix) else x.size) + 4 * self.dataset.y.size

    @property
    def reply_limits(self) -> ReplyLimits:
        """The limits by which replies are rejected."""
        federation = self.run.federation
        return ReplyLimits(
            max_norm_ratio=federation.max_norm_ratio,
            max_claimed_examples=federation.max_claimed_examples or int(self.examples_per_client.max()),
        )

    @cached_property
    def standardizer(self) -> Standardizer | None:
        """The federated standardization of a user's data for linear models; None if examples are used as they are."""
        if not (isinstance(self.run.data, UserFiles) and self.run.data.standardize):
            return None
        squared = self.run.task_spec.loss is Loss.SQUARED
        return standardization.fit_standardizer(
            self.dataset.x,
            self.dataset.y,
            self.examples_per_client,
            scale_features=True,
            scale_target=squared,
            center=self.run.data.intercept,
        )

    @property
    def feature_std(self) -> np.ndarray | None:
        """The standard deviation of each feature, if the data are standardized."""
        if self.standardizer is None or not isinstance(self.dataset.x, np.ndarray):
            return None
        return self.standardizer.features.scale

    @property
    def standardization_traffic(self) -> Traffic:
        """The traffic of federated standardization, the same in both directions."""
        sent = 0 if self.standardizer is None else self.standardizer.bytes_each_way * len(self.population.clients_with_data)
        return Traffic(paper_formula=sent, payload=sent, total=sent, weights=sent)

    def to_standardized(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return parameters for original examples as parameters for standardized ones."""
        if self.standardizer is None:
            return theta
        assert isinstance(self.run.objective, Linear), "only linear models are standardized"
        matrix, intercept = self.run.objective.unflatten(theta)
        return self.standardizer.to_standardized(
            matrix.double().numpy(force=True), None if intercept is None else intercept.double().numpy(force=True)
        ).to(theta)

    def to_original(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return parameters for standardized examples as parameters for original ones; nonzero weights stay nonzero."""
        if self.standardizer is None:
            return theta
        assert isinstance(self.run.objective, Linear), "only linear models are standardized"
        matrix, free = self.run.objective.unflatten(theta)
        coef, intercept = self.standardizer.to_original(matrix.cpu(), None if free is None else free.cpu())
        parts = (coef.reshape(-1), intercept if self.run.objective.intercept else [])
        found = torch.from_numpy(np.concatenate(parts)).to(theta)
        return torch.where((found == 0) & (theta != 0), torch.finfo(torch.float32).tiny, found)

    @cached_property
    def client_data(self) -> ClientData:
        """The examples of all clients, standardized and centered as configured; with the attack `label-flip` some have wrong targets."""
        x, y = self._standardize(self.dataset.x, self.dataset.y)
        if self.run.federation.center_features:
            if isinstance(x, csr_matrix):
                raise ValueError("federation.center-features would make sparse examples dense; leave it out")
            x, y = center_per_client(x, y, self.examples_per_client, center_targets=self.run.task_spec.loss is Loss.SQUARED)
        data, failures = self._make_client_data(x, y, self.examples_per_client), self.run.failures
        if failures.attack is not Attack.LABEL_FLIP:
            return data
        return data.flip_labels(sample_malicious_clients(failures, self.population.clients_with_data, self.run.seed))

    @cached_property
    def server_data(self) -> ClientData:
        """The examples of the server."""
        return self._make_client_data(*self._standardize(self.dataset.server_x, self.dataset.server_y), [len(self.dataset.server_y)])

    @cached_property
    def test_set(self) -> tuple[Tensor | CsrMatrix, Tensor]:
        """The test set; for linear models stored feature by feature, so that a sparse model reads only its features."""
        x = self.dataset.test_x
        if isinstance(x, np.ndarray):
            by_feature = isinstance(self.run.objective, Linear)
            x = self._to_tensor(np.ascontiguousarray(x.T)).T if by_feature else self._to_tensor(x)
        return x, self._to_tensor(self.dataset.test_y)

    @cached_property
    def truth(self) -> Tensor | None:
        """The true coefficients (outputs, features), if they are known."""
        return None if self.dataset.truth is None else self._to_tensor(self.dataset.truth)

    @property
    def oracle_value(self) -> float | None:
        """The metric of the true coefficients, if they are known."""
        return None if self.truth is None else self.evaluate(self.truth.reshape(-1))[self.run.metric]

    def make_gossip(self) -> Gossip:
        """Return the run without a server."""
        run, exchange, num_nodes = self.run, self.make_exchange(self.client_data, self.run.seed), len(self.examples_per_client)
        assert isinstance(exchange.client_engine, ClientEngine), "`validate` refuses sparse examples"
        return Gossip(
            rules=node_rules(run.algorithm, run.algorithm_name),
            engine=exchange.client_engine,
            topology=run.topology.make_graph(num_nodes),
            mixing_steps=run.topology.num_mixing_steps,
            failures=run.failures,
            delivery=InMemory(num_nodes) if self.ranks is None else AmongRanks(num_nodes, self.ranks),
            sample_bytes=run.byte_counting is ByteCounting.SAMPLED,
        )

    def evaluate_nodes(self, gossip: Gossip, result: RoundResult) -> dict[str, float]:
        """Return the metric of the worst node and the mean over all nodes."""
        values = [self.evaluate(self.run.algorithm.parameters(state))[self.run.metric] for state in gossip.node_states(result)]
        return {"worst_node": min(values), "mean_node": sum(values) / len(values)}

    def make_exchange(self, client_data: ClientData, seed: int) -> LoopEngine | BatchedEngine:
        """Return the engine of the run over the given examples."""
        run = self.run
        context = RunContext(
            algorithm=run.trained_algorithm,
            objective=run.objective,
            seed=seed,
            fingerprint=run.fingerprint,
            dtype=run.dtype,
            device=run.device,
        )
        sample_bytes = run.byte_counting is ByteCounting.SAMPLED
        return simulate.make_exchange(context, client_data, engine=run.engine, sample_bytes=sample_bytes, workers=run.workers)

    def divide_among_ranks(self, engine: LoopEngine | BatchedEngine) -> Exchange:
        """Return the exchange in which the ranks of the cluster do what the engine does; without a cluster the engine."""
        return engine if self.ranks is None else ClusterExchange(context=engine.context, data=engine.data, ranks=self.ranks)

    def evaluate(self, theta: Tensor) -> dict[str, float]:
        """Return the test metrics of a parameter vector, on original examples."""
        x, y = self.test_set
        outputs = self.run.objective.predict(self.to_original(theta), x)  # pyright: ignore[reportArgumentType]  # modules: no CSR
        return metrics.METRICS_BY_LOSS[self.run.task_spec.loss][0](outputs, y)

    def support_recovery(self, theta: Tensor) -> dict[str, float]:
        """Return the metrics of support recovery, if the true support is known."""
        if self.truth is None:
            return {}
        return metrics.support_recovery((theta[: self.truth.numel()] != 0).view_as(self.truth), self.truth != 0)

    def build_model(self, parameters: Tensor) -> SparseModel:
        """Return the model of a parameter vector in the user's units, with the names of classes and features of the user's file."""
        run, names = self.run, {}
        if run.task == "file":
            table = user_files.read_table(run.data.path, run.data.target, run.data.client)
            names = {
                "class_names": () if run.task_spec.loss is Loss.SQUARED else user_files.class_names(table),
                "feature_names": table.feature_names if Path(run.data.path).suffix == ".csv" else None,
                "first_feature_id": table.first_feature_id,
            }
        return build_model(
            run.objective,
            self.to_original(parameters),
            self.test_set[0][:1],
            task=run.task,
            algorithm=run.algorithm_name,
            feature_std=self.feature_std,
            factory=run.model,
            **names,
        )

    def _standardize(self, x: Matrix, y: np.ndarray) -> tuple[Matrix, np.ndarray]:
        return (x, y) if self.standardizer is None else self.standardizer.apply(x, y)

    def _make_client_data(self, x: Matrix, y: np.ndarray, examples_per_client: Any) -> ClientData:
        rows = x.astype(np.dtype(str(self.run.dtype).removeprefix("torch."))) if isinstance(x, csr_matrix) else self._to_tensor(x)
        rows = cast("Tensor | CsrMatrix", rows)  # SciPy has no stubs
        workload = self.run.algorithm.workload
        return ClientData(rows, self._to_tensor(y), examples_per_client, self.run.objective, workload.batch_size, workload.batch_sampling)

    def _to_tensor(self, array: np.ndarray) -> Tensor:
        kind = self.run.dtype if array.dtype.kind == "f" else torch.int64
        return torch.from_numpy(array).to(device=self.run.device, dtype=kind)


def data_key(run: ResolvedRun) -> str:
    """Return a key that is equal for runs with the same examples on the same clients."""
    federation = run.federation
    parts = {**asdict(run.data), "task": run.task, "seed": run.seed, "evaluate_on": run.evaluate_on, "server": federation.server_examples}
    parts |= {"clients": federation.clients, "partition": federation.partition, "alpha": federation.alpha}
    return json.dumps(parts, sort_keys=True, default=str)


_last_simulation: dict[str, Simulation] = {}
"""The last simulation of this process by data key: the next run often has the same data."""


def cached_simulation(run: ResolvedRun) -> Simulation:
    """Return the simulation of a run, with the data of the last one if they are the same."""
    if (key := data_key(run)) not in _last_simulation:
        _last_simulation.clear()
        _last_simulation[key] = Simulation(run)
    return _last_simulation[key].with_config(run)


def validation_split(dataset: FederatedDataset) -> FederatedDataset:
    """Return the data set with a tenth of each client's examples as test set; a client's examples are in random order."""
    starts = np.repeat(np.cumsum(dataset.counts) - dataset.counts, dataset.counts)
    held = np.arange(len(dataset.y)) - starts < np.repeat(dataset.counts // 10, dataset.counts)
    rest = {
        "x": dataset.x[~held],
        "y": dataset.y[~held],
        "counts": dataset.counts - dataset.counts // 10,
    }
    source = f"{dataset.source}, a tenth of each client's training examples as test set"
    return dataset._replace(**rest, source=source, test_x=dataset.x[held], test_y=dataset.y[held])


def center_per_client(
    x: np.ndarray, y: np.ndarray, examples_per_client: np.ndarray, *, center_targets: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (and targets) of each client minus their mean."""
    starts = np.concatenate(([0], np.cumsum(examples_per_client)[:-1]))[examples_per_client > 0]
    held = examples_per_client[examples_per_client > 0]
    x = x - np.repeat(np.add.reduceat(x, starts, axis=0) / held[:, None], held, axis=0)
    return x, y - np.repeat(np.add.reduceat(y, starts) / held, held) if center_targets else y
