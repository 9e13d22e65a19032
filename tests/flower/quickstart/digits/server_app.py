"""quickstart-digits: the server app, as in Flower's PyTorch quickstart."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits.task import Net, load_central_test_set, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_evaluate = context.run_config["fraction-evaluate"]
    num_rounds = context.run_config["num-server-rounds"]
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_evaluate=fraction_evaluate, min_available_nodes=context.run_config["partitions"])
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=num_rounds,
        evaluate_fn=global_evaluate,
    )
    if context.run_config["result"]:
        write_result(Path(context.run_config["result"]), result)


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(model, load_central_test_set(), torch.device("cpu"))
    return MetricRecord({"accuracy": accuracy, "loss": loss})


def write_result(path, result):
    """Write metrics by round and the number of nonzero values of each array, for the test that runs this app."""
    weights = result.arrays.to_torch_state_dict()
    metrics = {
        "server": result.evaluate_metrics_serverapp,
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
    }
    plain = {kind: {number: dict(record) for number, record in by_round.items()} for kind, by_round in metrics.items()}
    counts = {name: [int((array != 0).sum()), array.numel()] for name, array in weights.items()}
    path.write_text(json.dumps(plain | {"nonzero": counts}))
