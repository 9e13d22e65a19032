"""pfl (Apple's simulator): federated averaging of the gated model, dense, no packets encoded."""

import asyncio

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.contenders.gated_model import GatedLinear
from benchmarks.contenders.stepped import run_stepwise
from benchmarks.workloads import Workload, draw_examples

MAX_ROUNDS = 100_000


class RoundCallback(TrainingProcessCallback):
    """Calls a function after every round."""

    def __init__(self, on_round_end) -> None:
        self.on_round_end = on_round_end

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Wait until the next round is requested."""
        self.on_round_end()
        return False, Metrics()


def prepare(workload: Workload):
    """Return a function that trains one round of all clients."""
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(part) for part in draw_examples(workload))
    model = GatedLinear(workload)
    turn = {"next": 0}

    def next_client() -> int:
        turn["next"] = (turn["next"] + 1) % workload.num_clients
        return turn["next"]

    def client_dataset(k: int) -> Dataset:
        part = k * workload.examples_per_client + torch.randperm(workload.examples_per_client)
        return Dataset((x.index_select(0, part), y.index_select(0, part)))

    def run_training(on_round_end) -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())  # a thread has none
        data = FederatedDataset(client_dataset, next_client)
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=MAX_ROUNDS,
                evaluation_frequency=MAX_ROUNDS,
                train_cohort_size=workload.num_clients,
                val_cohort_size=None,
            ),
            SimulatedBackend(data, data),
            PyTorchModel(model, lambda *_, **__: model.build_optimizer(workload), torch.optim.SGD(model.parameters(), lr=1.0)),
            NNTrainHyperParams(
                local_num_epochs=workload.local_steps * workload.batch_size // workload.examples_per_client,
                local_learning_rate=workload.learning_rate,
                local_batch_size=workload.batch_size,
            ),
            NNEvalHyperParams(local_batch_size=None),
            [RoundCallback(on_round_end)],
        )

    return run_stepwise(run_training)
