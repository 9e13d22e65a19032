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

from benchmarks.contenders.gated_model import GatedLinear
from benchmarks.contenders.stepped import run_stepwise
from benchmarks.workloads import WORKLOADS, Workload, draw_examples

MAX_ROUNDS = 100_000
EXAMPLES_CACHE: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def process_tree() -> list[psutil.Process]:
    """Return this process and its descendants: Ray's daemons and actors."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> float:
    """Return the CPU time of all these processes."""
    total = 0.0
    for process in process_tree():
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:  # the process has ended
            continue
    return total


def peak_mb() -> float:
    """Return the current memory of all these processes."""
    return sum(process.memory_info().rss for process in process_tree() if process.is_running()) / 2**20


def load_examples(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples, which are drawn once per process."""
    if workload.name not in EXAMPLES_CACHE:
        x, y = draw_examples(workload)
        EXAMPLES_CACHE[workload.name] = torch.from_numpy(x), torch.from_numpy(y)
    return EXAMPLES_CACHE[workload.name]


def build_client_app(workload: Workload) -> ClientApp:
    """Return a client app that takes the local steps."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y = load_examples(workload)
        model = GatedLinear(workload)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = model.build_optimizer(workload)
        k = int(context.node_config["partition-id"])
        order = (k * workload.examples_per_client + torch.randperm(workload.examples_per_client)).repeat(
            -(-workload.batch_size * workload.local_steps // workload.examples_per_client)
        )
        for step in range(workload.local_steps):
            batch = order[step * workload.batch_size : (step + 1) * workload.batch_size]
            optimizer.zero_grad()
            model.loss(x.index_select(0, batch), y.index_select(0, batch)).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": workload.examples_per_client})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def prepare(workload: Workload):
    """Return a function that trains one round of all clients."""
    workload = WORKLOADS[workload.name]

    def run_training(on_round_end) -> None:
        class SteppedFedAvg(FedAvg):
            def aggregate_train(self, server_round, replies):
                aggregated = super().aggregate_train(server_round, replies)
                on_round_end()
                return aggregated

        server = ServerApp()

        @server.main()
        def main(grid: Grid, _: Context) -> None:
            strategy = SteppedFedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=workload.num_clients)
            strategy.start(grid=grid, initial_arrays=ArrayRecord(GatedLinear(workload).state_dict()), num_rounds=MAX_ROUNDS)

        backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, build_client_app(workload), num_supernodes=workload.num_clients, backend_config=backend)

    return run_stepwise(run_training)
