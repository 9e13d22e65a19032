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

from benchmarks.contenders.gated_model import Gated
from benchmarks.contenders.pace import paced
from benchmarks.workloads import Workload, draw

ROUNDS = 100_000


class Tick(TrainingProcessCallback):
    """Stops after every round."""

    def __init__(self, tick) -> None:
        self.tick = tick

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Go on when asked to."""
        self.tick()
        return False, Metrics()


def prepare(work: Workload):
    """One round, all clients."""
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(part) for part in draw(work))
    model = Gated(work)
    turn = {"next": 0}

    def user() -> int:
        turn["next"] = (turn["next"] + 1) % work.clients
        return turn["next"]

    def rows(k: int) -> Dataset:
        part = k * work.rows + torch.randperm(work.rows)
        return Dataset((x.index_select(0, part), y.index_select(0, part)))

    def run(tick) -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())  # a thread has none
        data = FederatedDataset(rows, user)
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=ROUNDS, evaluation_frequency=ROUNDS, train_cohort_size=work.clients, val_cohort_size=None
            ),
            SimulatedBackend(data, data),
            PyTorchModel(model, lambda *_, **__: model.optimizer(work), torch.optim.SGD(model.parameters(), lr=1.0)),
            NNTrainHyperParams(
                local_num_epochs=work.steps * work.batch // work.rows, local_learning_rate=work.rate, local_batch_size=work.batch
            ),
            NNEvalHyperParams(local_batch_size=None),
            [Tick(tick)],
        )

    return paced(run)
