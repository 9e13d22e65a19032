"""Flower's simulation on Ray: its FedAvg of the gated model, dense arrays both ways, no packets encoded."""

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import psutil
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.contenders.gated_model import Gated
from benchmarks.contenders.pace import paced
from benchmarks.workloads import WORKLOADS, Workload, draw

ROUNDS = 100_000
ROWS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def family() -> list[psutil.Process]:
    """This process and all it started: Ray's daemons and actors."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> float:
    """CPU time of all of them."""
    total = 0.0
    for process in family():
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:  # it ended meanwhile
            continue
    return total


def peak_mb() -> float:
    """Memory of all of them now."""
    return sum(process.memory_info().rss for process in family() if process.is_running()) / 2**20


def rows_of(work: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, drawn once a process."""
    if work.name not in ROWS:
        x, y = draw(work)
        ROWS[work.name] = torch.from_numpy(x), torch.from_numpy(y)
    return ROWS[work.name]


def client_app(work: Workload) -> ClientApp:
    """A client that takes the local steps."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y = rows_of(work)
        model = Gated(work)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = model.optimizer(work)
        k = int(context.node_config["partition-id"])
        order = (k * work.rows + torch.randperm(work.rows)).repeat(-(-work.batch * work.steps // work.rows))
        for step in range(work.steps):
            picked = order[step * work.batch : (step + 1) * work.batch]
            optimizer.zero_grad()
            model.loss(x.index_select(0, picked), y.index_select(0, picked)).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": work.rows})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def prepare(work: Workload):
    """One round, all clients."""
    work = WORKLOADS[work.name]

    def run(tick) -> None:
        class Paced(FedAvg):
            def aggregate_train(self, server_round, replies):
                aggregated = super().aggregate_train(server_round, replies)
                tick()
                return aggregated

        server = ServerApp()

        @server.main()
        def main(grid: Grid, _: Context) -> None:
            strategy = Paced(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.clients)
            strategy.start(grid=grid, initial_arrays=ArrayRecord(Gated(work).state_dict()), num_rounds=ROUNDS)

        backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, client_app(work), num_supernodes=work.clients, backend_config=backend)

    return paced(run)
